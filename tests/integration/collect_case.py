"""Started by test_collect.py under torchrun: rank 1 sends its file, rank 2 is gone half-way."""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddp_profiler.measure import collect, session, topology
from ddp_profiler.measure.leave import leave
from ddp_profiler.record import parts, paths

TIMEOUT_S = 4.0


class Leaves(collect.GroupCarrier):
    """Sends one chunk, and ends without a word; or stays and sends no more."""

    def send(self, data):
        super().send(data)
        if sys.argv[2] == "dies":
            os._exit(0)  # 0, or torchrun would end the others
        time.sleep(2 * TIMEOUT_S)
        os._exit(0)


def main():
    root = Path(sys.argv[1])
    place = topology.read_topology(os.environ)
    device = session.choose_device(place, "gloo", 1)
    own = session.Session(place, device, TIMEOUT_S)
    kind = Leaves if place.rank == 2 else collect.GroupCarrier
    # Groups of different sizes come before and after, as in a study.
    dist.new_group([0, 1], timeout=own.timeout)
    carrier = kind(own, [1, 2], own_group=sys.argv[3] == "own")
    dist.new_group([0, 3], timeout=own.timeout)
    if place.rank == 0:
        begin = time.monotonic()
        failed = collect.collect(carrier, [1, 2], lambda *of: parts.PartWriter(root / "0", *of))
        seconds = time.monotonic() - begin
        (root / "result.json").write_text(json.dumps([failed, seconds]))
    elif place.rank in (1, 2):
        collect.hand_over(carrier, paths.rank_file(root / "1", place.rank))
    leave(0)  # As the worker ends once connections may have been lost.


if __name__ == "__main__":
    main()

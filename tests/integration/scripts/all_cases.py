"""Trains every case of train.py twice in this process, without and inside a block of ours.

Prints, for each case, what every rank ended with and what the run says of itself. A case whose
name ends in ``-before`` has its model built before the block begins; one that ends in ``-every`` is
observed in two windows, with steps in between that are not.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_profiler
from ddp_profiler.measure.leave import leave

BEFORE = "-before"
EVERY = "-every"
CASES = (
    *train.CASES,
    "plain-before",
    "hook-before",
    "compiled_ddp-before",
    "plain-every",
    "hook-every",
    "accumulation-every",
)


def before(case):
    """Returns a case's model, as it builds it, and what trains it later."""
    built = []
    loop = train.simple_loop
    train.simple_loop = lambda model, *args, **keywords: built.append((model, args, keywords))
    try:
        train.CASES[case]()
    finally:
        train.simple_loop = loop
    model, args, keywords = built[0]
    return lambda: loop(model, *args, **keywords)


def outcome(case, block):
    torch.manual_seed(0)
    name = case.removesuffix(BEFORE).removesuffix(EVERY)
    run = before(name) if case.endswith(BEFORE) else train.CASES[name]
    with block:
        model, losses = run()
    # Bit for bit: a loss as text loses nothing.
    return train.digest(model), [repr(loss) for loss in losses]


def facts(run):
    level = run.summary.levels[0]
    return {
        "batch": (level.micro_batch, level.accumulation, level.dp),
        "observed": level.batch_check.observed,
        "notes": level.batch_check.notes,
        "collectives": level.comm.num_gradient_collectives_per_step,
        "buckets": level.comm.num_buckets,
        "source": level.comm.sources["gradient_collectives"],
        "bytes": level.comm.gradient_bytes,
        "forward_comm": level.breakdown_ms["forward_comm"],
        "parts": sum(level.breakdown_ms.values()) - level.instrumented_step_ms.mean,
        "windows": [(window.first_step, window.last_step) for window in level.windows],
        "folder": str(run.folder),
    }


def main(out, cases):
    torch.set_num_threads(1)
    # Before there is a process group, ranks meet through the launcher.
    early = ddp_profiler.profile(steps=4, warmup=2, out=Path(out) / "early", show=False)
    with early:
        dist.init_process_group("gloo")
        end = outcome("plain", contextlib.nullcontext())
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(json.dumps({"early": end, **facts(early)}), flush=True)
    for case in cases or CASES:
        plain = outcome(case, contextlib.nullcontext())
        plan = {"steps": 2, "every": 5} if case.endswith(EVERY) else {"steps": 4}
        run = ddp_profiler.profile(**plan, warmup=2, out=Path(out) / case, show=False)
        observed = outcome(case, run)
        ends = [None] * size
        dist.all_gather_object(ends, (plain, observed))
        if rank == 0:
            print(json.dumps({"case": case, "ends": ends, **facts(run)}), flush=True)
    left = [f for f in vars(DDP).values() if "ddp_profiler" in str(getattr(f, "__code__", ""))]
    assert not left, left
    dist.destroy_process_group()
    leave(0)  # A thread of gloo's may still let go of the last backward's work.


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

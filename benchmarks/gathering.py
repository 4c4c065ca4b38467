#!/usr/bin/env python3
"""What gathering the ranks' files takes at the end of a study: time and bytes, whole and condensed.

Each rank but the first sends its file of a synthetic run to rank 0, by the product's own code over
gloo on one machine, whole and condensed in turns. Between machines the link comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchkit import (
    add_file_options,
    at_least,
    end_rank,
    head,
    launch,
    machine_line,
    read_figures,
)

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""
WAYS = ("whole", "condensed")
_TIMEOUT_S = 60.0

_EPILOG = """Examples:
  python benchmarks/gathering.py                     8 ranks, 1,000 steps: half a minute
  python benchmarks/gathering.py --ranks 4 --json figures.json
  python benchmarks/gathering.py --read figures.json that table again, no run

Exit codes: 0 done; 1 a file did not come, or the launch failed; 2 wrong usage.
"""


def gather(folder: Path, rounds: int) -> None:
    """Gathers on each rank, under torchrun; rank 0 writes what it took to ``gathered.json``.

    Args:
        folder: Holds the synthetic ``run``.
        rounds: How often each way is tried.
    """
    import torch
    import torch.distributed as dist

    from ddp_profiler.condensing import to_send
    from ddp_profiler.measure import collect, session, topology
    from ddp_profiler.record import paths
    from ddp_profiler.record.parts import PartWriter

    place = topology.read_topology(os.environ)
    own = session.Session(place, session.choose_device(place, "gloo", 1), _TIMEOUT_S)
    senders, run = list(range(1, place.world_size)), folder / "run"
    told: list[dict[str, Any]] = []

    def carrier_of(said: str) -> collect.GroupCarrier:
        """Returns a carrier of one round: the store keeps what was said in those before."""
        made = collect.GroupCarrier(own, senders, own_group=False)

        def publish(key: str, value: object) -> None:
            own.publish(said + key, value)

        def learn(key: str, *words: Any, **more: Any) -> Any:
            return own.learn(said + key, *words, **more)

        made.publish, made.learn = publish, learn
        return made

    def once(way: str, carrier: collect.GroupCarrier) -> None:
        if place.rank:
            collect.hand_over(
                carrier,
                paths.rank_file(run, place.rank),
                lambda _: to_send(run, place.rank, way, len(senders)),
            )
            return
        home = folder / way
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        begin = time.monotonic()
        failed = collect.collect(carrier, senders, lambda *of: PartWriter(home, *of))
        took_s = time.monotonic() - begin
        sizes = [path.stat().st_size for path in paths.rank_files(home).values()]
        told.append({"way": way, "took_s": took_s, "bytes": sum(sizes), "failed": len(failed)})

    for number in range(rounds):
        for way in WAYS:
            carrier = carrier_of(f"{number}/{way}/")
            dist.barrier()
            once(way, carrier)
    if place.rank == 0:
        found = {"torch": str(torch.__version__), "gathered": told}
        (folder / "gathered.json").write_text(json.dumps(found))
    dist.barrier()


def measure(ranks: int, steps: int, rounds: int) -> dict[str, Any]:
    """Makes a run, gathers it in a launch, and returns what that took."""
    import synthetic_runs

    with tempfile.TemporaryDirectory() as below:
        folder = Path(below)
        synthetic_runs.write_run(folder / "run", synthetic_runs.planted(ranks, steps))
        launch(ranks, [Path(__file__).resolve(), "--gather", folder, "--rounds", str(rounds)])
        found: dict[str, Any] = json.loads((folder / "gathered.json").read_text())
    return {**found, "ranks": ranks, "steps": steps}


def render(raw: Mapping[str, Any]) -> str:
    """Returns the table, at most 80 columns wide."""
    lines = [
        f"Gathering at the end: {raw['ranks']} ranks x {raw['steps']} steps, gloo on one machine",
        machine_line(raw),
        "",
        f"{'way':<12}{'MB':>9}{'ms: first':>13}{'rounds':>9}{'median':>9}{'most':>9}",
    ]
    for way in WAYS:
        rows = [row for row in raw["gathered"] if row["way"] == way]
        # A study gathers once: what is done for the first time then is part of it.
        first, *more = (row["took_s"] * 1000 for row in rows)
        lines.append(
            f"{way:<12}{rows[0]['bytes'] / 1e6:>9.2f}{first:>13.0f}"
            f"{len(more):>9}{np.median(more):>9.0f}{max(more):>9.0f}"
        )
    lost = sum(row["failed"] for row in raw["gathered"])
    return "\n".join([*lines, *([f"{lost} files did not come"] if lost else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gathering.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=at_least(2), default=8, help="ranks (8)")
    parser.add_argument("--steps", type=at_least(5), default=1000, help="of each variant (1000)")
    parser.add_argument("--rounds", type=at_least(2), default=11, help="of each way (11)")
    parser.add_argument("--gather", type=Path, help=argparse.SUPPRESS)
    add_file_options(parser)
    options = parser.parse_args(arguments)
    if options.gather is not None:
        gather(options.gather, options.rounds)
        end_rank()
    raw = read_figures(parser, options, FORMAT_VERSION)
    if raw is None:
        load = os.getloadavg()[0]
        try:
            found = measure(options.ranks, options.steps, options.rounds)
        except RuntimeError as error:
            print(f"gathering.py: {error}", file=sys.stderr)
            return 1
        raw = {**head(FORMAT_VERSION, load), **found}
    print(render(raw))
    if options.json is not None:
        options.json.write_text(json.dumps(raw) + "\n")
    return int(any(row["failed"] for row in raw["gathered"]))


if __name__ == "__main__":
    sys.exit(main())

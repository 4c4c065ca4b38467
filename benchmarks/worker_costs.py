#!/usr/bin/env python3
"""What a study costs its launch besides training: start-up of a level, and ranks that wait.

One launch of 8 ranks measures dp = 1, 2, 4 and 8 with the timed workload. From outside, the
processor time of each rank is read all the while: what ranks outside a level use is the cost of
waiting. What a level needs before its first step is in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchkit import ROOT, add_file_options, at_least, head, machine_line, read_figures

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

GOAL_PERCENT = 1.0
"""Of a core, for a rank that waits."""

_EPILOG = """Examples:
  python benchmarks/worker_costs.py                     about a minute
  python benchmarks/worker_costs.py --ranks 4 --json figures.json
  python benchmarks/worker_costs.py --read figures.json that table again, no run

Leave the machine alone meanwhile. Exit codes: 0 done, whatever was found; 1 the launch failed;
2 wrong usage.
"""
_EVERY_S = 0.1
_MARGIN_S = 0.5
"""After a level begins and before it ends, ranks are still on their way from the last one."""
_MODEL = "timed:layers=8,forward_ms=5,backward_ms=10"


@dataclass(frozen=True)
class Sample:
    """Processor time of a rank up to a moment.

    Attributes:
        at_s: When, by the monotonic clock.
        rank: Global rank.
        cpu_s: User and system time of all its threads so far.
    """

    at_s: float
    rank: int
    cpu_s: float


def watch(ranks: int, steps: int) -> dict[str, Any]:
    """Launches a study and returns what was seen of it.

    Raises:
        RuntimeError: The launch failed.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as below:
        folder = Path(below) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", "-m", "ddp_profiler.run", "--model", _MODEL]
        command += ["--steps", str(steps), "--allreduce-max-mb", "1", "--threads-per-rank", "1"]
        command += ["--out", str(folder)]
        begun = time.monotonic()
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as launched:
            assert launched.stderr is not None
            lines: list[tuple[float, str]] = []
            reader = threading.Thread(target=_read_lines, args=(launched.stderr, lines))
            reader.start()
            while launched.poll() is None:
                samples += _look(launched.pid)
                time.sleep(_EVERY_S)
            reader.join()
            took_s = time.monotonic() - begun
        if launched.returncode:
            raise RuntimeError(
                f"the launch ended with {launched.returncode}:\n"
                + "\n".join(line for _, line in lines[-10:])
            )
        info = json.loads((folder / "run.json").read_text())
    levels = []
    for level, facts in zip(info["levels"], info["facts"], strict=True):
        times = [at for at, line in lines if f"] {level['id']}" in line]
        levels.append(
            {
                "id": level["id"],
                "dp": level["dp"],
                "ranks": level["ranks"],
                "begin_s": times[0],
                "end_s": times[-1],
                "start_up_ms": facts["start_up_ms"],
            }
        )
    nodes = info["environment"].values()
    return {
        "torch": next(iter(nodes))["torch"],
        "ranks": ranks,
        "took_s": took_s,
        "levels": levels,
        "samples": [[one.at_s, one.rank, one.cpu_s] for one in samples],
    }


def _read_lines(stream: Iterable[str], lines: list[tuple[float, str]]) -> None:
    """Adds each line to ``lines`` with the time at which it came."""
    for line in stream:
        lines.append((time.monotonic(), line.strip()))


def _look(launcher: int) -> list[Sample]:
    """Returns the processor time of each rank, of those that have begun."""
    found = []
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.Error:
        return []
    for child in children:
        try:
            rank = child.environ().get("RANK")
            used = child.cpu_times()
            now = time.monotonic()
        except (psutil.Error, OSError):
            continue
        if rank is not None:
            found.append(Sample(now, int(rank), used.user + used.system))
    return found


def idle_percent(raw: dict[str, Any], level: dict[str, Any]) -> dict[int, float]:
    """Returns what ranks outside a level used of a core while it was measured, in per cent.

    Half a second is left out at each end, while ranks are on their way.
    """
    begin, end = level["begin_s"] + _MARGIN_S, level["end_s"] - _MARGIN_S
    within = [sample for sample in raw["samples"] if begin <= sample[0] <= end]
    found = {}
    for rank in sorted(set(range(raw["ranks"])) - set(level["ranks"])):
        inside = [(at, cpu) for at, who, cpu in within if who == rank]
        if len(inside) >= 2:
            (first_at, first), (last_at, last) = inside[0], inside[-1]
            found[rank] = (last - first) / (last_at - first_at) * 100
    return found


def render(raw: dict[str, Any]) -> str:
    """Returns the table, at most 80 columns wide."""
    lines = [
        f"What a study costs besides training: {raw['ranks']} ranks, gloo on CPU",
        machine_line(raw),
        f"the whole launch took {raw['took_s']:.1f} s",
        "",
        f"{'level':<8}{'seen, s':>9}{'start-up, ms':>14}{'ranks waiting':>15}"
        f"{'% of a core: mean':>19}{'most':>7}",
    ]
    worst = []
    for level in raw["levels"]:
        idle = list(idle_percent(raw, level).values())
        worst += idle
        start_up = "-" if level["start_up_ms"] is None else f"{level['start_up_ms']:.0f}"
        shares = (f"{np.mean(idle):.2f}", f"{max(idle):.2f}") if idle else ("-", "-")
        lines.append(
            f"{level['id']:<8}{level['end_s'] - level['begin_s']:>9.1f}{start_up:>14}"
            f"{len(idle):>15}{shares[0]:>19}{shares[1]:>7}"
        )
    if worst:
        met = "met" if max(worst) < GOAL_PERCENT else "missed"
        lines += ["", f"Goal: a rank that waits uses below {GOAL_PERCENT:g} % of a core: {met}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="worker_costs.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=at_least(2), default=8, help="ranks (8)")
    parser.add_argument("--steps", type=at_least(2), default=20, help="steps of each level (20)")
    add_file_options(parser)
    options = parser.parse_args(arguments)
    raw = read_figures(parser, options, FORMAT_VERSION)
    if raw is None:
        load = os.getloadavg()[0]
        try:
            raw = {**head(FORMAT_VERSION, load), **watch(options.ranks, options.steps)}
        except RuntimeError as error:
            print(f"worker_costs.py: {error}", file=sys.stderr)
            return 1
    print(render(raw))
    if options.json is not None:
        options.json.write_text(json.dumps(raw) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

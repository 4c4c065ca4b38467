#!/usr/bin/env python3
"""What the analysis of many ranks takes: time, memory and bytes, on synthetic run folders.

Each folder is made by synthetic_runs.py, analysed by the product's own command in a process of its
own, and removed. What was planted must be found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic_runs
from benchkit import ROOT, add_file_options, head, kept_figures

from ddp_profiler.condensing import condensed_file
from ddp_profiler.record import paths

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""
GOAL_S = 60.0
GOAL_MIB = 2048.0
_OF_THE_GOAL = (1024, 1000)
_MOST_OFF_MS = 0.02
"""Parts follow from the plan to the ns; this is what differing means and roundings may add."""

_EPILOG = """Figures are kept as they come: an interrupted run goes on where it was.

Examples:
  python benchmarks/scale.py --json figures.json             all of it, about 6 minutes and 3 GB
  python benchmarks/scale.py --quick                         a minute: does it run?
  python benchmarks/scale.py --read figures.json             the table again, no run
"""


@dataclass(frozen=True)
class Case:
    """A folder to analyse; ``way`` is ``whole``, ``condensed`` or ``report``."""

    name: str
    ranks: int
    steps: int
    script: bool = False
    ways: tuple[str, ...] = ("whole",)


CASES = (
    *(Case("ranks", ranks, 1000) for ranks in (8, 64, 256)),
    *(Case("steps", 1024, steps) for steps in (250, 500)),
    Case("goal", 1024, 1000, ways=("whole", "condensed", "report")),
    Case("small", 8, 1000, ways=("condensed",)),
    Case("script", 1024, 1000, script=True, ways=("whole", "condensed")),
)
QUICK = (
    Case("goal", 16, 100, ways=("whole", "condensed", "report")),
    Case("script", 16, 100, script=True, ways=("whole", "condensed")),
)


def measure_command(words: Sequence[str | Path], out: Path) -> dict[str, float]:
    """Runs a command of the product; returns its wall and processor time and its peak memory.

    Raises:
        RuntimeError: It ended with another code than 0.
    """
    # Of our own interpreter: what it imports is part of the command.
    argv = [sys.executable, "-m", "ddp_profiler.cli", *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.monotonic()
    with out.open("wb") as file:
        pid = os.posix_spawn(
            sys.executable,
            argv,
            environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), 1)],
        )
        _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "wall_s": time.monotonic() - begin,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
    }


def check(summary: Mapping[str, Any], truth: Mapping[str, Any]) -> list[str]:
    """Returns what the summary has wrong of what was planted; empty if nothing."""
    (level,) = summary["levels"]
    wrong = ["the run is partial"] if summary["run"]["partial"] else []
    found = {late["rank"]: late for late in level["stragglers"]}
    for late in truth["late"]:
        one = found.pop(late["rank"], None)
        fixed = late["share"] > 0.5
        if one is None:
            wrong.append(f"rank {late['rank']} is not named")
        elif (one["cause"], one["fixed"]) != (late["part"], fixed):
            wrong.append(f"rank {late['rank']}: {one['cause']}, fixed {one['fixed']}")
    wrong += [f"rank {rank} is named for nothing" for rank in found]
    for part in ("data", "forward", "backward", "exposed_wait", "exposed_transfer", "optimizer"):
        if abs(level["breakdown_ms"][part] - truth[f"{part}_ms"]) > _MOST_OFF_MS:
            wrong.append(f"{part} is {level['breakdown_ms'][part]} ms, not {truth[f'{part}_ms']}")
    return wrong


def run_case(case: Case, root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Makes a folder and yields the figures of each way to analyse it."""
    folder, small = root / "run", root / "condensed"
    for old in (folder, small):
        shutil.rmtree(old, ignore_errors=True)
    begin = time.monotonic()
    plan = synthetic_runs.planted(case.ranks, case.steps, script=case.script)
    truth = synthetic_runs.write_run(folder, plan)
    common = {
        "ranks": case.ranks,
        "steps": case.steps,
        "buckets": plan.buckets,
        "script": case.script,
        "generate_s": time.monotonic() - begin,
        "record_bytes": _size(folder),
    }
    summaries: dict[str, bytes] = {}
    for way in case.ways:
        figures: dict[str, Any] = {**common, "load_before": os.getloadavg()[0]}
        if way == "condensed":
            figures |= _condense(folder, small)
        out = root / f"{way}.json"
        if way == "report":
            figures |= measure_command(["report", folder], out)
            figures["report_bytes"] = paths.report_file(folder).stat().st_size
            figures["plots_bytes"] = sum(
                path.stat().st_size for path in paths.plots_folder(folder).iterdir()
            )
        else:
            at = small if way == "condensed" else folder
            figures |= measure_command(["analyze", at, "--json"], out)
            summaries[way] = out.read_bytes()
            figures["summary_bytes"] = len(summaries[way])
            figures["wrong"] = check(json.loads(summaries[way]), truth)
        if way == "condensed" and "whole" in summaries:
            figures["same_summary"] = summaries["whole"] == summaries["condensed"]
        yield way, figures
    for old in (folder, small):
        shutil.rmtree(old, ignore_errors=True)


def _condense(folder: Path, small: Path) -> dict[str, float]:
    """Condenses each rank's file, as that rank would in the job; returns times and bytes."""
    small.mkdir()
    shutil.copy(paths.run_file(folder), small)
    ranks = paths.rank_files(folder)
    begin = time.process_time()
    for rank in ranks:
        paths.rank_file(small, rank).write_bytes(condensed_file(folder, rank))
    each_s = (time.process_time() - begin) / len(ranks)
    return {"condensed_bytes": _size(small), "condense_ms_a_rank": each_s * 1e3}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in paths.rank_files(folder).values())


def render(kept: Mapping[str, Any]) -> str:
    """Returns the table."""
    machine = kept["machine"]
    lines = [
        f"{machine['cores']} cores, load {machine['load_before']:.1f} before, Python "
        f"{machine['python']}; plain and instrumented steps each, 25 buckets",
        "",
        "| record | way | ranks x steps | record MB | analysed MB | wall s | CPU s | peak MiB "
        "| load | planted causes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in kept["measured"].items():
        way = name.split("/")[-1]
        read = one.get("condensed_bytes", one["record_bytes"])
        wrong = one.get("wrong")
        told = "" if wrong is None else ("found" if not wrong else "; ".join(wrong))
        lines.append(
            f"| {'script' if one['script'] else 'study'} | {way} | {one['ranks']} x "
            f"{one['steps']} | {one['record_bytes'] / 1e6:.0f} | {read / 1e6:.1f} "
            f"| {one['wall_s']:.1f} | {one['cpu_s']:.1f} | {one['peak_mib']:.0f} "
            f"| {one['load_before']:.1f} | {told} |"
        )
    lines.append("")
    for name, one in kept["measured"].items():
        if "same_summary" in one:
            verdict = "the same bytes" if one["same_summary"] else "ANOTHER summary"
            lines.append(
                f"- {name}: {verdict} from condensed records; {one['condense_ms_a_rank']:.0f} ms "
                f"of processor time for each rank to condense its own."
            )
        if name.endswith("/report"):
            lines.append(
                f"- {name}: report.html {one['report_bytes'] / 1e3:.0f} kB, plots "
                f"{one['plots_bytes'] / 1e3:.0f} kB."
            )
        if (one["ranks"], one["steps"]) == _OF_THE_GOAL and name.endswith("/whole"):
            met = one["wall_s"] <= GOAL_S and one["peak_mib"] <= GOAL_MIB and not one["wrong"]
            lines.append(
                f"- {name}: goal of {GOAL_S:.0f} s and {GOAL_MIB:.0f} MiB "
                f"{'met' if met else 'NOT MET'}; folder made in "
                f"{one['generate_s']:.0f} s."
            )
    return "\n".join(lines)


def main() -> int:
    """Reads the command line, measures what is not kept yet, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small folders: does it run?")
    parser.add_argument("--folder", type=Path, help="where to make folders; default: a temporary")
    add_file_options(parser)
    options = parser.parse_args()
    kept = kept_figures(parser, options, FORMAT_VERSION)
    if kept is None:
        kept = {**head(FORMAT_VERSION, os.getloadavg()[0]), "quick": options.quick, "measured": {}}
    if options.read is None:
        if kept["quick"] != options.quick:
            parser.error(
                f"{options.json} was measured with{'' if kept['quick'] else 'out'} --quick"
            )
        _measure(kept, QUICK if options.quick else CASES, options)
    print(render(kept))
    return int(any(one.get("wrong") for one in kept["measured"].values()))


def _measure(kept: dict[str, Any], cases: Sequence[Case], options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        root = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=True)
        for case in cases:
            prefix = f"{case.name}-{case.ranks}x{case.steps}"
            if all(f"{prefix}/{way}" in kept["measured"] for way in case.ways):
                continue
            for way, figures in run_case(case, root):
                kept["measured"][f"{prefix}/{way}"] = figures
                print(f"{prefix}/{way}: {figures['wall_s']:.1f} s", file=sys.stderr)
                if options.json is not None:
                    options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

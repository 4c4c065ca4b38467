#!/usr/bin/env python3
"""Plants causes of a known size, runs the product on them, and says how well it found them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from accuracy_cases import CAUSES, ROOT, Experiment, Row, lab_tool
from accuracy_predictions import PREDICTIONS
from benchkit import kept_figures

EXPERIMENTS: tuple[Experiment, ...] = (*CAUSES, *PREDICTIONS)

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

_NAMES = "\n".join(f"  {e.name:<10} {e.title}" for e in EXPERIMENTS)
_HELP = f"""Plant causes of a known size and see whether the product finds them.

Each experiment runs the product's ordinary commands on nodes, links, delays and clocks
whose truth is known, and compares. Experiments:

{_NAMES}
"""
_EPILOG = """Figures are kept as they come: an interrupted run goes on where it was.

Examples:
  python benchmarks/accuracy.py --json figures.json          all of it, about an hour
  python benchmarks/accuracy.py --json figures.json --only links,clocks
  python benchmarks/accuracy.py --quick                      a few minutes: does it run?
  python benchmarks/accuracy.py --read figures.json --write docs/accuracy.md

Needs root and Linux for the lab (launch/lab --check). Leave the machine alone meanwhile.
Exit codes: 0 done, whatever was found; 1 a case could not be run; 2 wrong usage.
"""


def by_name(names: Sequence[str]) -> Mapping[str, Experiment]:
    """Returns the named experiments, all where none is named."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    return {name: known[name] for name in names} if names else known


def measure(
    experiments: Mapping[str, Experiment], kept: dict[str, Any], file: Path | None, *, quick: bool
) -> bool:
    """Measures what is not kept yet; tells whether all cases could be run."""
    whole = True
    for name, experiment in experiments.items():
        done = kept["measured"].setdefault(name, [])
        known = {json.dumps(item["case"], sort_keys=True) for item in done}
        cases = experiment.cases(quick=quick)
        for number, case in enumerate(cases, 1):
            pairs = [(item["case"], item["figures"]) for item in done]
            if json.dumps(case, sort_keys=True) in known or experiment.enough(pairs, case):
                continue
            begin = time.monotonic()
            try:
                figures = experiment.measure(case)
            except Exception as error:  # One case that fails must not cost the others.
                whole = False
                traceback.print_exc()
                print(f"{name} {case}: {error}", file=sys.stderr)
                continue
            took = time.monotonic() - begin
            print(f"{name} {number}/{len(cases)} {case} {took:.0f} s", file=sys.stderr, flush=True)
            item = {"case": case, "figures": figures, "load": os.getloadavg()[0]}
            done.append({**item, "version": version()})
            if file is not None:
                file.write_text(json.dumps(kept) + "\n")
    return whole


def version() -> str:
    """Returns version and commit of the product that is measured."""
    from ddp_profiler import __version__

    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{__version__} {done.stdout.strip()}".strip()


def describe() -> dict[str, Any]:
    """Describes the machine that the page names."""
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "virtual": "hypervisor" in Path("/proc/cpuinfo").read_text(),
    }


def render(kept: Mapping[str, Any]) -> str:
    """Returns the page as Markdown."""
    machine = kept["machine"]
    lines = [
        "# How accurate it is",
        "",
        "Every cause below was planted with a known size, and the product's ordinary commands had "
        "to find it. Made by `python benchmarks/accuracy.py`, "
        f"{kept['created'][:10]}, on {'a virtual machine with ' if machine['virtual'] else ''}"
        f"{machine['cores']} cores ({machine['cpu']}), kernel {machine['kernel']}, Python "
        f"{machine['python']}, torch {machine['torch']}, gloo. [The lab](lab.md) says what its "
        "nodes and links are. Rows that miss their goal are marked **no** and stay here.",
        "",
    ]
    by_experiment = {
        experiment: kept["measured"].get(experiment.name, []) for experiment in EXPERIMENTS
    }
    tables = {
        experiment: table(experiment, items, quick=kept["quick"])
        for experiment, items in by_experiment.items()
        if items
    }
    items = [item for items in by_experiment.values() for item in items]
    versions = ", ".join(sorted({item["version"] for item in items}))
    highest = max((item["load"] for item in items), default=0.0)
    lines += [
        f"Product: {versions}. {len(items)} cases; the load of the machine was {highest:.1f} at "
        "most, its own included.",
        "",
    ]
    judged = [row for rows in tables.values() for row in rows if row.holds is not None]
    held = sum(bool(row.holds) for row in judged)
    lines += [f"**{held} of {len(judged)} rows hold their goal.**", ""]
    for experiment, rows in tables.items():
        lines += [f"## {experiment.title}", "", experiment.text, "", *_table(rows), ""]
    return "\n".join(lines)


def table(experiment: Experiment, items: Sequence[Mapping[str, Any]], *, quick: bool) -> list[Row]:
    """Returns an experiment's rows; a case that could not be run is a row that does not hold."""
    pairs = [(item["case"], item["figures"]) for item in items]
    known = [case for case, _ in pairs]
    missing = [
        case
        for case in experiment.cases(quick=quick)
        if case not in known and not experiment.enough(pairs, case)
    ]
    rows = experiment.rows(pairs)
    if missing:
        count = f"{len(missing)} of {len(missing) + len(pairs)} cases"
        rows.append(Row(count, "run", "not run or failed", "", "all run", False))
    return rows


def _table(rows: Sequence[Row]) -> list[str]:
    marks = {True: "yes", False: "**no**", None: ""}
    return [
        "| planted | truth | found | error | goal | holds |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row.planted} | {row.truth} | {row.found} | {row.error} | {row.goal} | "
            f"{marks[row.holds]} |"
            for row in rows
        ),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accuracy.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAME,...", default="", help="these experiments only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep figures; go on from them")
    parser.add_argument("--quick", action="store_true", help="a case or two of each experiment")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a file of --json; no run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = set(names) - {experiment.name for experiment in EXPERIMENTS}
    if unknown:
        parser.error(f"--only: there is no experiment {', '.join(sorted(unknown))}")
    source = options.read or options.json
    kept = kept_figures(parser, options, FORMAT_VERSION)
    if kept is None:
        kept = {
            "format_version": FORMAT_VERSION,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": describe(),
            "quick": options.quick,
            "measured": {},
        }
    if options.read is None and kept["machine"] != describe():
        parser.error(f"{source} was measured on another machine; choose another file")
    if options.read is None and kept["quick"] != options.quick:
        parser.error(f"{source} was measured with{'' if kept['quick'] else 'out'} --quick")
    whole = True
    if options.read is None:
        problems = [f"{item.name}: {item.problem}" for item in lab_tool.check() if item.problem]
        if problems:
            parser.error(f"the lab cannot run here: {'; '.join(problems)}")
        whole = measure(by_name(names), kept, options.json, quick=options.quick)
    page = render(kept)
    if options.write is not None:
        options.write.write_text(page)
    else:
        print(page)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())

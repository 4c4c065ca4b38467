#!/usr/bin/env python3
"""Checks the profiler on this machine's NVIDIA GPUs, in under five minutes.

Each check runs in a process of its own (gpu_check_parts.py) within a time of its own; one that
fails or hangs does not stop the others. This program starts them, judges and shows what they
found, and imports neither torch nor the profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

try:
    from benchkit import ROOT, at_least, finite, head, read_figures
except ImportError as error:
    # Of a bare machine; the probe names all that is missing, but not before this is here.
    print(
        f"gpu_check: {sys.executable} lacks {error.name}; what the profiler needs comes with: "
        f"pip install {Path(__file__).resolve().parents[1]}",
        file=sys.stderr,
    )
    sys.exit(2)

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

EXIT_OK, EXIT_MISSED, EXIT_NO_GPU = 0, 1, 2
BUDGET_S = 285
_PROBE_LIMIT_S = 60.0
_LEAST_S = 5.0
"""A check is not begun with less."""
_END_S = 8.0
"""What a check that is told to end may take."""

_HELP = """Check the profiler on this machine's NVIDIA GPUs: NCCL at dp = 1 to the number of GPUs,
its parts against torch.profiler's kernels of the same steps, kernels of known length, its own
cost, device peaks, memory curve, a script of its own, two ranks on one GPU.
"""

_EPILOG = """It needs torch with CUDA and what the profiler depends on (numpy, pyarrow, msgspec and
more); the profiler itself is taken from this checkout by PYTHONPATH, which the checks set.
Nothing is downloaded, and the GPUs' settings stay as they are.

Examples:
  benchmarks/gpu_check.sh --json figures.json          on a machine with GPUs
  benchmarks/gpu_check.sh --only kernels --only peaks  some of it
  python benchmarks/gpu_check.py --read figures.json   an earlier run's table
  python benchmarks/gpu_check.py --device cpu          does it run? On any machine, no figures

Exit codes: 0 every bound holds; 1 one is missed, or a check failed or did not end; 2 no GPU, or
wrong usage. With --device cpu: 0 where every check ran to its end, whatever the figures.
"""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: As ``--only`` takes it.
        limit_s: Seconds that it may take.
        text: What it checks.
    """

    name: str
    limit_s: float
    text: str


CHECKS = (
    Check("kernels", 45, "timed kernels of known length in forward and backward"),
    Check("parts", 60, "event-based parts against torch.profiler's kernels of the same steps"),
    Check("overhead", 45, "cost of measuring at steps of 10 and 100 ms"),
    Check("peaks", 30, "peaks of matrix products and of copies"),
    Check("study", 110, "NCCL at dp = 1 to the number of GPUs, gpt-small in bf16"),
    Check("script", 75, "an unmodified script, weights with and without the profiler"),
    Check("gloo", 50, "two ranks on one GPU with gloo"),
    Check("memory", 100, "memory curve and largest micro-batch"),
)
"""In the order in which they run: what needs least first."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: Name of its check.
        what: What the figure is.
        figure: The figure; None where there is none.
        unit: Its unit.
        low: Least that is allowed; None where open.
        high: Most that is allowed; None where open.
        note: What a reader has to know; the reason where there is no figure.
        failed: Whether there should be a figure.
    """

    check: str
    what: str
    figure: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def verdict(self) -> str:
        """``ok``, ``MISSED``, ``FAILED``, ``not run``, or ``shown`` where there is no bound."""
        if self.failed:
            return "FAILED"
        if self.figure is None:
            return "not run"
        if self.low is None and self.high is None:
            return "shown"
        # What is no number is inside no bound.
        inside = (self.low is None or self.figure >= self.low) and (
            self.high is None or self.figure <= self.high
        )
        return "ok" if inside else "MISSED"

    @property
    def bound(self) -> str:
        """The bound in words; empty where there is none."""
        if self.low is not None and self.high is not None:
            if self.low == -self.high:
                return f"within {self.high:g}"
            return f"{self.low:g} to {self.high:g}"
        if self.high is not None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.low is not None else ""


def read_rows(name: str, text: str) -> list[Row]:
    """Reads what a check wrote; a figure that is no number is one that failed.

    Raises:
        ValueError: It is not what a check writes.
    """
    try:
        rows = [Row(name, **{k: v for k, v in row.items() if k != "check"}) for row in _list(text)]
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not rows:
        raise ValueError("it wrote no rows")
    return [
        row
        if row.figure is None or math.isfinite(row.figure)
        else replace(row, figure=None, failed=True, note=f"{row.figure} is no figure")
        for row in rows
    ]


def _list(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("no list of rows")
    return found


def run_checks(
    checks: Sequence[Check],
    start: Callable[[Check, float], list[Row]],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Row], dict[str, float]]:
    """Runs checks one after the other within a time for all.

    Args:
        checks: What to run.
        start: Runs one within so many seconds and returns its rows.
        budget_s: Seconds for all of them.
        clock: Monotonic time in s.

    Returns:
        All rows, and the seconds that each check took.
    """
    rows: list[Row] = []
    took: dict[str, float] = {}
    begun = clock()
    for check in checks:
        left = budget_s - (clock() - begun)
        if left < _LEAST_S + _END_S:
            rows.append(Row(check.name, check.text, None, note="no time left", failed=True))
            continue
        at = clock()
        rows += start(check, min(check.limit_s, left - _END_S))
        took[check.name] = round(clock() - at, 1)
    return rows, took


def exit_code(rows: Sequence[Row], rehearsal: bool) -> int:
    """Returns the exit code; of a rehearsal on a CPU the figures do not count."""
    bad = {"FAILED"} if rehearsal else {"FAILED", "MISSED"}
    verdicts = {row.verdict for row in rows}
    # A check of which nothing ran has shown nothing.
    return EXIT_MISSED if verdicts & bad or verdicts <= {"not run"} else EXIT_OK


def run_one(command: Sequence[str | Path], limit_s: float, log: Path) -> str:
    """Runs a check's process and returns what went wrong; empty if nothing did.

    A process that takes too long is told to end with all that it started, then ended.
    """
    environ = dict(os.environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        environ.pop(name, None)
    folders = [str(ROOT), *filter(None, [environ.get("PYTHONPATH", "")])]
    environ["PYTHONPATH"] = os.pathsep.join(folders)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # torchrun passes it on to its ranks, which have sessions of their own.
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            _signal(process, signal.SIGKILL)
            process.wait()
            return f"did not end within {limit_s:.0f} s{_last_line(log)}"
    return "" if code == 0 else f"ended with {code}{_last_line(log)}"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:200]}" if lines else ""


_PROBE = """
import importlib, json, sys
missing = []
for name in ("torch", "numpy", "pyarrow", "msgspec", "click", "psutil", "scipy", "rich", "jinja2",
             "matplotlib"):
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
if missing:
    print(json.dumps({"missing": missing}))
    sys.exit()
import torch
from ddp_profiler.measure import nccl
there = torch.cuda.is_available()
print(json.dumps({
    "torch": str(torch.__version__), "cuda": torch.version.cuda,
    "nccl": nccl.in_use()[0] if there else None,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "memory_bytes": [torch.cuda.get_device_properties(i).total_memory
                     for i in range(torch.cuda.device_count())],
}))
"""


def probe(command: Sequence[str] = (sys.executable, "-c", _PROBE)) -> dict[str, Any]:
    """Returns what torch sees, asked in a process of its own; ``problem`` says why it cannot."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    try:
        done = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer within {_PROBE_LIMIT_S:g} s"}
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"problem": lines[-1] if lines else f"the probe ended with {done.returncode}"}
    if "missing" in found:
        names = " ".join(found["missing"])
        return {"problem": f"{sys.executable} lacks {names}; pip install {names}"}
    return found


def _python_path() -> list[str]:
    return [entry for entry in [os.environ.get("PYTHONPATH", "")] if entry]


def render(raw: Mapping[str, Any]) -> str:
    """Returns the table."""
    machine = raw["machine"]
    gpus = raw["gpus"]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    lines = [
        "The profiler on GPUs" if raw["device"] == "cuda" else "Rehearsal on the CPU: no figures",
        f"{names}; torch {raw['torch']}, CUDA {raw['cuda'] or '-'}, NCCL {raw['nccl'] or '-'}, "
        f"Python {machine['python']}, {machine['cores']} cores, {raw['created'][:10]}",
        "",
    ]
    rows = [Row(**row) for row in raw["rows"]]
    cells = [("check", "what", "figure", "bound", "")]
    cells += [(row.check, row.what, _figure(row), row.bound, row.verdict) for row in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in range(4)]
    notes = ["", *(row.note for row in rows)]
    for cell, note in zip(cells, notes, strict=True):
        check, what, figure, bound, verdict = cell
        lines.append(
            f"{check:<{widths[0]}}  {what:<{widths[1]}}  {figure:>{widths[2]}}  "
            f"{bound:<{widths[3]}}  {verdict:<7}  {note}".rstrip()
        )
    counts = {name: sum(row.verdict == name for row in rows) for name in _VERDICTS}
    lines += ["", ", ".join(f"{count} {name}" for name, count in counts.items() if count)]
    took = raw["took_s"]
    lines.append(f"{sum(took.values()):.0f} s: " + ", ".join(f"{k} {v:g}" for k, v in took.items()))
    return "\n".join(lines)


_VERDICTS = ("ok", "MISSED", "FAILED", "not run", "shown")


def _figure(row: Row) -> str:
    return "" if row.figure is None else f"{row.figure:.4g} {row.unit}".rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse without a GPU"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        help="run this check; may be repeated",
    )
    parser.add_argument(
        "--budget", type=at_least(20), default=BUDGET_S, help="seconds for all (default 285)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a file of --json; no run")
    return parser


def main() -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args()
    raw = read_figures(parser, options, FORMAT_VERSION)
    if raw is not None:
        print(render(raw))
        return EXIT_OK
    # Before torch is asked, which is part of the time.
    begun, load = time.monotonic(), os.getloadavg()[0]
    found = probe()
    rehearsal = options.device == "cpu"
    if "problem" in found:
        print(f"gpu_check: {found['problem']}", file=sys.stderr)
        return EXIT_NO_GPU
    if not rehearsal and not found["gpus"]:
        print(
            f"gpu_check: torch {found['torch']} sees no NVIDIA GPU here; --device cpu rehearses "
            "without one.",
            file=sys.stderr,
        )
        return EXIT_NO_GPU
    if rehearsal:
        found |= {"gpus": [], "memory_bytes": []}
    checks = [check for check in CHECKS if not options.only or check.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as name:
        folder = Path(name)

        def start(check: Check, limit_s: float) -> list[Row]:
            print(f"gpu_check: {check.name}: {check.text}", file=sys.stderr, flush=True)
            own = folder / check.name
            own.mkdir()
            (own / "machine.json").write_text(json.dumps({**found, "device": options.device}))
            script = Path(__file__).resolve().with_name("gpu_check_parts.py")
            problem = run_one([sys.executable, script, check.name, own], limit_s, own / "log")
            try:
                rows = read_rows(check.name, (own / "rows.json").read_text())
            except (OSError, ValueError) as error:
                problem = problem or f"left nothing to read: {error}"
                rows = []
            if problem:
                sys.stderr.write((own / "log").read_text(errors="replace")[-2000:])
                rows.append(Row(check.name, check.text, None, note=problem, failed=True))
            return rows

        rows, took = run_checks(checks, start, options.budget - (time.monotonic() - begun))
    raw = {
        **head(FORMAT_VERSION, load),
        **found,
        "device": options.device,
        "rows": [asdict(row) for row in rows],
        "verdicts": [row.verdict for row in rows],
        "took_s": took,
    }
    # First, so that a disk that is full by now takes the file alone.
    print(render(raw), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(finite(raw), indent=1, allow_nan=False) + "\n")
    return exit_code(rows, rehearsal)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Time and memory of splitting a large trace, against another tool and against a floor.

All observers run in turns on the same file, each time in a process of their own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRACE = "small_allreduces_rank1_of_2.json.gz"
OTHERS = ("HolisticTraceAnalysis==0.5.0", "pysimdjson==7.0.2", "isal==1.9.1")
"""What is compared with; installed into an environment of its own."""

COPIES = 10
LARGE_BYTES = 4_000_000_000
FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

_TIMEOUT_S = 1800

_OURS = """
import sys
from pathlib import Path
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split
def work():
    found = split(read_trace(Path(sys.argv[1])), 1)
    return found.total.comm_ns / 1000, found.total.overlap_ns / 1000
"""

_FLOOR = """
import sys, zlib
import simdjson
from isal import isal_zlib
def work():
    with open(sys.argv[1], "rb") as file:
        text = isal_zlib.decompress(file.read(), wbits=31)
    parsed = simdjson.Parser().parse(text)
    del parsed
    return None
"""

_HTA = """
import sys, logging
logging.disable(logging.CRITICAL)
from pathlib import Path
from hta.trace_analysis import TraceAnalysis
def work():
    path = Path(sys.argv[1])
    analysis = TraceAnalysis(
        trace_files={1: str(path)}, trace_dir=str(path.parent), include_last_profiler_step=True
    )
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    return float(breakdown["compute_time(us)"].iloc[0]), float(
        overlap["comp_comm_overlap_pctg"].iloc[0]
    )
"""

# The peak is that of this program alone: what the system counts for a process also has what the
# one that started it held.
_MEASURE = """
import json, re, resource, sys, time
begin, cpu_begin = time.perf_counter(), time.process_time()
result = work()
seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
try:
    with open("/proc/self/status") as status:
        peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]) * 1024
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\\nRESULT " + json.dumps(
    {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak, "result": result}
))
"""

_HELP = f"""Time and memory of splitting a trace of 53.7 MB, and of it repeated {COPIES} times.

Three observers: ddp_profiler (read and split), HolisticTraceAnalysis 0.5.0 (load,
temporal breakdown, overlap), and a floor: gunzip and a simdjson parse that keeps
nothing. The others are installed into an environment of their own.
"""

_EPILOG = f"""How to read the table:
  CPU s         from an open file to the result, without the start of Python and
                its imports; the median of the rounds, with the least and most.
                All observers use one thread, so that it is the time on a machine
                that is left alone, and the goals are judged by it
  seconds       the same by the clock, with what others took of the machine
  peak MB       the most memory that the process held, its imports included
Give the folder that holds {TRACE}.

Examples:
  python benchmarks/trace_speed.py traces/                 about 5 minutes
  python benchmarks/trace_speed.py traces/ --large         also one of 4 GB
  python benchmarks/trace_speed.py traces/ --json f.json   all figures as well
  python benchmarks/trace_speed.py --read f.json           an earlier run's table
Leave the machine alone meanwhile.
Exit codes: 0 done, whatever comes out; 1 an observer failed; 2 wrong usage.
"""


@dataclass(frozen=True)
class Run:
    """One observer on one file, once.

    Attributes:
        observer: ``ours``, ``hta`` or ``floor``.
        case: ``once``, ``repeated`` or ``large``.
        seconds: Time to the result.
        cpu_seconds: CPU time to the result; of one thread, as all observers are.
        peak_mb: Most memory held, in MB of 10**6 bytes.
        result: What the observer found.
    """

    observer: str
    case: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    result: Any


@dataclass(frozen=True)
class Goal:
    """A goal, what came out, and whether that meets it."""

    text: str
    figure: str
    met: bool


# ----------------------------------------------------------------------------------------------
# Files


_FIELD = re.compile(rb'("ts": |"correlation": |"External id": |"id": |"name": "ProfilerStep#)(\d+)')
_STEPS = 5


def copies(text: bytes, count: Callable[[int], bool]) -> Iterator[bytes]:
    """Yields a trace's text with its events repeated, each copy later than the one before.

    Times, launch numbers and step numbers go on, so that the result is that of a longer
    recording: the split of each copy is that of the original.

    Args:
        text: The trace as Kineto wrote it.
        count: Takes the bytes yielded so far; whether another copy is to follow.
    """
    begin = text.index(b"[", text.index(b'"traceEvents"')) + 1
    end = text.rindex(b"]", 0, text.rindex(b'"traceName"'))
    events = text[begin:end]
    times = [int(found[1]) for found in re.finditer(rb'"ts": (\d{10,})', events)]
    apart = {b'"ts": ': max(times) - min(times) + 1_000_000, b'"name": "ProfilerStep#': _STEPS}
    numbers = [int(found[2]) for found in _FIELD.finditer(events) if found[1] not in apart]
    more = max(numbers) + 1
    size = 0

    def shifted(found: re.Match[bytes]) -> bytes:
        return found[1] + str(int(found[2]) + copy * apart.get(found[1], more)).encode()

    copy = 0
    yield text[:begin]
    while copy == 0 or count(size):
        if copy:
            yield b","
        part = _FIELD.sub(shifted, events)
        yield part
        size += len(part)
        copy += 1
    yield text[end:]


def write_repeated(source: Path, target: Path, *, times: int = 0, least_bytes: int = 0) -> int:
    """Writes a trace whose events are repeated; returns the bytes of its text."""
    text = gzip.decompress(source.read_bytes())
    done = 0
    size = 0

    def another(written: int) -> bool:
        nonlocal done
        done += 1
        return done < times or written < least_bytes

    with gzip.open(target, "wb", compresslevel=1) as file:
        for part in copies(text, another):
            file.write(part)
            size += len(part)
    return size


# ----------------------------------------------------------------------------------------------
# Measuring


def make_environment(folder: Path) -> Path:
    """Installs what is compared with; returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "-q", *OTHERS]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
    return python


def measure(observer: str, case: str, file: Path, others: Path) -> Run:
    """Runs one observer once, in a process of its own."""
    source = {"ours": _OURS, "hta": _HTA, "floor": _FLOOR}[observer]
    python = Path(sys.executable) if observer == "ours" else others
    environment = {**os.environ, "PYTHONPATH": str(ROOT) if observer == "ours" else ""}
    # So that every observer finds the file in the cache.
    file.read_bytes() if file.stat().st_size < 1 << 30 else None
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(python), "-c", source + _MEASURE, str(file)],
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment,
        )
        _, errors = process.communicate(timeout=_TIMEOUT_S)
        output.seek(0)
        printed = output.read().decode()
    if process.returncode:
        raise RuntimeError(f"{observer} failed on {file}:\n{errors.decode()[-2000:]}")
    found = json.loads(printed.rpartition("RESULT ")[2])
    return Run(
        observer=observer,
        case=case,
        seconds=found["seconds"],
        cpu_seconds=found["cpu_seconds"],
        peak_mb=found["peak_bytes"] / 1e6,
        result=found["result"],
    )


def run_all(folder: Path, *, rounds: int, large: bool, environment: Path) -> dict[str, Any]:
    """Measures all; returns the content of the JSON file."""
    others = make_environment(environment)
    runs: list[Run] = []
    sizes: dict[str, int] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        once = folder / TRACE
        with gzip.open(once) as unpacked:
            sizes["once"] = unpacked.seek(0, os.SEEK_END)
        repeated = Path(scratch) / "repeated_rank1.json.gz"
        sizes["repeated"] = write_repeated(once, repeated, times=COPIES)
        for turn in range(rounds):
            print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            for observer in ("ours", "floor", "hta"):
                runs.append(measure(observer, "once", once, others))
            for observer in ("ours", "floor"):
                runs.append(measure(observer, "repeated", repeated, others))
        print("HTA on the repeated trace", file=sys.stderr, flush=True)
        runs.append(measure("hta", "repeated", repeated, others))
        if large:
            print("writing the large trace", file=sys.stderr, flush=True)
            file = Path(scratch) / "large_rank1.json.gz"
            sizes["large"] = write_repeated(once, file, least_bytes=LARGE_BYTES)
            print("reading the large trace", file=sys.stderr, flush=True)
            runs.append(measure("ours", "large", file, others))
    return {
        "format_version": FORMAT_VERSION,
        "when": datetime.now().isoformat(timespec="minutes"),
        "machine": f"{os.cpu_count()} cores, load {load:.1f} before, "
        f"Python {platform.python_version()}",
        "rounds": rounds,
        "sizes": sizes,
        "runs": [asdict(run) for run in runs],
    }


# ----------------------------------------------------------------------------------------------
# Showing


def _of(runs: Sequence[Run], observer: str, case: str) -> list[Run]:
    return [run for run in runs if (run.observer, run.case) == (observer, case)]


def _seconds(runs: Sequence[Run], observer: str, case: str) -> float:
    return statistics.median(run.seconds for run in _of(runs, observer, case))


def _peak(runs: Sequence[Run], observer: str, case: str) -> float:
    return max(run.peak_mb for run in _of(runs, observer, case))


def goals(runs: Sequence[Run], sizes: dict[str, int]) -> list[Goal]:
    """Returns the goals with what came out: ratios of CPU times of the same round's runs."""
    pairs = list(zip(*(_of(runs, name, "once") for name in ("ours", "floor", "hta")), strict=False))
    faster = statistics.median(hta.cpu_seconds / ours.cpu_seconds for ours, _, hta in pairs)
    floors = statistics.median(ours.cpu_seconds / floor.cpu_seconds for ours, floor, _ in pairs)
    longer = statistics.median(
        ten.cpu_seconds / one.cpu_seconds
        for one, ten in zip(_of(runs, "ours", "once"), _of(runs, "ours", "repeated"), strict=False)
    )
    memory = _peak(runs, "ours", "once") / _peak(runs, "hta", "once")
    growth = _peak(runs, "ours", "repeated") / _peak(runs, "ours", "once")
    ratio = sizes["repeated"] / sizes["once"]
    found = [
        Goal("at least 10 times faster than HTA", f"{faster:.1f} times", faster >= 10),
        Goal("at most 1.8 times the floor", f"{floors:.2f} times", floors <= 1.8),
        Goal("at most half of HTA's memory", f"{memory:.2f} of it", memory <= 0.5),
        Goal(f"linear: {ratio:.1f} times the text", f"{longer:.1f} times", longer <= 1.1 * ratio),
        Goal("the same peak + 10 %", f"{growth * 100 - 100:+.0f} %", growth <= 1.1),
    ]
    if _of(runs, "ours", "large"):
        peak = _peak(runs, "ours", "large")
        found.append(Goal("4 GB under 1 GiB", f"{peak:.0f} MB", peak < 1074))
    return found


def render(raw: dict[str, Any]) -> str:
    """Returns the table as text of at most 80 columns."""
    runs = [Run(**run) for run in raw["runs"]]
    lines = [
        f"Splitting {TRACE}, {raw['when']}",
        f"{raw['machine']}; {raw['rounds']} rounds in turns",
        "",
        f"{'':28}{'CPU s':>10}{'least..most':>16}{'seconds':>10}{'peak MB':>10}",
    ]
    names = {"ours": "ddp_profiler", "hta": "HTA 0.5.0", "floor": "floor"}
    for case, size in raw["sizes"].items():
        lines.append(f"{size / 1e6:,.1f} MB of text")
        for observer, name in names.items():
            found = _of(runs, observer, case)
            if not found:
                continue
            cpu = [run.cpu_seconds for run in found]
            span = f"{min(cpu):.2f}..{max(cpu):.2f}"
            lines.append(
                f"  {name:26}{statistics.median(cpu):10.2f}{span:>16}"
                f"{_seconds(runs, observer, case):10.2f}{_peak(runs, observer, case):10.0f}"
            )
    lines += ["", f"{'Goal':36}{'came out':>14}  met"]
    for goal in goals(runs, raw["sizes"]):
        lines.append(f"{goal.text:36}{goal.figure:>14}  {'yes' if goal.met else 'no'}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=_HELP, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help=f"holds {TRACE}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in turns (default 5)")
    parser.add_argument("--large", action="store_true", help="also a trace of 4 GB of text")
    parser.add_argument("--environment", type=Path, help="where to install what is compared with")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--read", type=Path, help="show figures of an earlier run")
    options = parser.parse_args()
    if options.read is not None:
        try:
            raw = json.loads(options.read.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"cannot read {options.read}: {error}")
        print(render(raw), end="")
        return 0
    if options.folder is None or not (options.folder / TRACE).is_file():
        parser.error(f"give the folder that holds {TRACE}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    with tempfile.TemporaryDirectory() as made:
        environment = options.environment or Path(made) / "environment"
        try:
            raw = run_all(
                options.folder, rounds=options.rounds, large=options.large, environment=environment
            )
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1))
    print(render(raw), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

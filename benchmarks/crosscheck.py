#!/usr/bin/env python3
"""The profiler's figures against those of two others, in the same training steps.

Communication in flight against torch.profiler, forward and backward against the logger that
DDP has inside. Each figure is derived twice from one run, so that the machine's noise is in
both and what is left is the difference between the observers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchkit import (
    ROOT,
    Floats,
    add_file_options,
    at_least,
    end_rank,
    head,
    launch,
    machine_line,
    read_figures,
)

Ints = npt.NDArray[np.int64]

RANKS = 2
MICRO_BATCH = 4
GOAL_PERCENT = 5.0

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

_NULL = np.iinfo(np.int64).min

_HELP = f"""Check the profiler's figures against torch.profiler and DDP's own logger.

It starts its own torchrun with {RANKS} ranks (gloo, CPU) on a free port, and trains
three models with the profiler, torch.profiler and DDP's logger at work in the
same steps. All three slow the step down; it is the same step for all of them.
"""

_EPILOG = f"""How to read the table:
  ours, theirs  mean over ranks and steps, in ms
  diff          ours less theirs, in per cent of theirs
  step diff     the same of single steps: the median of their sizes
  in flight     the union of the times in which gradient collectives are in
                flight. Theirs: the union of torch.profiler's gloo:all_reduce
                events. Its clock is real time, ours the monotonic one: only
                lengths are compared. Goal: within {GOAL_PERCENT:g} %. Ours ends later, by the
                callback that tells of a completion: 0.05 to 0.2 ms, and several
                ms where it has to wait for a core or the interpreter. It is cut
                off where backward returns.
  forward       Theirs: DDP's forward alone. Ours has the model's inputs and the
                loss as well, so it is longer.
  backward      Theirs: from the end of DDP's forward, so with the loss, until
                autograd has no work left. Ours begins when backward is called:
                it is shorter.
  both          Ours: from forward's begin to the end of local backward. Theirs:
                the sum of the two. The loss is in both, the inputs in ours
                only.
  first to end  from the first bucket's hand-over until the gradients are ready,
                gaps between collectives and the copy from buckets included.
                Ours ends when backward has returned.
  overlap       from the first bucket's hand-over to the end of local backward,
                gaps included. Not the product's overlapped_ms, which leaves
                them out.
DDP's logger gives a step's times at the next forward; the last step has none.

Examples:
  python benchmarks/crosscheck.py                      about 40 s
  python benchmarks/crosscheck.py --json figures.json  with all spans and events
  python benchmarks/crosscheck.py --read figures.json  an earlier run's table
  python benchmarks/crosscheck.py --quick              does it run? No figures

Leave the machine alone meanwhile: completions are told late on busy cores.
Exit codes: 0 done, whatever they differ by; 1 the launch failed; 2 wrong usage.
"""


@dataclass(frozen=True)
class Case:
    """One model that is trained.

    Attributes:
        model: The workload as ``--model`` takes it.
        bucket_cap_mb: DDP's bucket size limit in MB of 2**20 bytes.
    """

    model: str
    bucket_cap_mb: float


CASES = (
    Case("timed:layers=4,parameters=1000000", 3),
    Case("gpt-tiny", 2),
    Case("gpt-tiny:width=256", 4),
)

_LOGGED = {
    "forward": "forward_compute_time",
    "backward": "backward_compute_time",
    "first_to_end": "backward_comm_time",
    "overlap": "backward_compute_comm_overlap_time",
}
"""Times of one iteration in DDP's logger, in ns, by our name."""


# ----------------------------------------------------------------------------------------------
# The worker: one rank, under torchrun. Only this part imports torch.


def work(steps: int, warmup: int, out: Path) -> None:
    """Runs one rank and, on rank 0, writes what all ranks recorded as JSON.

    Args:
        steps: Steps of each case.
        warmup: Steps of each case beforehand.
        out: File for spans, events and logged times.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ddp_profiler.measure.clock import HostTimeline
    from ddp_profiler.measure.loop import LevelRun
    from ddp_profiler.measure.marks import Columns, Recorder
    from ddp_profiler.measure.session import Session, choose_device
    from ddp_profiler.measure.topology import read_topology
    from ddp_profiler.schema import LevelSettings, Variant
    from ddp_profiler.workload import Planter, build

    kept: list[dict[str, list[int | None]]] = []

    def keep(columns: Columns) -> None:
        kept.append({name: list(values) for name, values in columns.items()})

    topology = read_topology(os.environ)
    session = Session(topology, choose_device(topology, "gloo", None), timeout_s=300)
    levels = tuple(
        LevelSettings(case.model, RANKS, MICRO_BATCH, 1, "packed", tuple(range(RANKS)))
        for case in CASES
    )
    group = session.make_groups(levels)[levels[0].ranks]
    for number, (case, level) in enumerate(zip(CASES, levels, strict=True)):
        run = LevelRun(
            level,
            build(case.model, seed=0, micro_batch=MICRO_BATCH, data=None),
            Recorder(HostTimeline(), keep),
            group,
            topology.rank,
            torch.device("cpu"),
            bucket_cap_mb=case.bucket_cap_mb,
            precision="fp32",
            seed=0,
            planter=Planter((), topology.rank),
        )
        ddp: Any = run.ddp
        ddp._set_ddp_runtime_logging_sample_rate(1)
        run.run_block(warmup, Variant.WARMUP)
        kept.clear()
        logged: list[dict[str, int]] = []

        def note(ddp: Any = ddp, logged: list[dict[str, int]] = logged) -> None:
            data = ddp._get_ddp_logging_data()
            logged.append({name: int(data[key]) for name, key in _LOGGED.items()})

        run.recorder.begin_block(0, 0, 0, Variant.INSTRUMENTED)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run.run_block(steps, Variant.INSTRUMENTED, beat=note)
        events = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.name == "gloo:all_reduce"
        ]
        found = {
            "columns": kept[0],
            "events_us": events,
            # What a beat sees belongs to the step before.
            "logged_ns": logged[1:],
            "buckets": run.facts().num_buckets,
        }
        run.close()
        session.publish(f"{number}/{topology.rank}", found)
    if topology.rank == 0:
        cases = [
            {
                **asdict(case),
                "ranks": [session.learn(f"{number}/{rank}") for rank in range(RANKS)],
            }
            for number, case in enumerate(CASES)
        ]
        out.write_text(json.dumps({"torch": torch.__version__, "cases": cases}))
    session.close()


# ----------------------------------------------------------------------------------------------
# From spans and events to figures.


@dataclass(frozen=True)
class Figure:
    """One figure from two observers.

    Attributes:
        name: As in the help text.
        ours_ms: The profiler's, mean over ranks and steps.
        theirs_ms: The other's, over the same steps.
        difference_percent: Ours less theirs, in per cent of theirs.
        step_difference_percent: Median over single steps of the size of that.
        steps: Steps compared, all ranks together.
    """

    name: str
    ours_ms: float
    theirs_ms: float
    difference_percent: float
    step_difference_percent: float
    steps: int


@dataclass(frozen=True)
class CaseResult:
    """The figures of one model.

    Attributes:
        model: The workload.
        buckets: Gradient collectives of a step.
        step_ms: Mean step.
        figures: Each figure from both observers.
    """

    model: str
    buckets: int
    step_ms: float
    figures: tuple[Figure, ...]


def union_ms(events_us: Sequence[Sequence[float]]) -> float:
    """Returns the length in ms of the union of intervals that are given in us.

    >>> union_ms([(0, 4000), (1000, 3000), (5000, 6000)])
    5.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(map(tuple, events_us)):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1000


def analyze(raw: Mapping[str, Any]) -> tuple[CaseResult, ...]:
    """Derives all figures from what :func:`work` wrote.

    Raises:
        RuntimeError: The observers saw another number of gradient collectives.
    """
    return tuple(_analyze_case(case) for case in raw["cases"])


def _analyze_case(case: Mapping[str, Any]) -> CaseResult:
    from ddp_profiler.analysis.parts import derive_steps
    from ddp_profiler.schema import Variant

    pairs: dict[str, list[tuple[Floats, Floats]]] = {}
    walls = []
    for rank, found in enumerate(case["ranks"]):
        columns = {
            name: np.array([_NULL if v is None else v for v in values], dtype=np.int64)
            for name, values in found["columns"].items()
        }
        steps = derive_steps(rank, columns, 0, Variant.INSTRUMENTED)
        walls.append(float(steps.wall_ms.mean()))
        events = sorted(map(tuple, found["events_us"]))
        if len(events) != int(steps.collectives.sum()):
            raise RuntimeError(
                f"{case['model']}, rank {rank}: torch.profiler has {len(events)} events, the "
                f"record {int(steps.collectives.sum())} gradient collectives"
            )
        # Steps do not overlap, so events in order of time belong to them in turn.
        parts = np.split(np.arange(len(events)), np.cumsum(steps.collectives)[:-1])
        theirs = np.array([union_ms([events[i] for i in part]) for part in parts])
        pairs.setdefault("in flight", []).append((steps.busy_ms, theirs))
        for name, ours in _as_ddp_times(columns, steps).items():
            logged = _logged_ms(found["logged_ns"], name)
            pairs.setdefault(name, []).append((ours[: len(logged)], logged))
    return CaseResult(
        model=case["model"],
        buckets=case["ranks"][0]["buckets"],
        step_ms=float(np.mean(walls)),
        figures=tuple(_figure(name, both) for name, both in pairs.items()),
    )


def _as_ddp_times(columns: Mapping[str, Ints], steps: Any) -> dict[str, Floats]:
    """Returns our times nearest to those of DDP's logger, in ms, [step]; one micro-step each."""
    from ddp_profiler.schema import SpanKind

    def of(kind: SpanKind, column: str, choose: Callable[[Ints], int] = max) -> Ints:
        chosen = columns["kind"] == kind
        times, step = columns[column][chosen], columns["step"][chosen]
        return np.array([choose(times[step == number]) for number in np.unique(step)])

    calls = steps.backwards
    first = of(SpanKind.GRADIENT, "begin_ns", min)
    begin, end = (of(SpanKind.FORWARD, name) for name in ("begin_ns", "end_ns"))
    times = {
        "forward": end - begin,
        "backward": calls.local_end - calls.begin,
        "both": calls.local_end - begin,
        "first to end": calls.end - first,
        "overlap": calls.local_end - first,
    }
    return {name: values / 1e6 for name, values in times.items()}


def _logged_ms(logged: Sequence[Mapping[str, int]], name: str) -> Floats:
    parts = ("forward", "backward") if name == "both" else (name.replace(" ", "_"),)
    return np.array([sum(step[part] for part in parts) / 1e6 for step in logged])


def _figure(name: str, pairs: Sequence[tuple[Floats, Floats]]) -> Figure:
    ours, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return Figure(
        name=name,
        ours_ms=float(ours.mean()),
        theirs_ms=float(theirs.mean()),
        difference_percent=float((ours.mean() / theirs.mean() - 1) * 100),
        step_difference_percent=float(np.median(np.abs(ours / theirs - 1)) * 100),
        steps=len(ours),
    )


# ----------------------------------------------------------------------------------------------
# What is shown.


def render(results: Sequence[CaseResult], raw: Mapping[str, Any]) -> str:
    """Returns the table, at most 80 columns wide."""
    lines = [
        f"The profiler against torch.profiler and DDP's own logger, dp = {RANKS}, gloo on CPU",
        machine_line(raw),
    ]
    for result in results:
        steps = result.figures[0].steps // RANKS
        plural = "s" if result.buckets > 1 else ""
        lines += [
            "",
            f"{result.model}: {result.buckets} bucket{plural}, {steps} steps of "
            f"{result.step_ms:.1f} ms",
            f"  {'':<13}{'other':>15}{'ours, ms':>10}{'theirs, ms':>12}{'diff':>9}"
            f"{'step diff':>11}",
        ]
        for figure in result.figures:
            first = figure.name == "in flight"
            other = "torch.profiler" if first else "DDP's logger"
            inside = abs(figure.difference_percent) <= GOAL_PERCENT
            verdict = "" if not first else "  met" if inside else "  missed"
            lines.append(
                f"  {figure.name:<13}{other:>15}{figure.ours_ms:>10.2f}{figure.theirs_ms:>12.2f}"
                f"{figure.difference_percent:>+8.1f}%{figure.step_difference_percent:>10.1f}%"
                f"{verdict}".rstrip()
            )
    lines += [
        "",
        f"Goal: in flight within {GOAL_PERCENT:g} %. The others differ by definition; see --help.",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------
# The command.


def measure(steps: int, warmup: int) -> dict[str, Any]:
    """Starts the ranks and returns what they recorded, with the machine.

    Raises:
        RuntimeError: The launch failed.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "raw.json"
        words: list[str | Path] = [Path(__file__).resolve(), "--worker", out]
        launch(RANKS, [*words, "--steps", str(steps), "--warmup", str(warmup)])
        raw: dict[str, Any] = json.loads(out.read_text())
    return {**head(FORMAT_VERSION, load), **raw}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crosscheck.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=at_least(2), default=20, help="steps of each case (20)")
    parser.add_argument("--warmup", type=at_least(3), default=5, help="steps beforehand (5)")
    add_file_options(parser)
    parser.add_argument("--quick", action="store_true", help="3 steps: a smoke test")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    steps, warmup = (3, 3) if options.quick else (options.steps, options.warmup)
    sys.path.insert(0, str(ROOT))
    if options.worker is not None:
        work(steps, warmup, options.worker)
        end_rank()
    raw = read_figures(parser, options, FORMAT_VERSION)
    try:
        if raw is None:
            raw = measure(steps, warmup)
        results = analyze(raw)
    except RuntimeError as error:
        print(f"crosscheck.py: {error}", file=sys.stderr)
        return 1
    print(render(results, raw))
    if options.json is not None:
        raw["result"] = [asdict(result) for result in results]
        options.json.write_text(json.dumps(raw) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

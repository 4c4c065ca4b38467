#!/usr/bin/env python3
"""What the profiler adds to a training step: microseconds per step and per gradient bucket.

The profiler's own training loop runs the timed workload (layers that sleep) at dp = 2 in
three variants: plain, instrumented and plain again. All three run in one launch, in the
same processes, on the same DDP object, in short blocks whose order is a Williams design:
each variant stands in each place, and follows each other one, equally often. Three cases
take turns too: a short step, a long one, and the short one with a single bucket, which
separates the cost per step from the cost per bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchkit import (
    Estimate,
    Floats,
    add_file_options,
    at_least,
    end_rank,
    estimate,
    finite,
    head,
    launch,
    machine_line,
    read_figures,
)
from overhead_peers import ALL, Peer

RANKS = 2
LAYERS = 8
PARAMETERS = 65536
MICRO_BATCH = 4
LAYER_MB = PARAMETERS * 4 / 2**20
VARIANTS = ("plain", "instrumented", "plain_again")
"""What is always measured; others go between."""


def orders(variants: int) -> tuple[tuple[int, ...], ...]:
    """Returns a Williams design: sequences that are balanced for place and predecessor.

    Args:
        variants: How many treatments; as many sequences are made, twice as many if odd.

    >>> orders(4)
    ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
    """
    first = [0]
    for number in range(1, variants):
        # One from the front, one from the back, in turns.
        first.append((number + 1) // 2 if number % 2 else variants - number // 2)
    rows = [tuple((place + shift) % variants for place in first) for shift in range(variants)]
    return tuple(rows + [row[::-1] for row in rows] * (variants % 2))


GOAL_BUCKET_US = 50.0
GOAL_PERCENT = 1.0
LEAST_ROUNDS = 12
"""Below, a bootstrap over rounds has too little to draw from, and no verdict is given."""

FORMAT_VERSION = 2
"""Of the JSON file. 1: first format. 2: the variants are listed, others' observers may be there."""


_HELP = f"""Measure what the profiler itself costs, on this machine.

It starts its own torchrun with {RANKS} ranks (gloo, CPU) on a free port. The workload is
"timed": {LAYERS} layers of {PARAMETERS} parameters that sleep, so the cores are idle and what a
step takes above its plain twin is the profiler. Steps of 36 and 108 ms have {LAYERS}
buckets; a further case has 36 ms and 1 bucket.

Variants, in blocks that take turns in the same processes on the same DDP object:
  plain         the study's plain step: one mark at its end, nothing attached to DDP
  instrumented  all marks, the adapter attached
  plain_again   plain once more: what it differs from plain is the noise of the machine

With --peers others take turns too, each around plain steps: torch.profiler (CPU activities), DDP's
own logger (sampled and read at each step) and traceml-ai's trace_step (`pip install traceml-ai`).
"""

_EPILOG = """How to read the table:
  step     instrumented less the mean of plain and plain_again, in us: the median step
           of each block, then the trimmed mean over rounds (a fifth left out at each
           end), with a 95 % bootstrap interval over rounds
  noise    plain_again less plain, the same way; a cost inside it is not resolved
  %        the cost in per cent of the plain step
  bucket   the whole cost by the number of buckets, the fixed cost of a step included
  slope    (cost with 8 buckets - cost with 1) / 7: the cost of one more bucket
  CPU      processor time of all threads of a rank, by the same comparison: what is
           hidden in a sleep of the workload but would compete with real computing

Verdicts are equivalence tests, not "no significant difference". "shown" needs the 90 %
interval of the cost inside +-1 % of the step (two one-sided tests at 5 %), or the 95 %
upper bound of the cost per bucket at or below 50 us. Else "not shown": the goal is
missed, or the machine was too noisy to tell; then raise --rounds.

Examples:
  python benchmarks/overhead.py                     about 4 minutes
  python benchmarks/overhead.py --json figures.json with every step, to analyse again
  python benchmarks/overhead.py --peers             beside others, about 8 minutes
  python benchmarks/overhead.py --quick             10 s: does it run? Not for figures
  python benchmarks/overhead.py --read figures.json the table of an earlier run

Leave the machine alone meanwhile. Exit codes: 0 done, whatever the verdicts;
1 the launch failed; 2 wrong usage.
"""


@dataclass(frozen=True)
class Case:
    """One workload whose overhead is measured.

    Attributes:
        name: Unique name in the run.
        step_ms: Length of a plain step in ms, which the layers' sleeps are set to give;
            they spend a third of it in forward.
        buckets: DDP's gradient buckets in steady state.
    """

    name: str
    step_ms: float
    buckets: int

    @property
    def model(self) -> str:
        """The workload as ``--model`` takes it; each layer's sleep is its own.

        With the other pace of the workload, time between layers would be absorbed, and
        with it what is to be measured.
        """
        forward, backward = self.step_ms / LAYERS / 3, self.step_ms / LAYERS * 2 / 3
        return (
            f"timed:layers={LAYERS},parameters={PARAMETERS},pace=layer,"
            f"forward_ms={forward:g},backward_ms={backward:g}"
        )

    @property
    def bucket_cap_mb(self) -> float:
        """DDP's bucket size limit in MB of 2**20 bytes that gives these buckets."""
        return LAYER_MB * LAYERS / self.buckets


CASES = (Case("36 ms", 36, 8), Case("108 ms", 108, 8), Case("36 ms, 1 bucket", 36, 1))


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Rounds; in each, each case runs one block of each variant.
        block_steps: Steps in a block; the first one, after a barrier, is not counted.
        warmup: Steps of each case beforehand, and again to set the sleeps.
        peers: Whether other observers take turns as well.
    """

    rounds: int
    block_steps: int
    warmup: int
    peers: bool = False


# ----------------------------------------------------------------------------------------------
# The worker: one rank, under torchrun. Only this part imports torch.


def work(plan: Plan, out: Path) -> None:
    """Runs one rank and, on rank 0, writes what all ranks measured as JSON.

    Args:
        plan: How much is measured.
        out: File for the raw times.

    Raises:
        RuntimeError: DDP made another number of buckets than a case needs.
    """
    import torch
    import torch.distributed as dist

    from ddp_profiler.measure.clock import HostTimeline
    from ddp_profiler.measure.loop import LevelRun
    from ddp_profiler.measure.marks import Columns, Recorder
    from ddp_profiler.measure.session import Session, choose_device
    from ddp_profiler.measure.topology import read_topology
    from ddp_profiler.schema import LevelSettings, SpanKind, Variant
    from ddp_profiler.workload import Planter, build
    from ddp_profiler.workload.timed import TimedLayer

    class ObservedRecorder(Recorder):
        """A recorder that also tells what a block cost outside its steps."""

        flush_ns = 0
        cpu_at_flush_ns = 0

        def flush(self) -> None:
            self.cpu_at_flush_ns = time.process_time_ns()
            begin = time.monotonic_ns()
            super().flush()
            self.flush_ns = time.monotonic_ns() - begin

    steps_us: list[float] = []
    collectives = 0

    def keep(columns: Columns) -> None:
        nonlocal collectives
        kinds = columns["kind"]
        collectives += sum(kind == SpanKind.GRADIENT for kind in kinds)
        for kind, begin, end in zip(kinds, columns["begin_ns"], columns["end_ns"], strict=True):
            if kind == SpanKind.STEP and begin is not None and end is not None:
                steps_us.append((end - begin) / 1000)

    topology = read_topology(os.environ)

    class PlainRun(LevelRun):
        """A run whose plain steps another observer can be put around."""

        peer: Peer | None = None

        def _plain_step(self, begin: Any) -> Any:
            if self.peer is None:
                return super()._plain_step(begin)
            # What is done after the step's last mark is in the next one, which begins there.
            with self.peer.step():
                return super()._plain_step(begin)

    session = Session(topology, choose_device(topology, "gloo", None), timeout_s=300)
    recorder = ObservedRecorder(HostTimeline(), keep)
    group = dist.new_group(list(range(RANKS)))
    runs = []
    for case in CASES:
        run = PlainRun(
            LevelSettings(case.name, RANKS, MICRO_BATCH, 1, "packed", tuple(range(RANKS))),
            build(case.model, seed=0, micro_batch=MICRO_BATCH, data=None),
            recorder,
            group,
            topology.rank,
            torch.device("cpu"),
            bucket_cap_mb=case.bucket_cap_mb,
            precision="fp32",
            seed=0,
            planter=Planter((), topology.rank),
        )
        run.run_block(max(plan.warmup, 3), Variant.WARMUP)
        found = run.facts().num_buckets
        if found != case.buckets:
            raise RuntimeError(f"{case.name}: DDP made {found} buckets instead of {case.buckets}")
        steps_us.clear()
        recorder.begin_block(0, 0, 0, Variant.PLAIN)
        run.run_block(max(plan.warmup, 3), Variant.PLAIN)
        excess = torch.tensor(float(np.median(steps_us[1:])) / 1000 - case.step_ms)
        dist.all_reduce(excess, group=group)
        # What a step takes besides its sleeps comes off them, so that it is as long as it says.
        factor = max(0.0, 1 - float(excess) / RANKS / case.step_ms)
        for layer in run.workload.module.children():
            assert isinstance(layer, TimedLayer)
            layer.forward_s *= factor
            layer.backward_s *= factor
        runs.append(run)
    peers: list[dict[str, Peer]] = [{} for _ in runs]
    missing = []
    for name, make in ALL.items() if plan.peers else ():
        try:
            for ready, run in zip(peers, runs, strict=True):
                ready[name] = make(run.ddp)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    variants = (*VARIANTS[:-1], *peers[0], VARIANTS[-1])
    turns = orders(len(variants))

    @contextlib.contextmanager
    def observed_by(run: PlainRun, peer: Peer | None) -> Iterator[None]:
        with contextlib.nullcontext() if peer is None else peer.block():
            run.peer = peer
            try:
                yield
            finally:
                run.peer = None

    blocks: list[dict[str, Any]] = []
    for round_ in range(plan.rounds):
        for place, (case, run, ready) in enumerate(zip(CASES, runs, peers, strict=True)):
            # Another row for each case, so that a place in time favours no variant.
            for variant in turns[(round_ + 2 * place) % len(turns)]:
                steps_us.clear()
                collectives = 0
                name = variants[variant]
                observed = name == "instrumented"
                recorder.begin_block(place, 0, round_, Variant.PLAIN)
                with observed_by(run, ready.get(name)):
                    cpu = time.process_time_ns()
                    run.run_block(
                        plan.block_steps, Variant.INSTRUMENTED if observed else Variant.PLAIN
                    )
                if collectives != (case.buckets * plan.block_steps if observed else 0):
                    raise RuntimeError(f"{case.name}: {collectives} collectives were noted")
                blocks.append(
                    {
                        "case": case.name,
                        "round": round_,
                        "variant": name,
                        "steps_us": list(steps_us),
                        "cpu_us": (recorder.cpu_at_flush_ns - cpu) / 1000 / plan.block_steps,
                        "flush_us": recorder.flush_ns / 1000 / plan.block_steps,
                    }
                )
        if topology.rank == 0 and sys.stderr.isatty():
            print(f"\rround {round_ + 1} of {plan.rounds}", end="", file=sys.stderr, flush=True)
    session.publish(f"blocks/{topology.rank}", blocks)
    if topology.rank == 0:
        if sys.stderr.isatty():
            print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
        ranks = [session.learn(f"blocks/{rank}") for rank in range(RANKS)]
        out.write_text(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "cases": _asdicts(CASES),
                    "variants": variants,
                    "versions": {name: peer.version for name, peer in peers[0].items()},
                    "missing": missing,
                    "ranks": ranks,
                }
            )
        )
    for run in runs:
        run.close()
    session.close()


def _asdicts(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [asdict(case) for case in cases]


# ----------------------------------------------------------------------------------------------
# From raw times to estimates.


@dataclass(frozen=True)
class CaseResult:
    """What the profiler costs in one case.

    Attributes:
        case: The case.
        plain_step_us: Median plain step.
        cost_us: Cost of a step, wall time.
        noise_us: Plain again less plain, wall time.
        cost_percent: Cost in per cent of the plain step.
        noise_percent: Noise in per cent of the plain step.
        bucket_us: Cost divided by the number of buckets.
        cpu_cost_us: Cost of a step in processor time of a rank.
        cpu_noise_us: Plain again less plain, processor time.
        flush_us: What writing the record takes between blocks, per step measured.
    """

    case: Case
    plain_step_us: float
    cost_us: Estimate
    noise_us: Estimate
    cost_percent: Estimate
    noise_percent: Estimate
    bucket_us: Estimate
    cpu_cost_us: Estimate
    cpu_noise_us: Estimate
    flush_us: float


@dataclass(frozen=True)
class PeerResult:
    """What another observer costs, and what ours costs less that, on the same rounds.

    Attributes:
        name: Its name.
        cost_us: Its cost of a step, by case.
        less_us: Ours less its, by case: below 0 where ours costs less.
        slope_us: Its cost of one more bucket.
        slope_less_us: Ours of one more bucket less its.
        cpu_cost_us: Its cost of a step in processor time of a rank, by case.
    """

    name: str
    cost_us: tuple[Estimate, ...]
    less_us: tuple[Estimate, ...]
    slope_us: Estimate
    slope_less_us: Estimate
    cpu_cost_us: tuple[Estimate, ...]


@dataclass(frozen=True)
class Verdict:
    """A goal and whether the run shows that it is met.

    Attributes:
        goal: The goal in words.
        bounds: Interval that the cost must lie in.
        interval: One-sided 95 % bounds of the cost, as an interval.
        shown: Whether the interval lies inside the bounds; None with too few rounds to tell.
    """

    goal: str
    bounds: tuple[float, float]
    interval: tuple[float, float]
    shown: bool | None


@dataclass(frozen=True)
class Result:
    """All figures of one run.

    Attributes:
        cases: By case.
        slope_us: Wall time of one more bucket.
        fixed_us: Wall time of a step without buckets: the rest.
        cpu_slope_us: Processor time of one more bucket.
        cpu_fixed_us: Processor time of a step without buckets.
        verdicts: The goals.
        peers: The other observers that were measured.
    """

    cases: tuple[CaseResult, ...]
    slope_us: Estimate
    fixed_us: Estimate
    cpu_slope_us: Estimate
    cpu_fixed_us: Estimate
    verdicts: tuple[Verdict, ...]
    peers: tuple[PeerResult, ...] = ()


def analyze(raw: dict[str, Any]) -> Result:
    """Derives all figures from the raw times that :func:`work` wrote."""
    cases = [Case(**case) for case in raw["cases"]]
    rounds = raw["plan"]["rounds"]
    results = {}
    costs: dict[str, tuple[Floats, Floats]] = {}
    names = [name for name in raw["variants"] if name not in VARIANTS]
    walls, cpus = [], []
    for case in cases:
        wall = _table(raw, case, lambda block: float(np.median(block["steps_us"][1:])))
        cpu = _table(raw, case, lambda block: block["cpu_us"])
        flush = _table(raw, case, lambda block: block["flush_us"])
        walls.append(wall)
        cpus.append(cpu)
        costs[case.name] = (_cost(wall), _cost(cpu))
        plain = float(np.median([wall["plain"], wall["plain_again"]]))
        cost, noise = estimate(_cost(wall)), estimate(wall["plain_again"] - wall["plain"])
        results[case.name] = CaseResult(
            case=case,
            plain_step_us=plain,
            cost_us=cost,
            noise_us=noise,
            cost_percent=cost.scaled(100 / plain),
            noise_percent=noise.scaled(100 / plain),
            bucket_us=cost.scaled(1 / case.buckets),
            cpu_cost_us=estimate(_cost(cpu)),
            cpu_noise_us=estimate(cpu["plain_again"] - cpu["plain"]),
            flush_us=float(np.median(flush["instrumented"])),
        )
    short, long, single = (results[case.name] for case in cases)
    more = short.case.buckets - single.case.buckets
    pairs = zip(costs[short.case.name], costs[single.case.name], strict=True)
    (slope, fixed), (cpu_slope, cpu_fixed) = (
        (estimate((a - b) / more), estimate(b - single.case.buckets * (a - b) / more))
        for a, b in pairs
    )
    return Result(
        cases=(short, long, single),
        slope_us=slope,
        fixed_us=fixed,
        cpu_slope_us=cpu_slope,
        cpu_fixed_us=cpu_fixed,
        verdicts=(
            _verdict(
                f"cost within +-{GOAL_PERCENT:g} % of the {long.case.step_ms:g} ms step",
                (-GOAL_PERCENT, GOAL_PERCENT),
                long.cost_percent,
                rounds,
            ),
            *(
                _verdict(
                    f"at most {GOAL_BUCKET_US:g} us per bucket at {result.case.step_ms:g} ms",
                    (float("-inf"), GOAL_BUCKET_US),
                    result.bucket_us,
                    rounds,
                )
                for result in (short, long)
            ),
        ),
        peers=tuple(
            _peer(name, cases, walls, [_cost(table, name) for table in cpus]) for name in names
        ),
    )


def _table(raw: dict[str, Any], case: Case, value: Any) -> dict[str, Floats]:
    """Returns a value of each block by variant, mean over ranks, shape [round]."""
    ranks = [
        {
            variant: np.array(
                [
                    value(block)
                    for block in blocks
                    if block["case"] == case.name and block["variant"] == variant
                ]
            )
            for variant in raw["variants"]
        }
        for blocks in raw["ranks"]
    ]
    return {
        variant: np.mean([rank[variant] for rank in ranks], axis=0) for variant in raw["variants"]
    }


def _cost(table: dict[str, Floats], variant: str = "instrumented") -> Floats:
    cost: Floats = table[variant] - (table["plain"] + table["plain_again"]) / 2
    return cost


def _peer(
    name: str, cases: Sequence[Case], wall: Sequence[dict[str, Floats]], cpu: Sequence[Floats]
) -> PeerResult:
    ours = [_cost(table) for table in wall]
    theirs = [_cost(table, name) for table in wall]
    # Of the cases with one length of step: eight buckets and one.
    more = cases[0].buckets - cases[2].buckets
    slope, our_slope = ((a[0] - a[2]) / more for a in (theirs, ours))
    return PeerResult(
        name=name,
        cost_us=tuple(map(estimate, theirs)),
        less_us=tuple(estimate(a - b) for a, b in zip(ours, theirs, strict=True)),
        slope_us=estimate(slope),
        slope_less_us=estimate(our_slope - slope),
        cpu_cost_us=tuple(map(estimate, cpu)),
    )


def _verdict(goal: str, bounds: tuple[float, float], found: Estimate, rounds: int) -> Verdict:
    low, high = found.ci90
    inside = bounds[0] < low and high <= bounds[1]
    return Verdict(goal, bounds, found.ci90, inside if rounds >= LEAST_ROUNDS else None)


# ----------------------------------------------------------------------------------------------
# What is shown.


_COLUMN = 19
"""Characters of a column; three of them and the names fill 79."""


def render(result: Result, raw: dict[str, Any]) -> str:
    """Returns the table, at most 80 columns wide."""
    plan = raw["plan"]
    lines = [
        f"Overhead of the profiler: timed workload, {LAYERS} layers, dp = {RANKS}, gloo on CPU",
        machine_line(raw),
        f"{plan['rounds']} rounds of 3 cases x {len(raw['variants'])} variants x "
        f"{plan['block_steps']} steps; "
        "cost [95 % interval]",
        "",
        _row("", ["36 ms", "108 ms", "36 ms"]),
        _row("", [_buckets(r.case.buckets) for r in result.cases]),
        _row("plain step, ms", [f"{r.plain_step_us / 1000:.2f}" for r in result.cases]),
        _row("cost of a step, us", [_us(r.cost_us) for r in result.cases]),
        _row("noise, us", [_us(r.noise_us) for r in result.cases]),
        _row("cost, % of step", [_percent(r.cost_percent) for r in result.cases]),
        _row("noise, % of step", [_percent(r.noise_percent) for r in result.cases]),
        _row("cost per bucket, us", [_us(r.bucket_us) for r in result.cases]),
        _row("CPU cost of step, us", [_us(r.cpu_cost_us) for r in result.cases]),
        _row("CPU noise, us", [_us(r.cpu_noise_us) for r in result.cases]),
        _row("flush, us per step", [f"{r.flush_us:.0f}" for r in result.cases]),
        "",
        _row("", ["wall, us", "CPU, us"]),
        _row("one more bucket", [_us(result.slope_us), _us(result.cpu_slope_us)]),
        _row("step without buckets", [_us(result.fixed_us), _us(result.cpu_fixed_us)]),
        "",
        f"{'Goal':<42}{'90 % interval':>22}  {'Verdict':<14}",
    ]
    for verdict in result.verdicts:
        low, high = verdict.interval
        span = f"{low:.2f} to {high:.2f}" if "%" in verdict.goal else f"{low:.0f} to {high:.0f}"
        names = {True: "shown", False: "not shown", None: "too few rounds"}
        if "+-" in verdict.goal:
            names[True] = "equivalent"
        shown = names[verdict.shown]
        lines.append(f"{verdict.goal:<42}{span:>22}  {shown:<14}".rstrip())
    if result.peers or raw["missing"]:
        lines += _beside(result, raw)
    return "\n".join(lines)


def _beside(result: Result, raw: dict[str, Any]) -> list[str]:
    """Returns the lines about other observers of the same steps."""
    lines = ["", "Others in the same rounds; us a step, wall and CPU time"]
    for peer in result.peers:
        lines += [
            f"{peer.name} {raw['versions'][peer.name]}",
            _row("  cost of a step", map(_us, peer.cost_us)),
            _row("  CPU cost of step", map(_us, peer.cpu_cost_us)),
            _row("  ours less its", map(_us, peer.less_us)),
            _row("  one more bucket", [_us(peer.slope_us)]),
            _row("    ours less its", [_us(peer.slope_less_us)]),
        ]
        # The upper end of the 90 % interval is a one-sided 95 % bound.
        steps = [found.ci90[1] < 0 for found in peer.less_us]
        bucket = peer.slope_less_us.ci90[1] < 0
        said = [f"{sum(steps)} of {len(steps)} cases" if any(steps) else "no case"]
        said += ["below" if bucket else "not below"]
        lines.append(f"  ours is shown to cost less in {said[0]}; per bucket {said[1]}")
    return [*lines, *(f"not measured: {why}"[:79] for why in raw["missing"])]


def _buckets(count: int) -> str:
    return f"{count} bucket{'s' if count > 1 else ''}"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def _us(found: Estimate) -> str:
    return found.cell(0, _COLUMN)


def _percent(found: Estimate) -> str:
    return found.cell(2, _COLUMN)


# ----------------------------------------------------------------------------------------------
# The command.


def measure(plan: Plan) -> dict[str, Any]:
    """Starts the ranks and returns their raw times with the plan and the machine.

    Raises:
        RuntimeError: The launch failed.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "raw.json"
        words: list[str | Path] = [
            Path(__file__).resolve(),
            "--worker",
            out,
            "--rounds",
            str(plan.rounds),
        ]
        words += ["--block-steps", str(plan.block_steps), "--warmup", str(plan.warmup)]
        words += ["--peers"] * plan.peers
        launch(RANKS, words)
        raw: dict[str, Any] = json.loads(out.read_text())
    return {**head(FORMAT_VERSION, load), "plan": asdict(plan), **raw}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overhead.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=at_least(2), default=36, help="rounds (36); a multiple of 6 balances"
    )
    parser.add_argument("--block-steps", type=at_least(2), default=10, help="steps in a block (10)")
    parser.add_argument("--warmup", type=at_least(3), default=20, help="steps beforehand (20)")
    add_file_options(parser)
    parser.add_argument("--peers", action="store_true", help="measure other observers as well")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 3 steps: a smoke test")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, options.block_steps, options.warmup, options.peers)
    if options.quick:
        plan = replace(plan, rounds=2, block_steps=3, warmup=3)
    if options.worker is not None:
        work(plan, options.worker)
        end_rank()
    raw = read_figures(parser, options, FORMAT_VERSION)
    if raw is None:
        try:
            raw = measure(plan)
        except RuntimeError as error:
            print(f"overhead.py: {error}", file=sys.stderr)
            return 1
    result = analyze(raw)
    print(render(result, raw))
    if options.json is not None:
        raw["result"] = finite(asdict(result))
        options.json.write_text(json.dumps(raw) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

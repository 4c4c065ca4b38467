#!/usr/bin/env python3
"""What the profiler costs a training script, and whether it measures scripts as its own loop.

Two questions, each answered by launches that take turns: the same plain script with and without
the profiler, by the script's own clock; and the same training by the profiler's loop, by a plain
script and by scripts of Accelerate, Trainer and Lightning, all measured by the profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchkit import (
    ROOT,
    Estimate,
    Floats,
    add_file_options,
    at_least,
    estimate,
    finite,
    head,
    launch,
    machine_line,
    read_figures,
)

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

RANKS = 2
LAYERS = 8
PARAMETERS = 65536
MICRO_BATCH = 4
WARMUP = 5
ACCUMULATION = 2
STEPS_MS = (36, 108)
KINDS = ("loop", "torch", "accelerate", "trainer", "lightning")
PARTS = ("forward", "backward", "exposed", "optimizer", "data and other", "step")
BUCKET_CAP_MB = PARAMETERS * 4 / 2**20
SCRIPT = Path(__file__).resolve().with_name("training_script.py")

_SETTLING = 3
"""Steps after the window that are left out: everything has just been taken out of torch."""

_HELP = f"""Measure what observing a script costs, and whether scripts are measured right.

It starts its own launches with {RANKS} ranks (gloo, CPU). The model is "timed": {LAYERS} layers of
{PARAMETERS} parameters that sleep, one gradient bucket each.

cost        a plain script with and without the profiler, launches that take turns; its
            steps by its own clock: while the profiler observes, in the plain blocks
            between, and after the observed steps
agreement   the same training (accumulation {ACCUMULATION}) by the profiler's own loop, a plain
            script, Accelerate, Trainer and Lightning: parts as the profiler measures them
"""
_EPILOG = """How to read the tables:
  cost        median step of each launch with the profiler, less that of the launch
              without it, same steps of training; trimmed mean over rounds (a fifth left
              out at each end) with a 95 % bootstrap interval. "window": all observed
              steps and what lies between them (attaching, writing), per step
  agreement   means over steps and ranks, in ms, and over rounds; "less loop": the
              difference of steps to the profiler's own loop in the same round. The loss
              is part of forward in the loop and in Trainer, of other elsewhere; what a
              framework does for itself is in other

Examples:
  python benchmarks/scripts.py --json figures.json   about 20 minutes
  python benchmarks/scripts.py --only cost
  python benchmarks/scripts.py --quick               half a minute: does it run?
  python benchmarks/scripts.py --read figures.json   the tables of an earlier run

Leave the machine alone meanwhile. Exit codes: 0 done, whatever was found; 1 a launch
failed; 2 wrong usage.
"""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Rounds; in each, each launch runs once.
        steps: Optimizer steps observed in each variant.
        after: Optimizer steps after the observed ones.
        steps_ms: Lengths of a step for the question of cost.
        kinds: Kinds of training for the question of agreement.
    """

    rounds: int
    steps: int
    after: int
    steps_ms: Sequence[float] = STEPS_MS
    kinds: Sequence[str] = KINDS

    @property
    def window(self) -> int:
        """Number of the step with which the observed ones end."""
        return WARMUP + 2 * self.steps


def model(step_ms: float, accumulation: int) -> str:
    """Returns the timed model whose steps take so long."""
    layer = step_ms / LAYERS / accumulation
    return (
        f"timed:layers={LAYERS},parameters={PARAMETERS},pace=layer,"
        f"forward_ms={layer / 3:g},backward_ms={layer * 2 / 3:g}"
    )


# ----------------------------------------------------------------------------------------------
# Cost.


def measure_cost(plan: Plan) -> list[dict[str, Any]]:
    """Runs the plain script with and without the profiler in turn.

    Returns:
        For each launch its round, step length, whether it was observed, the lengths of its
        steps in us by its own clock, and the variant of each as the record has it.
    """
    found = []
    for round_ in range(plan.rounds):
        for step_ms in plan.steps_ms:
            for observed in (True, False) if round_ % 2 else (False, True):
                _tell(f"cost: round {round_ + 1} of {plan.rounds}, {step_ms} ms, {observed=}")
                found.append(
                    {
                        "round": round_,
                        "step_ms": step_ms,
                        "observed": observed,
                        **_timed_launch(plan, step_ms, observed=observed),
                    }
                )
    return found


def _timed_launch(plan: Plan, step_ms: float, *, observed: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        times, run = Path(folder) / "times.json", Path(folder) / "run"
        words: list[str | Path] = [SCRIPT, "--model", model(step_ms, 1), "--times", times]
        words += ["--steps", str(plan.window + plan.after), "--micro-batch", str(MICRO_BATCH)]
        words += ["--bucket-cap-mb", f"{BUCKET_CAP_MB:g}"]
        # As the profiler ends what it observes.
        words = [*_observer(plan.steps, run), *words] if observed else [*words, "--leave"]
        launch(RANKS, words, quiet=True)
        ends = np.array(json.loads(times.read_text()))
        variants = _variants(run) if observed else []
    return {"steps_us": list(np.diff(ends) * 1e6), "variants": variants}


def _observer(steps: int, run: Path) -> list[str | Path]:
    return [
        *("-m", "ddp_profiler.run", "--steps", str(steps), "--warmup", str(WARMUP)),
        *("--out", run),
    ]


def _variants(run: Path) -> list[str]:
    """Returns the name of the variant of each observed step, in order."""
    from ddp_profiler.record import reader
    from ddp_profiler.schema import SpanKind, Variant

    spans = reader.read_rank(run, 0).columns
    chosen = np.flatnonzero(spans["kind"] == SpanKind.STEP)
    chosen = chosen[np.argsort(spans["step"][chosen])]
    return [Variant(int(value)).name for value in spans["variant"][chosen]]


@dataclass(frozen=True)
class Cost:
    """What observing costs a step of the script, in us.

    Attributes:
        step_ms: Length of the step that the model's sleeps make.
        plain_us: Median step without the profiler.
        instrumented: While all is observed.
        plain: In the plain blocks between.
        after: After the observed steps.
        window: Of all observed steps together, what lies between them included.
    """

    step_ms: float
    plain_us: float
    instrumented: Estimate
    plain: Estimate
    after: Estimate
    window: Estimate


def analyze_cost(launches: Sequence[Mapping[str, Any]], plan: Plan) -> list[Cost]:
    """Compares the launches of each round."""
    return [_cost_of([x for x in launches if x["step_ms"] == ms], ms, plan) for ms in plan.steps_ms]


def _cost_of(launches: Sequence[Mapping[str, Any]], step_ms: float, plan: Plan) -> Cost:
    differences: dict[str, list[float]] = {
        name: [] for name in ("instrumented", "plain", "after", "window")
    }
    plain = []
    for round_ in range(plan.rounds):
        pair = {x["observed"]: x for x in launches if x["round"] == round_}
        ours, theirs = (np.array(pair[which]["steps_us"]) for which in (True, False))
        variants = np.array(pair[True]["variants"])
        steps = np.arange(len(ours))
        inside = (steps >= WARMUP) & (steps < plan.window)
        after = steps >= plan.window + _SETTLING
        named = np.full(len(ours), "", dtype=object)
        named[: len(variants)] = variants
        # The first step of a block also holds what lies between blocks.
        starts = np.concatenate(([True], named[1:] != named[:-1]))
        for name, chosen in (
            ("instrumented", (named == "INSTRUMENTED") & ~starts),
            ("plain", (named == "PLAIN") & ~starts),
            ("after", after),
        ):
            differences[name].append(float(np.median(ours[chosen]) - np.median(theirs[chosen])))
        differences["window"].append(float(ours[inside].mean() - theirs[inside].mean()))
        plain.append(float(np.median(theirs[inside | after])))
    return Cost(
        step_ms,
        float(np.median(plain)),
        **{name: estimate(np.array(values)) for name, values in differences.items()},
    )


# ----------------------------------------------------------------------------------------------
# Agreement.


def measure_agreement(plan: Plan) -> list[dict[str, Any]]:
    """Has the profiler measure the same training in each kind, in turn."""
    found = []
    for round_ in range(plan.rounds):
        shift = round_ % len(plan.kinds)
        for kind in (*plan.kinds[shift:], *plan.kinds[:shift]):
            _tell(f"agreement: round {round_ + 1} of {plan.rounds}, {kind}")
            found.append({"round": round_, "kind": kind, **_observed_launch(plan, kind)})
    return found


def _observed_launch(plan: Plan, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words: list[str | Path] = ["--model", model(STEPS_MS[0], ACCUMULATION)]
        words += ["--micro-batch", str(MICRO_BATCH), "--bucket-cap-mb", f"{BUCKET_CAP_MB:g}"]
        if kind == "loop":
            words += ["--dp", str(RANKS), "--accumulate", str(ACCUMULATION)]
            words += ["--threads-per-rank", "1", "--allreduce-max-mb", "0"]
            launch(RANKS, [*_observer(plan.steps, run), *words], quiet=True)
        else:
            words += ["--kind", kind, "--accumulation", str(ACCUMULATION)]
            words += ["--steps", str(plan.window + 2)]
            launch(RANKS, [*_observer(plan.steps, run), SCRIPT, *words], quiet=True)
        level = json.loads((run / "summary.json").read_text())["levels"][-1]
    parts = level["breakdown_ms"]
    return {
        "parts_ms": {
            "forward": parts["forward"] + parts["forward_comm"],
            "backward": parts["backward"],
            "exposed": sum(
                parts[name] or 0.0 for name in ("exposed_wait", "exposed_transfer", "exposed_copy")
            ),
            "optimizer": parts["optimizer"],
            "data and other": parts["data"] + parts["other"],
            "step": level["step_ms"]["mean"],
        },
        "ci95_ms": level["step_ms"]["ci95"],
        "observed": level["batch_check"]["observed"],
        "collectives": level["comm"]["num_gradient_collectives_per_step"],
        "gradient_bytes": level["comm"]["gradient_bytes"],
    }


@dataclass(frozen=True)
class Agreement:
    """How one kind of script compares with the profiler's own loop.

    Attributes:
        kind: Which.
        parts_ms: Median over rounds of each part.
        less_loop: Its step less that of the loop in the same round, in us.
        forward_less_loop: The same of forward.
        backward_less_loop: The same of backward.
        observed: Observed global batch; None where rounds differ.
        collectives: Gradient collectives a step, likewise.
        gradient_bytes: Bytes reduced in a step, likewise.
    """

    kind: str
    parts_ms: Mapping[str, float]
    less_loop: Estimate
    forward_less_loop: Estimate
    backward_less_loop: Estimate
    observed: int | None
    collectives: float | None
    gradient_bytes: int | None


def analyze_agreement(launches: Sequence[Mapping[str, Any]]) -> list[Agreement]:
    """Compares each kind with the loop, round by round."""
    kinds = [kind for kind in KINDS if any(x["kind"] == kind for x in launches)]
    by_kind = {kind: [x for x in launches if x["kind"] == kind] for kind in kinds}

    def values(kind: str, part: str) -> Floats:
        return np.array([x["parts_ms"][part] for x in by_kind[kind]])

    def less(kind: str, part: str) -> Estimate:
        return estimate((values(kind, part) - values("loop", part)) * 1000)

    def same(kind: str, name: str) -> Any:
        found = {x[name] for x in by_kind[kind]}
        return found.pop() if len(found) == 1 else None

    return [
        Agreement(
            kind=kind,
            parts_ms={part: float(np.median(values(kind, part))) for part in PARTS},
            less_loop=less(kind, "step"),
            forward_less_loop=less(kind, "forward"),
            backward_less_loop=less(kind, "backward"),
            observed=same(kind, "observed"),
            collectives=same(kind, "collectives"),
            gradient_bytes=same(kind, "gradient_bytes"),
        )
        for kind in kinds
    ]


# ----------------------------------------------------------------------------------------------
# What is shown.

_COLUMN = 24


def render(raw: Mapping[str, Any]) -> str:
    """Returns the tables, at most 80 columns wide."""
    plan = Plan(**raw["plan"])
    lines = [
        f"Scripts under the profiler: timed model, {LAYERS} layers, {LAYERS} buckets, dp = {RANKS}",
        machine_line(raw),
    ]
    if raw.get("cost"):
        found = analyze_cost(raw["cost"], plan)
        lines += [
            "",
            f"Cost by the script's own clock, {plan.rounds} rounds; us per step [95 % interval]",
            _row("", [f"{cost.step_ms:g} ms" for cost in found]),
            _row("step without us, us", [f"{cost.plain_us:.0f}" for cost in found]),
            *(
                _row(text, [getattr(cost, name).cell(0, _COLUMN) for cost in found])
                for name, text in (
                    ("instrumented", "observed step"),
                    ("plain", "plain step between"),
                    ("window", "all of the window"),
                    ("after", "after the window"),
                )
            ),
            _row(
                "observed step, %",
                [c.instrumented.scaled(100 / c.plain_us).cell(2, _COLUMN) for c in found],
            ),
            _row(
                "after the window, %",
                [c.after.scaled(100 / c.plain_us).cell(2, _COLUMN) for c in found],
            ),
        ]
    if raw.get("agreement"):
        kinds = analyze_agreement(raw["agreement"])
        lines += [
            "",
            f"The same training, micro-batch {MICRO_BATCH} x accumulation {ACCUMULATION} x dp "
            f"{RANKS}; ms, median of {plan.rounds} rounds",
            f"{'':<22}" + "".join(f"{kind.kind:>11}" for kind in kinds),
            *(
                f"{part:<22}" + "".join(f"{kind.parts_ms[part]:>11.2f}" for kind in kinds)
                for part in PARTS
            ),
            f"{'observed batch':<22}" + "".join(f"{kind.observed!s:>11}" for kind in kinds),
            f"{'collectives a step':<22}" + "".join(f"{k.collectives!s:>11}" for k in kinds),
            f"{'gradient bytes':<22}" + "".join(f"{k.gradient_bytes!s:>11}" for k in kinds),
            "",
            "Less the profiler's own loop, us [95 % interval]",
            f"{'':<11}" + "".join(f"{name:>23}" for name in ("forward", "backward", "step")),
            *(
                f"{kind.kind:<11}"
                + "".join(
                    f"{found.cell(0, 23):>23}"
                    for found in (kind.forward_less_loop, kind.backward_less_loop, kind.less_loop)
                )
                for kind in kinds[1:]
            ),
        ]
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


# ----------------------------------------------------------------------------------------------
# The command.


def _tell(text: str) -> None:
    print(f"scripts.py: {text}", file=sys.stderr, flush=True)


def measure(plan: Plan, only: str | None) -> dict[str, Any]:
    """Measures what was asked for.

    Raises:
        RuntimeError: A launch failed.
    """
    import torch

    load = os.getloadavg()[0]
    cost = measure_cost(plan) if only != "agreement" else []
    agreement = measure_agreement(plan) if only != "cost" else []
    return {
        **head(FORMAT_VERSION, load),
        "torch": torch.__version__,
        "plan": asdict(plan),
        "cost": cost,
        "agreement": agreement,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=at_least(2), default=12, help="rounds (12)")
    parser.add_argument("--steps", type=at_least(4), default=20, help="steps in each variant (20)")
    parser.add_argument("--after", type=at_least(8), default=40, help="steps after them (40)")
    parser.add_argument("--only", choices=("cost", "agreement"), help="one of the two questions")
    add_file_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="one short round of the first cases: a smoke test"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, options.steps, options.after)
    if options.quick:
        plan = Plan(rounds=1, steps=4, after=8, steps_ms=STEPS_MS[:1], kinds=KINDS[:2])
    sys.path.insert(0, str(ROOT))
    raw = read_figures(parser, options, FORMAT_VERSION)
    if raw is None:
        try:
            raw = measure(plan, options.only)
        except RuntimeError as error:
            _tell(str(error))
            return 1
    print(render(raw))
    if options.json is not None:
        raw["result"] = finite(
            {
                "cost": [asdict(x) for x in analyze_cost(raw["cost"], Plan(**raw["plan"]))]
                if raw["cost"]
                else [],
                "agreement": [asdict(x) for x in analyze_agreement(raw["agreement"])]
                if raw["agreement"]
                else [],
            }
        )
        options.json.write_text(json.dumps(raw) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

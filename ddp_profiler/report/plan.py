"""A plan as text of at most 80 columns, readable without colour."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.predict.plan import Alternative, Plan
from ddp_profiler.report.text import table_of, text_console

_ALTERNATIVES_SHOWN = 8
_KINDS = {
    "given": "by --step-ms",
    "measured": "by a level of the run with these settings",
    "re-expressed": "measured at this dp, and moved by the step model; see --json",
    "predicted": "the study replayed at these settings",
    "extrapolated": "predicted, beyond what was measured",
}
"""Where step times come from, in a word, and what it means."""
_FITS = {True: "yes", False: "no", None: "?"}


def render(plan: Plan, *, color: bool = False) -> str:
    """Returns the plan: batch, epochs, time, alternatives."""
    output = io.StringIO()
    console = text_console(output, color=color)

    def say(text: str) -> None:
        console.print(Text(units.printable(text)))

    for line in _heading(plan):
        say(line)
    if plan.tp * plan.pp > 1:
        say(
            f"world size {plan.world_size} = dp {plan.dp} x tp {plan.tp} x pp {plan.pp}; "
            "rank means replica below"
        )
    console.print()
    console.print(_counts(plan))
    console.print()
    for line in plan.rounding or ("nothing is rounded",):
        say(f"rounding: {line}")
    for line in _time(plan):
        say(line)
    for note in plan.notes:
        say(f"note: {note}")
    if plan.alternatives:
        console.print()
        say(f"other settings of global batch {plan.global_batch}, the best first")
        console.print(_alternatives(plan.alternatives))
        for line in _legend(plan.alternatives):
            say(line)
        left = len(plan.alternatives) - _ALTERNATIVES_SHOWN
        if left > 0:
            say(f"and {left} more, with --json")
    # The library fills cells up with blanks, which would wrap in a narrower window.
    return "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())


def _heading(plan: Plan) -> list[str]:
    epochs = f"{plan.epochs} epoch{'s' if plan.epochs > 1 else ''}"
    memory = {True: ", fits in memory", False: ", DOES NOT FIT in memory"}
    return [
        f"{plan.samples} samples, {epochs}",
        f"global batch {plan.global_batch} = micro-batch {plan.micro_batch} x accumulation "
        f"{plan.accumulation} x dp {plan.dp}" + ("" if plan.fits is None else memory[plan.fits]),
    ]


def _counts(plan: Plan) -> Table:
    table = table_of(("", "left"), ("an epoch", "right"), ("in all", "right"))
    epochs = plan.epochs

    def row(label: str, each: int, total: int | None = None) -> None:
        table.add_row(label, str(each), str(each * epochs if total is None else total))

    row("samples that steps use", plan.samples_processed, plan.total_samples_processed)
    row("samples repeated", plan.samples_repeated)
    row("samples dropped", plan.samples_dropped, plan.total_samples_dropped)
    row("samples of a rank", plan.samples_per_rank)
    row("micro-steps", plan.micro_steps_per_epoch)
    if plan.total_unused_micro_steps:
        # Where windows carry over they are those at the end of the run, and of no epoch.
        carried = plan.total_samples_dropped > epochs * plan.samples_dropped
        table.add_row(
            "  that no step takes",
            units.NOTHING if carried else str(plan.total_unused_micro_steps // epochs),
            str(plan.total_unused_micro_steps),
        )
    each = plan.optimizer_steps_per_epoch
    table.add_row(
        "optimizer steps",
        str(each) if isinstance(each, int) else units.rate(each),
        str(plan.total_optimizer_steps),
        style="bold",
    )
    return table


def _time(plan: Plan) -> list[str]:
    step = plan.step_time
    if step is None or plan.training_time_s is None:
        return []
    span = ""
    if plan.training_time_interval_s is not None:
        low, high = map(units.duration, plan.training_time_interval_s)
        span = f" ({step.interval_pct} %: {low} to {high})"
    terms = plan.training_time_terms_s
    more = "".join(
        f" + {name} {units.duration(terms[key])}"
        for key, name in (
            ("unused_micro_steps", "unused micro-steps"),
            ("startup", "start-up"),
            ("evaluation", "evaluations"),
            ("checkpoint", "checkpoints"),
        )
        if terms[key]
    )
    return [
        f"training time: {units.duration(plan.training_time_s)}{span}",
        f"  {plan.total_optimizer_steps} steps of {units.ms(step.ms)} ms ({step.source}){more}",
    ]


def _alternatives(alternatives: Sequence[Alternative]) -> Table:
    timed = any(other.training_time_s is not None for other in alternatives)
    columns = [
        ("micro-batch x acc. x dp", "right"),
        ("steps", "right"),
    ]
    known = any(other.fits is not None for other in alternatives)
    if known:
        columns.append(("fits", "left"))
    if timed:
        columns += [("step (ms)", "right"), ("time", "right"), ("from", "left")]
    table = table_of(*columns)
    for other in alternatives[:_ALTERNATIVES_SHOWN]:
        cells = [
            f"{other.micro_batch} x {other.accumulation} x {other.dp}",
            str(other.total_optimizer_steps),
        ]
        if known:
            cells.append(_FITS[other.fits])
        if timed:
            cells += [
                units.ms(other.step_ms),
                units.duration(other.training_time_s),
                _kind(other.source),
            ]
        table.add_row(*cells)
    return table


def _kind(source: str | None) -> str:
    """Returns the source of a step time in a word; the source itself if it is another."""
    if source is None:
        return ""
    for words, kind in (
        ("re-expressed", "re-expressed"),
        ("beyond what was measured", "extrapolated"),
    ):
        if words in source:
            return kind
    first = source.split(maxsplit=1)[0]
    return first if first in _KINDS else units.printable(source)


def _legend(alternatives: Sequence[Alternative]) -> list[str]:
    """Explains the words for sources that are shown."""
    shown = {_kind(other.source) for other in alternatives[:_ALTERNATIVES_SHOWN]}
    return [f"{kind}: {meaning}" for kind, meaning in _KINDS.items() if kind in shown]

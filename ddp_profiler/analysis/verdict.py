"""A run in one sentence: whether it can be trusted, how it scales, and what costs most."""

from __future__ import annotations

from ddp_profiler import units
from ddp_profiler.analysis.placement import largest
from ddp_profiler.analysis.results import LevelResult, Summary

_EXPOSED = {
    "forward_comm": "communication in forward",
    "backward_comm": "communication of modules in backward",
    "exposed_wait": "waiting for the last rank",
    "exposed_transfer": "transfer",
}
_CLASSES = {
    "compute": ("forward", "backward"),
    "waiting for data": ("data",),
    "exposed communication": tuple(_EXPOSED),
    "copying buckets": ("exposed_copy",),
    "the optimizer": ("optimizer",),
    "time between the parts": ("other",),
}
_NO_GAIN = 0.95
"""Efficiency from which on scaling is called near ideal."""


def verdict(summary: Summary) -> str:
    """Returns one sentence; what is wrong goes before what is slow.

    Args:
        summary: A run's.
    """
    text = _told(summary)
    return text[:1].upper() + text[1:]


def _told(summary: Summary) -> str:
    level = largest([lv for lv in summary.levels if lv.step_ms and lv.instrumented_step_ms])
    level = level or largest([lv for lv in summary.levels if lv.instrumented_step_ms])
    state = "the record is partial: " if summary.run.partial else ""
    if level is None:
        return f"{state}no step was measured, so nothing can be said about time."
    errors = [finding for finding in summary.findings if finding.severity == "error"]
    if errors:
        more = f" ({len(errors)} errors in all)" if len(errors) > 1 else ""
        return f"{state}mend this before you trust its speed{more}: {errors[0].message}"
    return f"{state}{_speed(level)}{_where(level)}{_late(level)}."


def _speed(level: LevelResult) -> str:
    step = level.step_ms or level.instrumented_step_ms
    assert step is not None
    took = f"a step takes {units.ms(step.median)} ms"
    if level.dp == 1:
        return f"on one rank {took}"
    if level.efficiency is None or level.speedup is None:
        return f"on {level.dp} ranks {took}"
    near = "near ideal, " if level.efficiency >= _NO_GAIN else ""
    return (
        f"{level.dp} ranks do the work of {level.speedup:.2f}, {near}an efficiency of "
        f"{units.percent(level.efficiency, 0)}: {took}"
    )


def _where(level: LevelResult) -> str:
    """Says what takes most, and the largest part that is no computation."""
    step = level.instrumented_step_ms
    assert step is not None
    parts = {name: value or 0.0 for name, value in level.breakdown_ms.items()}
    sums = {name: sum(parts[part] for part in of) for name, of in _CLASSES.items()}
    first, second = sorted(sums, key=lambda name: -sums[name])[:2]

    def told(name: str) -> str:
        return f"{_precise(level, name, parts)} ({units.percent(sums[name] / step.mean, 0)})"

    return f", of which most is {told(first)} and next {told(second)}"


def _precise(level: LevelResult, name: str, parts: dict[str, float]) -> str:
    if name != "exposed communication":
        return name
    kind = max(_EXPOSED, key=lambda part: parts[part])
    if kind == "exposed_transfer" and level.breakdown_ms["exposed_wait"] is None:
        return f"{name}, or waiting"
    return f"{name}, chiefly {_EXPOSED[kind]}"


def _late(level: LevelResult) -> str:
    late = level.straggler
    if late is None:
        return ""
    often = units.percent(late.share_of_steps_fraction, 0)
    return f"; rank {late.rank} comes {units.ms(late.lag_ms)} ms late in {often} of the steps"

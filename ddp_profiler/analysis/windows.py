"""Finds the steps of a script that are no steady training: interrupted ones and incomplete ones.

They stay in the record. Figures leave them out, and notes say what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler import units
from ddp_profiler.analysis.parts import NULL, Columns, Ints, step_keys
from ddp_profiler.schema import Interruption, SpanKind, Variant

_MEASURED = (Variant.PLAIN, Variant.INSTRUMENTED)
_NAMES = {
    Interruption.EVALUATION: "evaluation",
    Interruption.CHECKPOINT: "saving",
}
_STEPS_SHOWN = 8
_WINDOWS_SHOWN = 4


@dataclass(frozen=True)
class LeftOut:
    """Steps of a level that no figure is made of.

    Attributes:
        keys: Their keys, as in :class:`~ddp_profiler.analysis.parts.Steps`, ascending.
        notes: What they were.
    """

    keys: Ints
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _StepTable:
    """The measured steps of all ranks together, shape [step] or [step, rank]."""

    key: Ints
    number: Ints
    wall_ms: npt.NDArray[np.float64]
    micro_steps: Ints
    samples: Ints


def left_out(columns: Sequence[Columns], level: int) -> LeftOut:
    """Returns the steps that are left out of a level's figures.

    A step in which something was evaluated or saved, on any
    rank, is left out; where more than half of the steps are so, it is part of training, and
    they stay. So is a step with fewer micro-steps or samples on any rank than that rank has
    in most of its steps; where no number is that of more than half of them, they stay.

    Args:
        columns: Each rank's spans by column.
        level: Index of the level.
    """
    chosen = [_measured(rank, level) for rank in columns]
    table = _table(chosen)
    if table is None:
        return LeftOut(np.empty(0, dtype=np.int64), ())
    out = np.zeros(len(table.key), dtype=np.bool_)
    notes = []
    for reason in Interruption:
        held, length_ms = _interrupted(chosen, reason, table.key)
        if not held.any():
            continue
        if held.sum() * 2 > len(held):
            notes.append(
                f"{held.sum()} of {len(held)} steps hold {_NAMES[reason]} (mean "
                f"{units.ms(length_ms[held].mean())} ms): taken as a part of training, in `other`."
            )
            continue
        out |= held
        notes.append(
            f"{held.sum()} of {len(held)} steps hold {_NAMES[reason]} (mean "
            f"{units.ms(length_ms[held].mean())} ms of a step of "
            f"{units.ms(table.wall_ms[held].mean())} ms) and are left out of all figures: "
            f"{_listed(table.number[held])}."
        )
    short = _short(table.micro_steps) | _short(table.samples)
    notes += _short_notes(table, short)
    out |= short
    return LeftOut(table.key[out], tuple(notes))


def _measured(columns: Columns, level: int) -> Mapping[str, Ints]:
    chosen = (columns["level"] == level) & np.isin(columns["variant"], _MEASURED)
    return {name: values[chosen].astype(np.int64) for name, values in columns.items()}


def _table(chosen: Sequence[Mapping[str, Ints]]) -> _StepTable | None:
    """Puts the steps that all ranks have beside each other; None if a script had none."""
    steps = []
    for spans in chosen:
        # Only scripts count micro-steps in the span of a step.
        is_step = (spans["kind"] == SpanKind.STEP) & (spans["index"] >= 0)
        steps.append({name: values[is_step] for name, values in spans.items()})
    keys = [step_keys(s["repetition"], s["step"]) for s in steps]
    if not keys:
        return None
    shared = keys[0]
    for other in keys[1:]:
        shared = np.intersect1d(shared, other)
    shared = np.unique(shared)
    if not len(shared):
        return None
    rows = [np.searchsorted(key, shared, sorter=np.argsort(key)) for key in keys]
    rows = [np.argsort(key)[row] for key, row in zip(keys, rows, strict=True)]

    def beside(name: str) -> Ints:
        found: Ints = np.stack([s[name][row] for s, row in zip(steps, rows, strict=True)], axis=1)
        return found

    return _StepTable(
        key=shared,
        number=beside("step")[:, 0],
        wall_ms=(beside("end_ns") - beside("begin_ns")).mean(axis=1) / 1e6,
        micro_steps=beside("index"),
        samples=beside("samples"),
    )


def _interrupted(
    chosen: Sequence[Mapping[str, Ints]], reason: Interruption, keys: Ints
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Returns which steps were interrupted so, and for how many ms on the rank where longest."""
    longest = np.zeros(len(keys))
    held = np.zeros(len(keys), dtype=np.bool_)
    for spans in chosen:
        is_one = (spans["kind"] == SpanKind.INTERRUPTION) & (spans["index"] == reason)
        key = step_keys(spans["repetition"], spans["step"])[is_one]
        known = np.isin(key, keys)
        row = np.searchsorted(keys, key[known])
        length = (spans["end_ns"] - spans["begin_ns"])[is_one][known] / 1e6
        longest = np.maximum(longest, np.bincount(row, weights=length, minlength=len(keys)))
        held[row] = True
    return held, longest


def _short(counts: Ints) -> npt.NDArray[np.bool_]:
    """Returns which steps have less than usual on a rank; ``counts`` has shape [step, rank]."""
    short = np.zeros(len(counts), dtype=np.bool_)
    for rank in counts.T:
        values, times = np.unique(rank, return_counts=True)
        most = times.argmax()
        if values[most] != NULL and times[most] * 2 > len(rank):
            short |= (rank < values[most]) & (rank != NULL)
    return short


def _short_notes(table: _StepTable, short: npt.NDArray[np.bool_]) -> list[str]:
    if not short.any():
        return []
    usual = np.median(table.micro_steps[~short], axis=0)
    shown = [
        f"step {table.number[i]}: {_counts(table.micro_steps[i])} of {_counts(usual)} micro-steps"
        + ("" if NULL in table.samples[i] else f", {table.samples[i].sum()} samples")
        for i in np.flatnonzero(short)[:_WINDOWS_SHOWN]
    ]
    more = int(short.sum()) - len(shown)
    return [
        f"{short.sum()} of {len(short)} steps were incomplete and are left out of all figures "
        f"({'; '.join(shown)}{f'; and {more} more' if more else ''})."
    ]


def _counts(ranks: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> str:
    """Returns one number where all ranks have the same, else all of them."""
    values = [f"{value:g}" for value in ranks]
    return values[0] if len(set(values)) == 1 else "/".join(values)


def _listed(numbers: Ints) -> str:
    shown = ", ".join(str(number) for number in numbers[:_STEPS_SHOWN])
    more = len(numbers) - _STEPS_SHOWN
    return f"step{'s' if len(numbers) > 1 else ''} {shown}" + (
        f" and {more} more" if more > 0 else ""
    )

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
_INCOMPLETE_SHOWN = 4


@dataclass(frozen=True)
class IncompleteStep:
    """An incomplete step, one entry a rank each.

    Attributes:
        step: Its number.
        micro_steps: Micro-steps that it has.
        usual: Micro-steps that the rank's steps usually have.
        samples: Samples of it; None where they were not seen.
    """

    step: int
    micro_steps: tuple[int, ...]
    usual: tuple[int, ...]
    samples: tuple[int, ...] | None


@dataclass(frozen=True)
class LeftOut:
    """Steps of a level that no figure is made of.

    Attributes:
        keys: Their keys, as in :class:`~ddp_profiler.analysis.parts.Steps`, ascending.
        notes: What they were.
        incomplete: The incomplete ones among them.
    """

    keys: Ints
    notes: tuple[str, ...]
    incomplete: tuple[IncompleteStep, ...] = ()


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
        held, length_ms, calls_ms = _interrupted(chosen, reason, table.key)
        if not held.any():
            continue
        if held.sum() * 2 > len(held):
            # What lies between them is training.
            notes.append(
                f"{held.sum()} of {len(held)} steps hold {_NAMES[reason]} (mean "
                f"{units.ms(calls_ms[held].mean())} ms): taken as a part of training, in `other`."
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
    incomplete = _incomplete(table, short)
    notes += _short_notes(incomplete, len(short))
    out |= short
    return LeftOut(table.key[out], tuple(notes), incomplete)


def _measured(columns: Columns, level: int) -> Mapping[str, Ints]:
    # Of all ranks at once: only what is looked at.
    chosen = np.isin(columns["kind"], (SpanKind.STEP, SpanKind.INTERRUPTION))
    chosen &= (columns["level"] == level) & np.isin(columns["variant"], _MEASURED)
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
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Finds the steps that were interrupted so.

    Returns:
        Which they are; the ms from the first begin to the last end in each, since what lies
        between belongs to it (an evaluation fetches batches and computes metrics); the ms of
        its calls alone. Both on the rank where longest.
    """
    longest, calls = np.zeros(len(keys)), np.zeros(len(keys))
    held = np.zeros(len(keys), dtype=np.bool_)
    for spans in chosen:
        is_one = (spans["kind"] == SpanKind.INTERRUPTION) & (spans["index"] == reason)
        key = step_keys(spans["repetition"], spans["step"])[is_one]
        known = np.isin(key, keys)
        row = np.searchsorted(keys, key[known])
        begin, end = spans["begin_ns"][is_one][known], spans["end_ns"][is_one][known]
        first = np.full(len(keys), np.iinfo(np.int64).max)
        last = np.full(len(keys), np.iinfo(np.int64).min)
        np.minimum.at(first, row, begin)
        np.maximum.at(last, row, end)
        here = np.unique(row)
        longest[here] = np.maximum(longest[here], (last - first)[here] / 1e6)
        length = np.bincount(row, weights=(end - begin) / 1e6, minlength=len(keys))
        calls = np.maximum(calls, length)
        held[row] = True
    return held, longest, calls


def _short(counts: Ints) -> npt.NDArray[np.bool_]:
    """Returns which steps have less than usual on a rank; ``counts`` has shape [step, rank]."""
    short = np.zeros(len(counts), dtype=np.bool_)
    for rank in counts.T:
        values, times = np.unique(rank, return_counts=True)
        most = times.argmax()
        if values[most] != NULL and times[most] * 2 > len(rank):
            short |= (rank < values[most]) & (rank != NULL)
    return short


def _incomplete(table: _StepTable, short: npt.NDArray[np.bool_]) -> tuple[IncompleteStep, ...]:
    if not short.any():
        return ()
    usual = tuple(round(float(v)) for v in np.median(table.micro_steps[~short], axis=0))
    return tuple(
        IncompleteStep(
            step=int(table.number[i]),
            micro_steps=tuple(table.micro_steps[i].tolist()),
            usual=usual,
            samples=None if NULL in table.samples[i] else tuple(table.samples[i].tolist()),
        )
        for i in np.flatnonzero(short)
    )


def _short_notes(incomplete: Sequence[IncompleteStep], steps: int) -> list[str]:
    if not incomplete:
        return []
    return [
        f"{len(incomplete)} of {steps} steps were incomplete and are left out of all figures "
        f"({list_incomplete(incomplete)})."
    ]


def list_incomplete(steps: Sequence[IncompleteStep]) -> str:
    """Returns incomplete steps in words, each with its real batch."""
    shown = [
        f"step {step.step}: {_counts(step.micro_steps)} of {_counts(step.usual)} micro-steps"
        + ("" if step.samples is None else f", {sum(step.samples)} samples")
        for step in steps[:_INCOMPLETE_SHOWN]
    ]
    more = len(steps) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _counts(ranks: Sequence[int]) -> str:
    """Returns one number where all ranks have the same, else all of them."""
    values = [str(value) for value in ranks]
    return values[0] if len(set(values)) == 1 else "/".join(values)


def _listed(numbers: Ints) -> str:
    shown = ", ".join(str(number) for number in numbers[:_STEPS_SHOWN])
    more = len(numbers) - _STEPS_SHOWN
    return f"step{'s' if len(numbers) > 1 else ''} {shown}" + (
        f" and {more} more" if more > 0 else ""
    )

"""The gradient collectives of a rank, one by one, as the figures of a step count them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_profiler.analysis.condensed import clamped
from ddp_profiler.analysis.spans import NULL, Columns, Floats, Ints, Lookup, call_keys, step_keys
from ddp_profiler.schema import SpanKind, Variant

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Collectives:
    """The gradient collectives of one rank by step and hand-over, shape [collective] each.

    Of a condensed record each row holds all collectives of a micro-step and DDP.

    Attributes:
        key: Identifies the step on every rank: (repetition, step) packed.
        ordinal: Number in its step, from 0.
        micro_step: In which it was handed over.
        nbytes: Bytes reduced; ``NULL`` where that is not known.
        begin_ms: Hand-over, in ms after the step's begin.
        hidden_until_ms: End of what is hidden: completion or the end of local backward, whichever
            is first; ``begin_ms`` where nothing is hidden.
        end_ms: Completion, or the end of backward where that is earlier or completion was never
            noticed.
        noticed: Whether completion was noticed.
    """

    key: Ints
    ordinal: Ints
    micro_step: Ints
    nbytes: Ints
    begin_ms: Floats
    hidden_until_ms: Floats
    end_ms: Floats
    noticed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.key)


def derive_collectives(columns: Columns, level: int, variant: Variant, keys: Ints) -> Collectives:
    """Derives a rank's gradient collectives.

    Args:
        columns: The rank's spans by column, condensed or not, shape [span] each.
        level: Index of the level.
        variant: Which steps to take.
        keys: Of the steps that count.
    """
    chosen = (columns["level"] == level) & (columns["variant"] == int(variant))
    spans = {name: values[chosen].astype(np.int64) for name, values in columns.items()}
    step_key = step_keys(spans["repetition"], spans["step"])
    rows = np.flatnonzero((spans["kind"] == SpanKind.GRADIENT) & np.isin(step_key, keys))
    placed = clamped(spans, call_keys(step_key, spans["micro_step"]), rows)
    rows = rows[placed.place]
    is_step = np.flatnonzero(spans["kind"] == SpanKind.STEP)
    step_begin = spans["begin_ns"][is_step][Lookup(step_key[is_step]).find(step_key[rows])]
    # Stable: of one step they stay in the order of hand-over.
    order = np.argsort(step_begin, kind="stable")
    since = step_begin[order]
    first = np.searchsorted(since, since, "left")

    def after(times: Ints) -> Floats:
        passed: Floats = (times[order] - since) / _NS_PER_MS
        return passed

    rows = rows[order]
    return Collectives(
        key=step_key[rows],
        ordinal=(np.arange(len(rows)) - first).astype(np.int64),
        micro_step=spans["micro_step"][rows],
        nbytes=spans["bytes"][rows],
        begin_ms=after(placed.begin),
        hidden_until_ms=after(np.clip(placed.local_end, placed.begin, placed.end)),
        end_ms=after(placed.end),
        noticed=spans["end_ns"][rows] != NULL,
    )

"""Spans as columns: their types, the keys that tell steps and calls apart, and look-ups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Ints]

NULL = np.iinfo(np.int64).min


def step_keys(repetition: Ints, step: Ints) -> Ints:
    """Returns the keys of steps: (repetition, step) packed, shape as given."""
    return (repetition << 32) | step


def step_numbers(keys: Ints) -> Ints:
    """Returns the number of each step in its repetition, as it was recorded; shape as given."""
    return keys & 0xFFFFFFFF


def call_keys(step_key: Ints, micro_step: Ints) -> Ints:
    """Returns the keys of micro-steps: (repetition, step, micro-step) packed, shape as given."""
    return (step_key << 14) | (micro_step + 1)


def own_start(begin: Ints, end: Ints) -> Ints:
    """Returns where each interval, sorted by begin, goes beyond all before it."""
    if len(begin) == 0:
        return begin
    reached = np.maximum.accumulate(end)
    start: Ints = np.maximum(begin, np.append(np.iinfo(np.int64).min, reached[:-1]))
    return start


class Lookup:
    """Finds the row of a key among unique keys."""

    def __init__(self, keys: Ints) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def find(self, keys: Ints) -> Ints:
        """Returns the row of each key, -1 where there is none."""
        if len(self._sorted) == 0:
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._order[at], -1).astype(np.int64)

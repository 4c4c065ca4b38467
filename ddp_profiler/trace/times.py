"""Microseconds as a trace writes them, as exact nanoseconds.

A double holds a time since 1970 in us only to a quarter of a us. So numbers with a point are
taken from their double only where that gives back the digits that were written, and from the
text itself everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

UNREADABLE = np.iinfo(np.int64).min
"""Stands for a time that is no number, or is beyond all years."""

MAX_US = 9_000_000_000_000_000
"""Times beyond this, 285 years, do not fit into 64 bits as ns."""

# Below this the doubles are so close that each stands for one number of three decimals only: they
# are 2**-10 us apart, so 0.49 ns is the most that one can be off.
_EXACT_BELOW_US = 2.0**43


class NeedsTextError(Exception):
    """A number with a point is too large for its double to tell the ns."""


def from_numbers(values: Sequence[int | float | None]) -> tuple[Ints, int]:
    """Returns times in ns from decoded numbers of us, exactly.

    >>> from_numbers([1712195495519689, 2])[0].tolist()
    [1712195495519689000, 2000]
    >>> from_numbers([4458677009853.422, 0.02])[0].tolist()
    [4458677009853422, 20]

    Args:
        values: Times in us; None where there is none.

    Returns:
        The times in ns, ``UNREADABLE`` for what is none, and how many were finer than a ns.

    Raises:
        NeedsTextError: Only the text can tell the ns.
    """
    kinds = set(map(type, values))
    if kinds <= {int}:
        return _from_ints(values), 0  # type: ignore[arg-type]
    if kinds == {float}:
        return _from_floats(np.array(values, np.float64))
    result = np.full(len(values), UNREADABLE, np.int64)
    finer = 0
    for kind in (int, float):
        places = [place for place, value in enumerate(values) if type(value) is kind]
        if places:
            result[places], more = from_numbers([values[place] for place in places])
            finer += more
    return result, finer


def _from_ints(values: Sequence[int]) -> Ints:
    try:
        us = np.array(values, np.int64)
    except OverflowError:
        us = np.array([value if abs(value) <= MAX_US else MAX_US + 1 for value in values], np.int64)
    beyond = np.abs(us) > MAX_US
    return np.where(beyond, UNREADABLE, np.where(beyond, 0, us) * 1000)


def _from_floats(us: npt.NDArray[np.float64]) -> tuple[Ints, int]:
    if us.size and np.abs(us).max() >= _EXACT_BELOW_US:
        raise NeedsTextError
    whole = np.floor(us)
    thousandths = (us - whole) * 1000
    nearest = np.rint(thousandths)
    # More than what the double itself is off by: there were more than three decimals.
    finer = np.abs(thousandths - nearest) > np.spacing(np.abs(us)) * 1000 + 1e-9
    return whole.astype(np.int64) * 1000 + nearest.astype(np.int64), int(finer.sum())


def from_text(text: bytes) -> tuple[int, bool]:
    """Returns a time in ns from the text of a number of us, and whether it was finer than a ns.

    >>> from_text(b"1712195495519695.8"), from_text(b"-0.5"), from_text(b"1e3")
    ((1712195495519695800, False), (-500, False), (1000000, False))
    >>> from_text(b'"12.0004"'), from_text(b"null")[0] == UNREADABLE
    ((12000, True), True)

    Args:
        text: A JSON number, or a string that holds one.
    """
    number = text.strip(b'" \t\r\n')
    whole, _, decimals = number.partition(b".")
    # "".isdigit() is false.
    if whole.isdigit() and len(decimals) <= 3 and (decimals.isdigit() or not decimals):
        us = int(whole)
        if us > MAX_US:
            return UNREADABLE, False
        return us * 1000 + int(decimals.ljust(3, b"0")), False
    try:
        exact = Decimal(number.decode("ascii")) * 1000
        if not exact.is_finite() or abs(exact) > MAX_US * 1000:
            return UNREADABLE, False
        nearest = exact.to_integral_value(ROUND_HALF_EVEN)
    except (ArithmeticError, UnicodeDecodeError, ValueError):
        return UNREADABLE, False
    return int(nearest), nearest != exact


def from_texts(texts: Sequence[bytes]) -> tuple[Ints, int]:
    """Returns times in ns from the texts of numbers of us, and how many were finer than a ns."""
    result = np.empty(len(texts), np.int64)
    finer = 0
    for place, text in enumerate(texts):
        result[place], more = from_text(text)
        finer += more
    return result, finer

"""Compact columns of whole numbers that grow piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_WIDTHS = tuple((width, int(np.iinfo(width).max)) for width in (np.uint8, np.uint16, np.uint32))


class Column:
    """Whole numbers of 64 bits, kept as small differences from each piece's least.

    Times of a second in ns need 4 bytes instead of 8, streams and kinds 1, what is always the
    same none.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, npt.NDArray[np.integer] | int]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: Ints) -> None:
        """Adds a piece."""
        if not values.size:
            return
        least = int(values.min())
        span = int(values.max()) - least
        self._length += values.size
        if span == 0:
            self._pieces.append((least, values.size))
            return
        for width, most in _WIDTHS:
            if span <= most:
                self._pieces.append((least, (values - least).astype(width)))
                break
        else:
            self._pieces.append((0, values.copy()))

    def take(self, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """Returns all values as integers of a type that holds them, and forgets them."""
        result = np.empty(self._length, dtype)
        at = 0
        for least, piece in self._pieces:
            if isinstance(piece, int):
                result[at : at + piece] = least
                at += piece
                continue
            result[at : at + piece.size] = piece.astype(np.int64) + least
            at += piece.size
        self._pieces.clear()
        self._length = 0
        return result

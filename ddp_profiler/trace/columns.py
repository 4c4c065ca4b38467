"""Compact columns of whole numbers that grow piece by piece."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_UNSIGNED = (np.uint8, np.uint16, np.uint32)
_WIDTHS = tuple((width, int(np.iinfo(width).max), np.dtype(width).itemsize) for width in _UNSIGNED)
_OF_BYTES = {np.dtype(width).itemsize: width for width in _UNSIGNED} | {8: np.int64}
_BLOCK_BYTES = 1 << 16
_SIGNED = tuple((width, int(np.iinfo(width).max)) for width in (np.int8, np.int16, np.int32))


class Column:
    """Whole numbers of 64 bits, kept as small differences from each piece's least.

    Times of a second in ns need 4 bytes instead of 8, streams and kinds 1, what is always the
    same none.
    """

    def __init__(self) -> None:
        # In blocks, since growing one long run of bytes leaves holes in memory.
        self._blocks: list[bytearray] = []
        # Of each piece: its least number, how many there are, and the bytes of each difference.
        self._least, self._count, self._bytes = array("q"), array("q"), array("b")

    def __len__(self) -> int:
        return sum(self._count)

    def append(self, values: Ints) -> None:
        """Adds a piece."""
        if not values.size:
            return
        least = int(values.min())
        span = int(values.max()) - least
        size = 0
        if span > _WIDTHS[-1][1]:
            least, size = 0, 8
            self._keep(values.astype(np.int64).tobytes())
        elif span:
            width, size = next((width, size) for width, most, size in _WIDTHS if span <= most)
            self._keep((values - least).astype(width).tobytes())
        self._least.append(least)
        self._count.append(values.size)
        self._bytes.append(size)

    def _keep(self, data: bytes) -> None:
        if not self._blocks or len(self._blocks[-1]) >= _BLOCK_BYTES:
            self._blocks.append(bytearray())
        self._blocks[-1] += data

    def take(self, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """Returns all values as integers of a type that holds them, and forgets them."""
        result = np.empty(len(self), dtype)
        blocks = self._blocks
        blocks.reverse()
        at = read = 0
        for least, count, size in zip(self._least, self._count, self._bytes, strict=True):
            part = result[at : at + count]
            at += count
            if not size:
                part[:] = least
                continue
            if read >= len(blocks[-1]):
                blocks.pop()
                read = 0
            piece = np.frombuffer(blocks[-1], _OF_BYTES[size], count, read)
            part[:] = piece.astype(np.int64) + least
            read += count * size
        self._blocks = []
        self._least, self._count, self._bytes = array("q"), array("q"), array("b")
        return result


def narrow(values: Ints) -> npt.NDArray[np.signedinteger[Any]]:
    """Returns the numbers in the narrowest signed type that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for width, limit in _SIGNED:
        if -limit <= least and most <= limit:
            return values.astype(width)
    return values

"""Compact columns of whole numbers: while they grow piece by piece, and once they are whole."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from array import array
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_Array = TypeVar("_Array", bound=npt.NDArray[Any])

_UNSIGNED = (np.uint8, np.uint16, np.uint32)
_MOST_BYTES = 4
_BITS = -1
_MAP_BYTES = 1 << 18
_SIGNED = tuple((width, int(np.iinfo(width).max)) for width in (np.int8, np.int16, np.int32))

_BLOCK_BITS = 8
_BLOCK = 1 << _BLOCK_BITS
_CHUNK = 1 << 13
_FEW_WIDE = 16


class Column:
    """Whole numbers of 64 bits, kept as small differences from each piece's least.

    Times of 10 ms in ns need 3 bytes instead of 8, streams and kinds 1, what has two values a
    bit, what is always the same none.
    """

    def __init__(self) -> None:
        # Of pages of their own, not of the heap: between what decoding allocates and frees, they
        # would leave holes in it, and what is taken out goes back to the system at once.
        self._maps: list[mmap.mmap] = []
        self._filled = _MAP_BYTES
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
        if span > 1:
            size = -(-span.bit_length() // 8)
            if size > _MOST_BYTES:
                least, size = 0, 8
            each = (values - least).astype("<i8").view(np.uint8).reshape(-1, 8)
            self._keep(each[:, :size].tobytes())
        elif span:
            size = _BITS
            self._keep(np.packbits(values != least).tobytes())
        if not size and self._bytes and not self._bytes[-1] and self._least[-1] == least:
            self._count[-1] += values.size
            return
        self._least.append(least)
        self._count.append(values.size)
        self._bytes.append(size)

    def _keep(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._filled == _MAP_BYTES:
                self._maps.append(mmap.mmap(-1, _MAP_BYTES))
                self._filled = 0
            part = data[at : at + _MAP_BYTES - self._filled]
            self._maps[-1][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            at += len(part)

    def take_narrow(self) -> npt.NDArray[np.signedinteger[Any]]:
        """Returns all values in the narrowest signed type that holds them, and forgets them."""
        least, most = 0, 0
        for one, size in zip(self._least, self._bytes, strict=True):
            if size > _MOST_BYTES:
                return narrow(self.take())
            least = min(least, one)
            most = max(most, one + (1 if size == _BITS else (1 << 8 * size) - 1))
        # A bound first, so that not all of them are held in the widest.
        return narrow(self.take(_width(least, most)))

    def take(self, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """Returns all values as integers of a type that holds them, and forgets them."""
        result = np.empty(len(self), dtype)
        maps = self._maps
        maps.reverse()
        at = read = 0
        for least, count, size in zip(self._least, self._count, self._bytes, strict=True):
            part = result[at : at + count]
            at += count
            if not size:
                part[:] = least
                continue
            data = b""
            length = -(-count // 8) if size == _BITS else count * size
            while len(data) < length:
                if read == _MAP_BYTES:
                    maps.pop().close()
                    read = 0
                more = maps[-1][read : read + length - len(data)]
                read += len(more)
                data += more
            if size == _BITS:
                bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count)
                part[:] = bits.astype(np.int64) + least
            else:
                each = np.zeros((count, 8), np.uint8)
                each[:, :size] = np.frombuffer(data, np.uint8).reshape(-1, size)
                part[:] = each.view("<i8")[:, 0] + least
        self.__init__()  # type: ignore[misc]
        return result


class _Whole(ABC):
    """Whole numbers that are made when they are asked for, and otherwise as if in an array."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @overload
    def __getitem__(self, places: int) -> int: ...
    @overload
    def __getitem__(self, places: slice | npt.NDArray[Any]) -> Ints: ...
    @abstractmethod
    def __getitem__(self, places: int | slice | npt.NDArray[Any]) -> int | Ints: ...

    def __len__(self) -> int:
        return self.size

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Returns all of them."""
        found = self[:]
        return found if dtype is None else found.astype(dtype)


class Packed(_Whole):
    """Whole numbers of 64 bits that do not change any more, as differences within blocks.

    The narrowest type is taken that holds nearly all differences from the least number of their
    block; the others are kept aside. Numbers come out as if this were an array, a copy of those
    asked for.

    >>> times = Packed(np.array([2**60, 2**60 + 7, 2**60 + 9]))
    >>> times[1], times[1:].tolist(), times[np.array([2, 0])].tolist(), times.size
    (1152921504606846983, [1152921504606846983, 1152921504606846985], \
[1152921504606846985, 1152921504606846976], 3)

    Args:
        values: The numbers.
        order: Their places in the order wanted; None where they are in it.
    """

    def __init__(
        self,
        values: npt.NDArray[np.signedinteger[Any]],
        order: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        # No views of the values, which would keep all of them.
        self._least, self._wide_place, self._wide = (np.zeros(0, np.int64) for _ in range(3))
        self._differences: npt.NDArray[Any] = np.zeros(0, np.int64)
        size = values.size if order is None else order.size
        if not size:
            return
        chunks = [slice(first, min(size, first + _CHUNK)) for first in range(0, size, _CHUNK)]

        def of(chunk: slice) -> Ints:
            return (values[chunk] if order is None else values[order[chunk]]).astype(np.int64)

        least = np.concatenate(
            [np.minimum.reduceat(part := of(chunk), np.arange(0, part.size, _BLOCK))
             for chunk in chunks]
        )  # fmt: skip
        for width in _UNSIGNED:
            most = int(np.iinfo(width).max)
            data = np.empty(size, width)
            places, aside = [self._wide_place], [self._wide]
            for chunk in chunks:
                part = of(chunk)
                far = _from_least(part, least[chunk.start >> _BLOCK_BITS :])
                wide = far >= most
                if wide.any():
                    places.append(np.flatnonzero(wide) + chunk.start)
                    aside.append(part[wide])
                data[chunk] = np.where(wide, most, far)
                if sum(map(len, places)) * _FEW_WIDE > size:
                    break
            else:
                self._least, self._differences = least, data
                self._wide_place, self._wide = np.concatenate(places), np.concatenate(aside)
                return
        self._differences = np.concatenate([of(chunk) for chunk in chunks])

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self._differences.size)

    @overload
    def __getitem__(self, places: int) -> int: ...
    @overload
    def __getitem__(self, places: slice | npt.NDArray[Any]) -> Ints: ...
    def __getitem__(self, places: int | slice | npt.NDArray[Any]) -> int | Ints:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.size))
        elif not isinstance(places, np.ndarray):
            at = int(places)
            return int(self[np.array([at if at >= 0 else at + self.size])][0])
        elif places.dtype == np.bool_:
            places = np.flatnonzero(places)
        data = self._differences[places]
        if not self._least.size:
            return np.array(data, np.int64)
        result: Ints = data.astype(np.int64)
        result += self._least[places >> _BLOCK_BITS]
        if self._wide_place.size:
            aside = np.flatnonzero(data == np.iinfo(data.dtype).max)
            result[aside] = self._wide[np.searchsorted(self._wide_place, places[aside])]
        return result

    def min(self) -> int:
        """Returns the least."""
        return int((self._least if self._least.size else self._differences).min())

    def max(self) -> int:
        """Returns the largest."""
        return max(int(self[first : first + _CHUNK].max()) for first in range(0, self.size, _CHUNK))


class Sums(_Whole):
    """Sums of two columns, made of those that are asked for only; otherwise as ``Packed``."""

    def __init__(self, one: Packed, other: Packed) -> None:
        self._one, self._other = one, other

    @property
    def size(self) -> int:
        """How many there are."""
        return self._one.size

    @overload
    def __getitem__(self, places: int) -> int: ...
    @overload
    def __getitem__(self, places: slice | npt.NDArray[Any]) -> Ints: ...
    def __getitem__(self, places: int | slice | npt.NDArray[Any]) -> int | Ints:
        if isinstance(places, slice | np.ndarray):
            result = self._one[places]
            result += self._other[places]
            return result
        return self._one[places] + self._other[places]

    def max(self) -> int:
        """Returns the largest."""
        return max(int(self[first : first + _CHUNK].max()) for first in range(0, self.size, _CHUNK))


def _from_least(values: Ints, least: Ints) -> npt.NDArray[np.uint64]:
    """Returns how far values are above the least of their block; the first begins a block.

    What is signed could not hold it, and what is unsigned comes out right where it wraps around.
    """
    blocks = -(-values.size // _BLOCK)
    of_each: npt.NDArray[np.uint64] = np.repeat(least[:blocks], _BLOCK)[: values.size].view(
        np.uint64
    )
    return values.view(np.uint64) - of_each


def narrow(values: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
    """Returns the numbers in the narrowest signed type that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    return values.astype(_width(least, most), copy=False)


def constant_or(values: _Array) -> _Array:
    """Returns the same numbers, in no memory where they are all the same."""
    if values.size and (values == values[0]).all():
        return np.broadcast_to(values[0].copy(), values.shape)  # type: ignore[return-value]
    return values


def _width(least: int, most: int) -> type[np.signedinteger[Any]]:
    for width, limit in _SIGNED:
        if -limit <= least and most <= limit:
            return width
    return np.int64


def in_order(values: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
    """Sorts numbers, equal ones in their order; what is given is used up.

    >>> [part.tolist() for part in in_order(np.array([5, 3, 5]))]
    [[3, 5, 5], [1, 0, 2]]

    Returns:
        The numbers in order, and the places they had.
    """
    size = values.size
    if not size:
        return values, np.zeros(0, np.int32)
    least, bits = int(values.min()), (size - 1).bit_length()
    if (int(values.max()) - least).bit_length() + bits > 63:
        places = np.argsort(values, kind="stable").astype(np.int32)
        return values[places], places
    # Number and place as one are sorted where they are: indices would take twice the memory.
    values -= least
    values <<= bits
    for first in range(0, size, _CHUNK):
        part = values[first : first + _CHUNK]
        part |= np.arange(first, first + part.size)
    values.sort()
    places = np.empty(size, np.int32)
    for first in range(0, size, _CHUNK):
        places[first : first + _CHUNK] = values[first : first + _CHUNK] & ((1 << bits) - 1)
    values >>= bits
    values += least
    return values, places


def gather(values: _Array, places: npt.NDArray[np.integer[Any]]) -> _Array:
    """Returns ``values[places]``, without the copy of the places that numpy makes."""
    result = np.empty(places.size, values.dtype)
    for first in range(0, places.size, _CHUNK):
        result[first : first + _CHUNK] = values[places[first : first + _CHUNK]]
    return result  # type: ignore[return-value]


def median(values: npt.ArrayLike) -> float:
    """Returns the median, which ``np.median`` loads a part of numpy for.

    >>> median([4, 1, 3]), median([1, 2])
    (3.0, 1.5)
    """
    ordered = np.sort(np.asarray(values))
    return float(ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2


def distinct(values: npt.NDArray[np.integer[Any]]) -> list[int]:
    """Returns the different numbers, in order: ``np.unique`` loads a part of numpy for it.

    >>> distinct(np.array([3, 1, 3]))
    [1, 3]
    """
    ordered = np.sort(values)
    new = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: ordered.size]
    result: list[int] = ordered[new].tolist()
    return result

"""JSON with exact times, written as it is made: memory does not grow with its length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

_PIECE_CHARACTERS = 1 << 16


class Micros(float):
    """A time in us that knows its ns; as a float it is the nearest one.

    A time since 1970 in us needs more digits than a float has, so JSON gets them from the ns.

    Args:
        ns: The time in ns.

    Attributes:
        ns: The same.
    """

    __slots__ = ("ns",)
    ns: int

    def __new__(cls, ns: int) -> Micros:
        """Returns the time."""
        made = super().__new__(cls, ns / 1000)
        made.ns = ns
        return made

    @property
    def text(self) -> str:
        """All digits.

        >>> Micros(1_700_000_000_000_000_803).text, Micros(-5_000).text
        ('1700000000000000.803', '-5.000')
        """
        sign, ns = ("-" if self.ns < 0 else ""), abs(self.ns)
        return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def us(ns: float | None) -> float | None:
    """Returns ns as us: exact where they are whole; None for what is not known."""
    if ns is None:
        return None
    return Micros(int(ns)) if ns == int(ns) else float(ns) / 1000


def whole(value: Any) -> Any:
    """Returns a value with all that is made on the way in lists."""
    if isinstance(value, Iterator):
        return [whole(one) for one in value]
    if isinstance(value, Mapping):
        return {key: whole(one) for key, one in value.items()}
    return value


def pieces(value: Any) -> Iterator[str]:
    """Yields the JSON of a value in pieces of some 64 kB.

    Iterators become lists, an element at a time and one on a line; they are never held whole.
    NaN and infinities become null.
    """
    held: list[str] = []
    size = 0
    for token in _tokens(value, "\n"):
        held.append(token)
        size += len(token)
        if size >= _PIECE_CHARACTERS:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)


def _tokens(value: Any, line: str) -> Iterator[str]:
    """Yields the JSON of a value; ``line`` is a line's end with the blanks of the next."""
    inner = f"{line}  "
    if isinstance(value, Iterator):
        first = True
        for one in value:
            yield f"[{inner}" if first else f",{inner}"
            yield from _tokens(one, inner)
            first = False
        yield "[]" if first else f"{line}]"
    elif isinstance(value, Mapping) and _made_on_the_way(value):
        opening = f"{{{inner}"
        for key, one in value.items():
            yield f"{opening}{json.dumps(key)}: "
            yield from _tokens(one, inner)
            opening = f",{inner}"
        yield f"{line}}}"
    else:
        yield _text(value)


def _made_on_the_way(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(one, Iterator) or _made_on_the_way(one) for one in value.values()
    )


def _text(value: Any) -> str:
    try:
        return msgspec.json.format(_ENCODER.encode(value), indent=0).decode()
    except UnicodeEncodeError:
        # Bytes of file names that are not UTF-8.
        return _ENCODER.encode(_escaped(value)).decode()


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return msgspec.Raw(json.dumps(value).encode())
    if isinstance(value, Mapping):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(one) for one in value]
    return value


def _other(value: Any) -> Any:
    if isinstance(value, Micros):
        return msgspec.Raw(value.text.encode())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} has no place in JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_other)

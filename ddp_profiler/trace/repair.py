"""Broken JSON of traces: where and why, and repairs where only one reading is possible.

Profilers of some versions wrote names without escaping them, and jobs are killed while they
write. Events are looked at one by one; one that reads as JSON stays as it is, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

# Where one event ends and the next one begins, whatever the strings in between look like: no
# other object of a trace begins with one of these keys after a comma.
_KEYS = rb'"(?:ph|name|cat|ts|pid|tid|args|dur|id|s|bp)"\s*:'
_NEXT_EVENT = re.compile(rb"\}\s*,(?=\s*\{\s*" + _KEYS + rb")")

_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
# What file systems put where they lost a block, or where it was never written.
_HOLE = re.compile(rb"\x00{16,}")
# No blank: outside of strings that would be JSON, and what stood there would be lost unseen.
_REPLACED = "\ufffd".encode()
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_SURROGATE = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_NOT_A_NUMBER = re.compile(rb"(:\s*)-?(?:nan(?:\([^)]*\))?|inf(?:inity)?)(?=\s*[,}\]])", re.I)
# A key with a string, up to a quote that can only be its end: a key, or the event's end, follows.
_STRING = re.compile(
    rb'("[^"\\\x00-\x1f]{1,80}"\s*:\s*")(.*?)("\s*(?:,\s*"[^"\\\x00-\x1f]{1,80}"\s*:|\}\s*[,}\]]|\}\s*$))',
    re.DOTALL,
)
_LONGEST_MENDED = 1 << 17
_BARE_QUOTE = re.compile(rb'(\\.)|"', re.DOTALL)
_SWALLOWED = re.compile(rb'\b(?:ph|name|cat|ts|pid|tid|args|dur)"\s*:')
_LINE_BREAKS = re.compile(rb"[\n\r\t]")
_ANOTHER_TRACE = re.compile(rb'"(?:schemaVersion|traceEvents|deviceProperties)"\s*:')

CAUSES = {
    "repaired_control_byte": "a control byte stands unescaped in a name",
    "repaired_encoding": "a byte that is not UTF-8 stands in a name",
    "repaired_backslash": "a lone backslash stands in a name",
    "repaired_quote": "a quote stands unescaped in a name",
    "repaired_number": "NaN or Infinity stands where JSON has a number",
}


@dataclass(frozen=True)
class Mended:
    """An event that reads as JSON now.

    Attributes:
        text: The event.
        repairs: How many repairs of each kind, by the warning's code.
        position: Byte of the first one within the event as it was.
    """

    text: bytes
    repairs: dict[str, int]
    position: int


def reads(text: bytes) -> bool:
    """Returns whether a text is JSON in UTF-8."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def events(text: bytes) -> Iterator[tuple[int, int]]:
    """Yields begin and end of what look like whole events; the last may be cut or go on."""
    begin = 0
    for found in _NEXT_EVENT.finditer(text):
        yield begin, found.start() + 1
        begin = found.end()
    yield begin, len(text)


def holds_another_trace(text: bytes) -> bool:
    """Returns whether within an event the head of another trace stands."""
    return _ANOTHER_TRACE.search(text) is not None


def hole(text: bytes) -> tuple[int, int] | None:
    """Returns place and length of a run of zero bytes, as a lost block leaves; None for none."""
    found = _HOLE.search(text)
    return (found.start(), found.end() - found.start()) if found else None


def mend(event: bytes) -> Mended | None:
    """Returns an event repaired; None where it cannot be, or where it is not clear how.

    Each repair is kept only if it was needed, so that an event with one mistake is changed
    in one place. Very long ones are left alone: they are no names of kernels.
    """
    if len(event) > _LONGEST_MENDED:
        return None
    steps = (
        ("repaired_number", _mend_numbers),
        ("repaired_encoding", _mend_encoding),
        ("repaired_control_byte", _mend_control),
        ("repaired_backslash", _mend_backslashes),
        ("repaired_quote", _mend_quotes),
    )
    text, repairs, positions = event, {}, []
    for code, step in steps:
        changed, count, position = step(text)
        if not count:
            continue
        text = changed
        repairs[code] = count
        positions.append(position)
        if reads(text):
            return Mended(text, repairs, min(positions))
    return None


def _mend_control(text: bytes) -> tuple[bytes, int, int]:
    found = _CONTROL.search(text)
    changed, count = _CONTROL.subn(_REPLACED, text)
    position = found.start() if found else -1
    if not reads(changed):
        # A line break or tab within a string. Outside of strings these are blanks anyway.
        in_strings = [
            (inner.start(2) + place.start())
            for inner in _STRING.finditer(changed)
            for place in _LINE_BREAKS.finditer(inner[2])
        ]
        if in_strings:
            changed = _LINE_BREAKS.sub(b" ", changed)
            count += len(in_strings)
            position = min([*in_strings, *([position] if position >= 0 else [])])
    return changed, count, position


def _mend_encoding(text: bytes) -> tuple[bytes, int, int]:
    places: list[int] = []
    try:
        text.decode()
    except UnicodeDecodeError as error:
        before = text.decode(errors="ignore").count("\ufffd")
        changed = text.decode(errors="replace")
        places = [error.start] * (changed.count("\ufffd") - before)
        text = changed.encode()

    def replace(found: re.Match[bytes]) -> bytes:
        if found[1]:
            return found[1]
        places.append(found.start())
        return rb"\ufffd"

    # Halves of pairs, which no text in UTF-8 can hold.
    text = _SURROGATE.sub(replace, text)
    return text, len(places), min(places, default=-1)


def _mend_numbers(text: bytes) -> tuple[bytes, int, int]:
    found = _NOT_A_NUMBER.search(text)
    changed, count = _NOT_A_NUMBER.subn(rb"\1null", text)
    return changed, count, found.end(1) if found else -1


def _mend_backslashes(text: bytes) -> tuple[bytes, int, int]:
    places: list[int] = []

    def double(found: re.Match[bytes]) -> bytes:
        if found[1]:
            return found[1]
        places.append(found.start())
        return b"\\\\"

    changed = _BACKSLASH.sub(double, text)
    if not reads(changed):
        # One before the closing quote, as in "C:\": the quote is followed by what only an end has.
        again: list[int] = []

        def close(found: re.Match[bytes]) -> bytes:
            inner = found[2]
            tail = len(inner) - len(inner.rstrip(b"\\"))
            if tail % 2:
                again.append(found.end(2) - 1)
                inner += b"\\"
            return found[1] + inner + found[3]

        closed = _each_string(changed, close)
        if again and reads(closed):
            return closed, len(places) + len(again), min([*places, *again])
    return changed, len(places), places[0] if places else -1


def _mend_quotes(text: bytes) -> tuple[bytes, int, int]:
    places: list[int] = []

    def escape(found: re.Match[bytes]) -> bytes:
        if _SWALLOWED.search(found[2]):
            # Text is missing: the string would take in what stood behind its lost end.
            return found[0]

        def quote(inner: re.Match[bytes]) -> bytes:
            if inner[1]:
                return inner[1]
            places.append(found.start(2) + inner.start())
            return b'\\"'

        return found[1] + _BARE_QUOTE.sub(quote, found[2]) + found[3]

    changed = _each_string(text, escape)
    return changed, len(places), places[0] if places else -1


def _each_string(text: bytes, change: Callable[[re.Match[bytes]], bytes]) -> bytes:
    """Returns the text with each string value passed through ``change``."""
    parts, at = [], 0
    while found := _STRING.search(text, at):
        # Up to the closing quote only: the key after it is where the next search begins.
        parts += [text[at : found.start()], change(found)[: -len(found[3])]]
        parts.append(b'"')
        at = found.start(3) + 1
    parts.append(text[at:])
    return b"".join(parts)

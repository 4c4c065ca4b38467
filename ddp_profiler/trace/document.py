"""The text of a trace as pieces of its array of events, each a JSON array of its own.

The whole text is never held. A piece is cut where one object ends and another begins, and the
decoder proves the cut: text from an event's begin, closed by a bracket, reads as a JSON array
only if the cut lies between two events. So no layout is relied on, and names may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ddp_profiler.errors import InputError
from ddp_profiler.trace import repair
from ddp_profiler.trace.notices import Notices

PIECE_BYTES = 1 << 20
"""About how much text is decoded at once: little enough to stay in the processor's cache."""

MAX_EVENT_BYTES = 64 << 20
"""Most bytes of one event; a longer one is no event."""

MAX_METADATA_BYTES = 16 << 20
"""Most bytes that are kept of one value beside the events; longer ones are skipped."""

_BLANK = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCALAR_END = re.compile(rb"[,}\]\s]")
# A string, a quote that no other one closes yet, or what opens, closes and parts values. Runs of
# characters are possessive, or a string that is cut would be tried from every place.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
_RAW_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])
# What msgspec says of JSON that is sound as far as it goes. If it said something else, events
# longer than a piece would be looked at for mistakes too early; sound ones have none.
_TRUNCATED = "truncated"
_EVENTS = "traceEvents"
_ONLY_ONCE = (_EVENTS, "distributedInfo")
_MORE_EVENTS = re.compile(rb'"traceEvents"\s*:')
_LONGEST_FOUND = 64
_BOM = b"\xef\xbb\xbf"
_LOOK_BACK_TRIES = 64

Decode = Callable[[bytes | memoryview], None]
"""Takes a JSON array of events, which it may not keep.

Raises msgspec.DecodeError where the text is no JSON.
"""


@dataclass(frozen=True)
class Scan:
    """What a scan of an array's inside found.

    Attributes:
        boundary: Place of the last comma between two elements; -1 where there is none.
        end: Place of the bracket that closes the array; -1 where it is not in the text.
    """

    boundary: int
    end: int


def scan(text: bytes, begin: int = 0) -> Scan:
    r"""Finds where elements of a JSON array end, minding strings, escapes and nesting.

    >>> scan(b'{"a": "},{"}, {"b": [1, 2]}, {"c')
    Scan(boundary=27, end=-1)
    >>> scan(b'{"a": 1}, 2], "more": [3]}')
    Scan(boundary=8, end=11)

    Args:
        text: Text of which a part lies within an array.
        begin: A place between two elements of the array, or before the first.

    Returns:
        The last boundary before the end of the array or of the text.
    """
    depth, boundary = 0, -1
    for found in _TOKEN.finditer(text, begin):
        token = found[0]
        if token == b",":
            if depth == 0:
                boundary = found.start()
        elif token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            if depth == 0:
                return Scan(boundary, found.start() if token == b"]" else -1)
            depth -= 1
        elif token == b'"':
            break
    return Scan(boundary, -1)


class Document:
    """Reads the JSON text of a trace once, handing its events to ``decode``.

    The root is an object with ``traceEvents`` among its keys, in any order, or the list of
    events itself.

    Args:
        pieces: The text, in pieces of any size.
        name: Name of the file in errors.
        decode: Takes each array of events.
        notices: Counts repairs.
        lenient: Repair what is safe instead of refusing it.
        unpacked: Whether the file is compressed, so that bytes are not those of the file.

    Attributes:
        metadata: The text of the values beside the events, by key; empty for a list.
        is_list: Whether the root is a list.
        has_events: Whether there is an array of events.
        cut: Whether the text ends before its root does.
    """

    def __init__(
        self,
        pieces: Iterator[bytes],
        name: str,
        decode: Decode,
        notices: Notices,
        *,
        lenient: bool = False,
        unpacked: bool = False,
    ) -> None:
        self._unpacked = unpacked
        self._pieces = pieces
        self._name = name
        self._decode = decode
        self._notices = notices
        self._lenient = lenient
        self._text = b""
        self._buffer = bytearray(PIECE_BYTES + 2)
        self._at = 0
        # Bytes of the text before what is held.
        self._before = 0
        self._ended = False
        self._after_events = False
        self._keys: set[str] = set()
        self.metadata: dict[str, bytes] = {}
        self.is_list = False
        self.has_events = False
        self.cut = False

    @property
    def position(self) -> int:
        """Byte of the text up to which it was read."""
        return self._before + self._at

    def read(self) -> None:
        """Reads to the end.

        Raises:
            InputError: The text is no trace, or is broken and may or can not be repaired.
        """
        try:
            self._read()
        finally:
            # Before what was read is put in order, which takes memory too.
            self._text, self._at, self._buffer = b"", 0, bytearray()

    def _read(self) -> None:
        self._fill()
        if self._text.startswith(_BOM):
            self._at = len(_BOM)
        root = self._peek()
        try:
            if root == b"[":
                self.is_list = True
                self._at += 1
                self._array()
            elif root == b"{":
                self._at += 1
                self._object_or_rest()
            elif root == b"":
                raise self._error("holds no JSON", "Export the trace again.")
            else:
                raise self._error(
                    "holds no JSON object or list",
                    "Give a trace that torch.profiler exported, as .json or .json.gz.",
                )
        except _CutError:
            self._cut()
            return
        except RecursionError:
            raise self._error(
                f"has an event after {self._byte(self.position)} that is nested too deeply to "
                "be read",
                "The file is damaged, or is no trace.",
            ) from None
        self._after_root()

    # ------------------------------------------------------------------------------------------
    # The text

    def _fill(self) -> bool:
        """Takes one more piece, letting go of what was read; returns whether there was one."""
        piece = next(self._pieces, None)
        if piece is None:
            self._ended = True
            return False
        self._before += self._at
        self._text = self._text[self._at :] + piece
        self._at = 0
        return True

    def _fill_to(self, size: int) -> None:
        """Holds at least so many bytes that are not read yet, or all there are."""
        if len(self._text) - self._at >= size or self._ended:
            return
        parts, held = [self._text[self._at :]], len(self._text) - self._at
        while held < size:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
                break
            parts.append(piece)
            held += len(piece)
        self._before += self._at
        self._text = b"".join(parts)
        self._at = 0

    def _peek(self) -> bytes:
        """Returns the next byte that is not blank; empty at the end."""
        while True:
            found = _BLANK.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at : self._at + 1]
            if not self._fill():
                return b""

    # ------------------------------------------------------------------------------------------
    # The root

    def _object_or_rest(self) -> None:
        """Reads the root; where that may be repaired, what is broken after the events is left."""
        try:
            self._object()
        except _BrokenError:
            # Only what is no JSON: other errors say that the file is of several processes, or
            # that its data are damaged.
            if not (self._lenient and self._after_events):
                raise
            self._notices.add("ignored_trailing")
            self._drain()

    def _drain(self) -> None:
        """Passes the rest, which must not hold another trace."""
        while True:
            found = _MORE_EVENTS.search(self._text, self._at)
            if found is not None:
                raise self._another(self._before + found.start())
            # A key may be cut by the end of what is held.
            self._at = max(self._at, len(self._text) - _LONGEST_FOUND)
            if not self._fill():
                self._at = len(self._text)
                return

    def _object(self) -> None:
        if self._peek() == b"}":
            self._at += 1
            return
        while True:
            key = self._key()
            if key in self._keys and key in _ONLY_ONCE:
                raise self._error(
                    f"has {key} twice, the second at {self._byte(self.position)}: several traces "
                    "were merged into it",
                    "Give one file a rank, as each process exports it.",
                )
            self._keys.add(key)
            if self._peek() == b"[" and key == _EVENTS:
                self._at += 1
                self._array()
                self._after_events = True
            else:
                kept = self._value()
                if kept is not None:
                    self.metadata[key] = kept
            following = self._peek()
            if following == b"":
                raise _CutError
            if following not in (b",", b"}"):
                raise self._broken("a comma or closing bracket is missing")
            self._at += 1
            if following == b"}":
                return

    def _key(self) -> str:
        following = self._peek()
        if following == b"":
            raise _CutError
        if following != b'"':
            raise self._broken("a key is missing")
        while not (found := _KEY.match(self._text, self._at)):
            if len(self._text) - self._at > MAX_METADATA_BYTES:
                raise self._broken("a key does not end")
            if not self._fill():
                raise _CutError
        self._at = found.end()
        if self._peek() == b"":
            raise _CutError
        if self._peek() != b":":
            raise self._broken("a colon is missing")
        self._at += 1
        return found[1].decode(errors="replace")

    def _value(self) -> bytes | None:
        """Passes one value; returns its text, None where it is too long to keep."""
        begin = self._peek()
        if begin == b"":
            raise _CutError
        kept: list[bytes] = []
        size = depth = 0
        while True:
            end, whole, depth = self._value_end(begin, depth)
            size += end - self._at
            if size <= MAX_METADATA_BYTES:
                kept.append(self._text[self._at : end])
            else:
                kept.clear()
            self._at = end
            if whole:
                return b"".join(kept) if size <= MAX_METADATA_BYTES else None
            # The rest may be a string that is cut: it is kept and looked at again with more.
            held = len(self._text) - self._at
            if held > MAX_EVENT_BYTES:
                raise self._broken("a string does not end")
            if not self._fill():
                raise _CutError

    def _value_end(self, begin: bytes, depth: int) -> tuple[int, bool, int]:
        """Returns how far the value goes in the text held, whether it ends, and its depth."""
        if begin not in (b"{", b"[", b'"'):
            found = _SCALAR_END.search(self._text, self._at)
            if found:
                return found.start(), True, 0
            return self._at, False, 0
        at = self._at
        for token in _TOKEN.finditer(self._text, self._at):
            if token[0] == b'"':
                return token.start(), False, depth
            if token[0] in (b"{", b"["):
                depth += 1
            elif token[0] in (b"}", b"]"):
                depth -= 1
            at = token.end()
            if depth == 0 and token[0] != b",":
                return at, True, 0
        return (at if begin == b'"' else len(self._text)), False, depth

    def _after_root(self) -> None:
        following = self._peek()
        if following == b"":
            return
        if following in (b"{", b"["):
            raise self._error(
                f"holds a second trace from {self._byte(self.position)} on: "
                "several processes wrote into one file",
                "Let each rank export to a file of its own, such as one with the rank in its name.",
            )
        if not self._lenient:
            raise self._error(
                f"goes on after its end, from {self._byte(self.position)} on",
                "Export it again; --lenient leaves the rest out.",
            )
        self._notices.add("ignored_trailing")
        self._drain()

    # ------------------------------------------------------------------------------------------
    # The events

    def _array(self) -> None:
        """Reads from after the opening bracket to after the closing one."""
        self.has_events = True
        if self._peek() == b"]":
            self._at += 1
            return
        while True:
            self._peek()
            self._fill_to(PIECE_BYTES)
            if self._at >= len(self._text):
                raise _CutError
            end = self._cut_place()
            if end >= 0 and self._try(self._at, end):
                self._at = end + 1
                continue
            if self._slow():
                return

    def _cut_place(self) -> int:
        """Returns a comma that looks like one between two events; -1 where none does."""
        text, at = self._text, self._at
        end = min(len(text), at + PIECE_BYTES)
        for _ in range(_LOOK_BACK_TRIES):
            end = text.rfind(b"{", at, end)
            if end <= at:
                return -1
            before = text[max(at, end - 64) : end].rstrip(b" \t\r\n")
            if before[-1:] == b"," and before[:-1].rstrip(b" \t\r\n")[-1:] == b"}":
                return text.rfind(b",", at, end)
        return -1

    def _try(self, begin: int, end: int) -> bool:
        """Decodes the events between two places; returns whether they are JSON."""
        try:
            self._decode(self._as_array(begin, end))
        except msgspec.DecodeError:
            return False
        return True

    def _as_array(self, begin: int, end: int) -> bytes | memoryview:
        """Returns a part of the text within brackets, up to a piece in a buffer that is used again.

        Buffers that come and go, each of another size, would leave holes in memory.
        """
        size = end - begin + 2
        if size > len(self._buffer):
            return b"".join((b"[", memoryview(self._text)[begin:end], b"]"))
        self._buffer[0] = ord("[")
        self._buffer[1 : size - 1] = memoryview(self._text)[begin:end]
        self._buffer[size - 1] = ord("]")
        return memoryview(self._buffer)[:size]

    def _slow(self) -> bool:
        """Goes on where the quick cut failed; returns whether the array has ended."""
        while True:
            found = scan(self._text, self._at)
            if found.end >= 0 and self._try(self._at, found.end):
                self._at = found.end + 1
                return True
            if found.boundary >= 0 and self._try(self._at, found.boundary):
                self._at = found.boundary + 1
                return False
            # Either the text is broken, or an event is longer than what is held.
            held = len(self._text) - self._at
            enough = self._ended or held > MAX_EVENT_BYTES or not self._may_go_on()
            if enough and self._is_broken():
                return self._mend()
            if held > MAX_EVENT_BYTES:
                raise self._error(
                    f"has an event at {self._byte(self.position)} that is longer than "
                    f"{MAX_EVENT_BYTES >> 20} MiB",
                    "The file is damaged, or is no trace.",
                )
            if self._ended:
                return self._last()
            self._fill_to(2 * held)

    def _may_go_on(self) -> bool:
        """Returns whether what is held reads as JSON that is not at its end."""
        try:
            _RAW_EVENTS.decode(b"".join((b"[", memoryview(self._text)[self._at :])))
        except msgspec.DecodeError as error:
            return _TRUNCATED in str(error)
        return False

    def _is_broken(self) -> bool:
        """Returns whether one of the events that are held whole is no JSON."""
        text = self._text[self._at :]
        places = list(repair.events(text))[:-1]
        return any(not repair.reads(text[begin:end]) for begin, end in places)

    def _last(self) -> bool:
        """Deals with the last events of a text that has ended: the last is cut, or broken."""
        text = self._text[self._at :]
        *whole, (begin, _) = repair.events(text)
        for first, end in whole:
            self._decode(b"[" + text[first:end] + b"]")
        self._at += begin
        text = text[begin:]
        for end in _array_ends(text):
            self._refuse_hole(self.position, text[:end])
            mended = repair.mend(text[:end])
            if mended is None:
                continue
            if not self._lenient:
                raise self._cause(self.position, text[:end])
            self._keep(mended)
            self._at += text.index(b"]", end) + 1
            return True
        # Cut, but perhaps not within the event.
        event = text.rstrip(b" \t\r\n,")
        if repair.reads(event):
            self._decode(b"[" + event + b"]")
            self._at += len(text)
        raise _CutError

    def _mend(self) -> bool:
        """Repairs the events that are held whole, or says what is wrong with the first."""
        text = self._text[self._at :]
        places = list(repair.events(text))
        for begin, end in places[:-1]:
            event = text[begin:end]
            if repair.reads(event):
                self._decode(b"[" + event + b"]")
                continue
            if repair.holds_another_trace(event):
                raise self._another(self.position + begin)
            self._refuse_hole(self.position + begin, event)
            if not self._lenient:
                raise self._cause(self.position + begin, event)
            mended = repair.mend(event)
            if mended is None:
                self._notices.add("dropped_unreadable")
            else:
                self._keep(mended)
        self._at += places[-1][0]
        return False

    def _keep(self, mended: repair.Mended) -> None:
        self._decode(b"[" + mended.text + b"]")
        for code, count in mended.repairs.items():
            self._notices.add(code, count)

    # ------------------------------------------------------------------------------------------
    # Errors

    def _cut(self) -> None:
        """Says that the text is cut, or counts it."""
        self.cut = True
        rest = self._text[self._at :]
        if repair.holds_another_trace(rest) and self.has_events:
            raise self._another(self.position)
        if not self._lenient:
            size = self._before + len(self._text)
            raise self._error(
                f"is cut: it ends at {self._byte(size)} in the middle of the trace",
                "Export it again, the job may have been killed; --lenient uses what is there.",
            )
        self._notices.add("repaired_cut")

    def _another(self, position: int) -> InputError:
        return self._error(
            f"has another trace within its events or after them, near {self._byte(position)}: "
            "several processes wrote into one file",
            "Let each rank export to a file of its own, such as one with the rank in its name.",
        )

    def _refuse_hole(self, position: int, event: bytes) -> None:
        """Refuses text with a lost block in it: how many events that held nobody knows."""
        found = repair.hole(event)
        if found is not None:
            raise self._error(
                f"has a hole of {found[1]:,} zero bytes at {self._byte(position + found[0])}: "
                "a part of the file was lost",
                "Copy or export it again; what was lost cannot be counted, so --lenient does not "
                "help.",
            )

    def _cause(self, position: int, event: bytes) -> InputError:
        mended = repair.mend(event)
        if mended is None:
            return self._error(
                f"has an event at {self._byte(position)} that is no JSON: {_shown(event)}",
                "Export it again; --lenient leaves out what cannot be repaired, and counts it.",
            )
        cause = repair.CAUSES[next(iter(mended.repairs))]
        return self._error(
            f"is no JSON at {self._byte(position + mended.position)}: {cause}: "
            f"{_shown(event[max(0, mended.position - 20) :])}",
            "Read it with --lenient, which repairs this and counts it, or export it again.",
        )

    def _broken(self, what: str) -> _BrokenError:
        text = self._text[self._at :]
        return _BrokenError(
            f"{self._name} is no JSON at {self._byte(self.position)}: {what}: {_shown(text)}.",
            "Export the trace again.",
        )

    def _byte(self, position: int) -> str:
        return f"byte {position:,}{' of the unpacked text' if self._unpacked else ''}"

    def _error(self, what: str, remedy: str) -> InputError:
        return InputError(f"{self._name} {what}.", remedy)


class _BrokenError(InputError):
    """The root's text, outside of the events, is no JSON."""


class _CutError(Exception):
    """The text ended before its root did."""


def _array_ends(text: bytes) -> Iterator[int]:
    """Yields ends of a last event after which the array may be closed, latest first."""
    for found in reversed(list(re.finditer(rb"\}(?=\s*\])", text))):
        yield found.end()


def _shown(text: bytes) -> str:
    """Returns the begin of a text as one line."""
    line = " ".join(text[:60].decode(errors="backslashreplace").split())
    return f"{line}..." if len(text) > 60 else line

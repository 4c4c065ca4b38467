"""Bytes of a trace, piece by piece: plain or gzip by content, within a stated limit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from ddp_profiler.errors import InputError

try:
    # Unpacks about twice as fast. It has no wheels for some platforms.
    from isal import isal_zlib

    _fast: ModuleType | None = isal_zlib
except ImportError:
    _fast = None

DEFAULT_LIMIT_BYTES = 16 << 30
"""Most bytes of text that one compressed file may unpack to."""

_READ_BYTES = 1 << 17
_PIECE_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"
_GZIP_WRAPPER = 31
_FORMATS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ", "compressed with xz"),
    (b"SQLite format 3", "an SQLite database, such as Nsight Systems exports"),
)


class Source:
    """The unpacked text of a file, as an iterator of pieces.

    The content decides whether the file is compressed, not its name. Several gzip streams
    in one file are read one after the other, as gzip itself does.

    Args:
        path: The file.
        limit_bytes: Most bytes that a compressed file may unpack to.
        progress: Called with the bytes of the file that have been read.

    Attributes:
        size_bytes: Size of the file as it lies on the disk.
        compressed: Whether it is gzip.
        cut_at: Byte of the compressed file at which it ends within a gzip stream;
            None where it does not.

    Raises:
        InputError: The file cannot be read, is empty, or is of another format.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._progress = progress
        self.cut_at: int | None = None
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
        try:
            self.size_bytes = path.stat().st_size
            head = self._read()
        except OSError as error:
            self._file.close()
            raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
        self._head = head
        self.compressed = head[:2] == _GZIP
        if not head:
            self._file.close()
            raise InputError(
                f"{path} is empty.", "Export the trace again; the job may have been killed."
            )
        if not self.compressed:
            self._refuse_other_formats(head)

    def __iter__(self) -> Iterator[bytes]:
        """Yields pieces of text of a few hundred kB each."""
        try:
            yield from self._unpacked() if self.compressed else self._plain()
        except OSError as error:
            raise InputError(f"Cannot read {self._path}: {error.strerror or error}.") from error
        finally:
            self._file.close()

    def _refuse_other_formats(self, head: bytes) -> None:
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if not text or text[:1] in (b"{", b"["):
            return
        self._file.close()
        if self._path.suffix == ".gz":
            raise InputError(
                f"{self._path} is not gzip, though its name says so: it begins with {head[:4]!r}.",
                "Copy or export the trace again.",
            )
        binary = "a binary file" if b"\0" in head else "no JSON"
        what = next((text for magic, text in _FORMATS if head.startswith(magic)), binary)
        raise InputError(
            f"{self._path} is {what}: it begins with {head[:4]!r}.",
            "Give a trace that torch.profiler exported, as .json or .json.gz.",
        )

    def _read(self) -> bytes:
        data = self._file.read(_READ_BYTES)
        if self._progress is not None:
            self._progress(self._file.tell())
        return data

    def _plain(self) -> Iterator[bytes]:
        data = self._head
        while data:
            yield data
            data = self._read()

    def _unpacked(self) -> Iterator[bytes]:
        library = _fast or zlib
        data, done, total = self._head, False, 0
        unpacker = library.decompressobj(wbits=_GZIP_WRAPPER)
        # Where the data begins that has not been handed to the unpacker.
        at = 0
        while True:
            try:
                piece = unpacker.decompress(data, _PIECE_BYTES)
            except (zlib.error, library.error) as error:
                raise InputError(
                    f"{self._path} is damaged: its gzip data is invalid near byte "
                    f"{at:,} of {self.size_bytes:,} ({_reason(error)}).",
                    "Copy or export it again; what a damaged stream holds cannot be trusted.",
                ) from error
            total += len(piece)
            if total > self._limit_bytes:
                raise InputError(
                    f"{self._path} unpacks to more than {self._limit_bytes:,} bytes.",
                    "If it is a real trace, allow more with --max-unpacked-gb.",
                )
            if piece:
                yield piece
            if unpacker.eof:
                data = unpacker.unused_data.lstrip(b"\0")
                if not data:
                    at = self._file.tell()
                    data = self._read().lstrip(b"\0")
                if not data:
                    return
                if len(data) < 2:
                    data += self._read()
                if data[:2] != _GZIP:
                    position = self._file.tell() - len(data)
                    raise InputError(
                        f"{self._path} has {self.size_bytes - position:,} bytes that are not gzip "
                        f"after its last gzip stream, from byte {position:,} on.",
                        "Copy or export the trace again.",
                    )
                unpacker = library.decompressobj(wbits=_GZIP_WRAPPER)
                continue
            data = unpacker.unconsumed_tail
            if not data and not piece:
                if done:
                    self.cut_at = self.size_bytes
                    return
                at = self._file.tell()
                data = self._read()
                done = not data


def _reason(error: Exception) -> str:
    """Returns the library's reason without its prefix."""
    return str(error).rpartition(": ")[2] or str(error)

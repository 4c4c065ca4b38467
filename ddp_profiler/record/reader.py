"""Reads a run folder, whole or cut short, with clear errors for anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddp_profiler.errors import InputError
from ddp_profiler.record import checks, paths
from ddp_profiler.record.writer import CONDENSED_SCHEMA, NULL, SPAN_SCHEMA
from ddp_profiler.schema import NULLABLE_SPAN_COLUMNS, SCHEMA_VERSION, RunInfo

_MOST_RATIO = 256
"""How many times its size a condensed record may unpack to: columns of zeros pack well."""
_MOST_AT_ALL = 16 << 20
_CONTINUED = b"\xff\xff\xff\xff"
"""Begins each message of an Arrow stream; four bytes of its length follow."""
_MOST_OF_SCHEMA = 1 << 14
_MOST_SHOWN = 200
"""Characters of a file's text, or of a library's error, in an error of ours."""


@dataclass(frozen=True)
class RankSpans:
    """One rank's spans as columns.

    Attributes:
        rank: Global rank.
        columns: One array of shape [span] for each of ``schema.SPAN_COLUMNS``;
            null is ``writer.NULL`` (nullable columns are int64).
        run_id: The run that the stream says it belongs to.
        complete: Whether the stream was ended; false after a crash.
        condensed: Whether gradient collectives are one row a micro-step and DDP, with the columns
            of ``schema.CONDENSED_COLUMNS`` beside the others.
    """

    rank: int
    run_id: str
    columns: Mapping[str, npt.NDArray[np.int64]]
    complete: bool
    condensed: bool = False

    def __len__(self) -> int:
        return len(self.columns["kind"])


def read_run_info(folder: Path) -> RunInfo:
    """Reads ``run.json``.

    Raises:
        InputError: Missing, not JSON, of an unknown schema version, with wrong fields, or of what
            cannot have run.
    """
    paths.require_run(folder)
    path = paths.run_file(folder)
    raw = checks.read_json_bytes(path)
    if not raw.strip():
        raise InputError(
            f"{path} is empty: the run ended before it could describe itself.",
            "Run it again; there is nothing to analyse here.",
        )
    info: RunInfo = _decode(path, raw, RunInfo)
    checks.check_run_info(path, info)
    return info


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads ``summary.json`` as plain values.

    Raises:
        InputError: Missing, not JSON, or of an unknown schema version.
    """
    paths.require_run(folder)
    path = paths.summary_file(folder)
    if not path.is_file():
        raise InputError(f"{path} is missing.", f"Make it with: ddp-profiler analyze {folder}")
    summary: dict[str, Any] = _decode(path, checks.read_json_bytes(path), dict[str, Any])
    return summary


def _decode(path: Path, raw: bytes, kind: Any) -> Any:
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
        version = values.get("schema_version")
        # True is 1 to Python.
        if type(version) is not int or version != SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema version {_short(version)}; this version reads "
                f"{SCHEMA_VERSION}.",
                "Read it with the version of ddp_profiler that wrote it.",
            )
        checks.check_numbers(path, values)
        return values if kind == dict[str, Any] else msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error).splitlines()[0][:_MOST_SHOWN]
        raise InputError(f"{path} cannot be read: {reason}.", "The file is damaged.") from None
    except (RecursionError, MemoryError):
        raise InputError(
            f"{path} cannot be read: it is nested too deeply, or too large.", "The file is damaged."
        ) from None


def _short(value: object) -> str:
    """Returns a value of a file for an error's line."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def begun_records(folder: Path) -> tuple[dict[int, Path], tuple[str, ...]]:
    """Finds the rank files that can be read, and those that never came to hold anything.

    Returns:
        Files by rank; names of files that end before their schema does, as a rank leaves one
        that is killed, or whose disk fills up, while it begins its record. Nothing is lost with
        these, and what the other ranks have recorded is worth reading.
    """
    found = paths.rank_files(folder)
    unbegun = {rank: path for rank, path in found.items() if _ends_before_its_schema(path)}
    begun = {rank: path for rank, path in found.items() if rank not in unbegun}
    return begun, tuple(path.name for path in unbegun.values())


def _ends_before_its_schema(path: Path) -> bool:
    try:
        with checks.open_regular(path) as file:
            head = file.read(8)
            size = file.seek(0, 2)
    except (InputError, OSError):
        # Said where it is read.
        return False
    if len(head) < 8:
        return _CONTINUED.startswith(head[:4])
    length = int.from_bytes(head[4:], "little")
    return head[:4] == _CONTINUED and size < 8 + length <= _MOST_OF_SCHEMA


def read_rank(folder: Path, rank: int) -> RankSpans:
    """Reads one rank's spans, as far as the stream goes.

    Raises:
        InputError: The file is missing, is no span stream, or is of another schema.
    """
    path = paths.rank_file(folder, rank)
    batches: list[pa.RecordBatch] = []
    complete, condensed = True, False
    unpacked = 0
    try:
        with checks.open_regular(path) as file, pa.PythonFile(file, "r") as source:
            messages = pa.ipc.MessageReader.open_stream(source)
            schema = pa.ipc.read_schema(messages.read_next_message())
            _check_schema(path, schema, rank)
            condensed = _is_condensed(schema)
            most = _MOST_RATIO * path.stat().st_size + _MOST_AT_ALL
            run_id = (schema.metadata or {}).get(b"run_id", b"").decode(errors="replace")
            while True:
                try:
                    message = messages.read_next_message()
                    unpacked += _unpacked(path, message, condensed)
                    if unpacked > most:
                        raise InputError(
                            f"{path} says that it unpacks to more than {most:,} bytes.",
                            "The file is damaged or was not written by ddp_profiler.",
                        )
                    batch = pa.ipc.read_record_batch(message, schema)
                    batch.validate(full=True)
                except StopIteration:
                    break
                except InputError:
                    raise
                except Exception:
                    # On damaged bytes Arrow raises errors of many kinds.
                    complete = False
                    break
                batches.append(batch)
            complete = complete and _ended(file)
    except FileNotFoundError:
        raise InputError(f"{path} is missing.", "The record of this rank was lost.") from None
    except InputError:
        raise
    except Exception as error:
        # Raised without a word where the file ends before its schema.
        ended = "it is empty" if isinstance(error, StopIteration) else ""
        cause = (ended or str(error) or type(error).__name__).splitlines()[0][:_MOST_SHOWN]
        raise InputError(
            f"{path} is not a span stream: {cause}.",
            "The file is damaged or was not written by ddp_profiler.",
        ) from None
    expected = CONDENSED_SCHEMA if condensed else SPAN_SCHEMA
    tables = [expected.empty_table()]
    if batches:
        tables.append(pa.Table.from_batches(batches))
    table = pa.concat_tables(tables, promote_options="default").combine_chunks()
    columns = {name: _to_numpy(table, name) for name in expected.names}
    return RankSpans(rank, run_id, columns, complete, condensed)


def read_rank_of(folder: Path, rank: int, run_id: str) -> RankSpans:
    """Reads one rank's spans of a run, and refuses what nothing could have recorded.

    Raises:
        InputError: As :func:`read_rank`; the file is another run's; a span cannot be.
    """
    spans = read_rank(folder, rank)
    path = paths.rank_file(folder, rank)
    if spans.run_id != run_id:
        raise InputError(
            f"{path} belongs to the run {spans.run_id[:_MOST_SHOWN]}, not to {run_id}.",
            "Keep the files of different runs in folders of their own.",
        )
    checks.check_columns(path, spans.columns, NULL)
    return spans


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _ended(file: BinaryIO) -> bool:
    """Tells whether the stream has its end mark: a reader alone takes a cut one for an end."""
    file.seek(0, 2)
    file.seek(max(0, file.tell() - len(_END_OF_STREAM)))
    return file.read() == _END_OF_STREAM


def _unpacked(path: Path, message: pa.ipc.Message, condensed: bool) -> int:
    """Returns the bytes that a compressed batch unpacks to, before it is; 0 if it is none."""
    body = message.body
    size = checks.unpacked_bytes(message.metadata.to_pybytes(), memoryview(body or b""))
    if size is not None and not condensed:
        raise InputError(
            f"{path} is compressed, as only condensed records are.",
            "The file was not written by ddp_profiler.",
        )
    return size or 0


def _is_condensed(schema: pa.Schema) -> bool:
    return b"condensed" in (schema.metadata or {})


def _check_schema(path: Path, schema: pa.Schema, rank: int) -> None:
    metadata = schema.metadata or {}
    version = metadata.get(b"schema_version", b"missing").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise InputError(
            f"{path} has schema version {version[:_MOST_SHOWN]}; this version reads "
            f"{SCHEMA_VERSION}.",
            "Read it with the version of ddp_profiler that wrote it.",
        )
    # Records of earlier versions lack the columns that came later, which may all be null.
    all_known = CONDENSED_SCHEMA if _is_condensed(schema) else SPAN_SCHEMA
    known = [f for f in all_known if not f.nullable or f.name in schema.names]
    if not schema.equals(pa.schema(known)):
        raise InputError(f"{path} has other columns than a span stream.", "The file is damaged.")
    if metadata.get(b"rank") != str(rank).encode():
        writer = metadata.get(b"rank", b"?").decode(errors="replace")
        raise InputError(
            f"{path} was written by rank {writer[:_MOST_SHOWN]}.",
            "Rank files must keep their names.",
        )


def _to_numpy(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    column = table.column(name)
    if name in NULLABLE_SPAN_COLUMNS:
        column = column.cast(pa.int64()).fill_null(int(NULL))
    values: npt.NDArray[np.int64] = column.to_numpy()
    return values

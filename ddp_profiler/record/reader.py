"""Reads a run folder, whole or cut short, with clear errors for anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddp_profiler.errors import InputError
from ddp_profiler.record import paths
from ddp_profiler.record.writer import CONDENSED_SCHEMA, NULL, SPAN_SCHEMA
from ddp_profiler.schema import NULLABLE_SPAN_COLUMNS, SCHEMA_VERSION, RunInfo


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
        InputError: Missing, not JSON, of an unknown schema version, or with wrong fields.
    """
    paths.require_run(folder)
    path = paths.run_file(folder)
    raw = path.read_bytes()
    if not raw.strip():
        raise InputError(
            f"{path} is empty: the run ended before it could describe itself.",
            "Run it again; there is nothing to analyse here.",
        )
    info: RunInfo = _decode(path, raw, RunInfo)
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
    summary: dict[str, Any] = _decode(path, path.read_bytes(), dict[str, Any])
    return summary


def _decode(path: Path, raw: bytes, kind: Any) -> Any:
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema version {version!r}; this version reads {SCHEMA_VERSION}.",
                "Read it with the version of ddp_profiler that wrote it.",
            )
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} cannot be read: {error}.", "The file is damaged.") from None


def read_rank(folder: Path, rank: int) -> RankSpans:
    """Reads one rank's spans, as far as the stream goes.

    Raises:
        InputError: The file is missing, is no span stream, or is of another schema.
    """
    path = paths.rank_file(folder, rank)
    batches: list[pa.RecordBatch] = []
    complete, condensed = True, False
    try:
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as stream:
            _check_schema(path, stream.schema, rank)
            condensed = _is_condensed(stream.schema)
            run_id = (stream.schema.metadata or {}).get(b"run_id", b"").decode(errors="replace")
            while True:
                try:
                    batch = stream.read_next_batch()
                    batch.validate(full=True)
                except StopIteration:
                    break
                except Exception:
                    # On damaged bytes Arrow raises errors of many kinds.
                    complete = False
                    break
                batches.append(batch)
            complete = complete and _ended(path)
    except FileNotFoundError:
        raise InputError(f"{path} is missing.", "The record of this rank was lost.") from None
    except InputError:
        raise
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
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


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _ended(path: Path) -> bool:
    """Tells whether the stream has its end mark: a reader alone takes a cut one for an end."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - len(_END_OF_STREAM)))
        return file.read() == _END_OF_STREAM


def _is_condensed(schema: pa.Schema) -> bool:
    return b"condensed" in (schema.metadata or {})


def _check_schema(path: Path, schema: pa.Schema, rank: int) -> None:
    metadata = schema.metadata or {}
    version = metadata.get(b"schema_version", b"missing").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise InputError(
            f"{path} has schema version {version}; this version reads {SCHEMA_VERSION}.",
            "Read it with the version of ddp_profiler that wrote it.",
        )
    # Records of earlier versions lack the columns that came later, which may all be null.
    all_known = CONDENSED_SCHEMA if _is_condensed(schema) else SPAN_SCHEMA
    known = [f for f in all_known if not f.nullable or f.name in schema.names]
    if not schema.equals(pa.schema(known)):
        raise InputError(f"{path} has other columns than a span stream.", "The file is damaged.")
    if metadata.get(b"rank") != str(rank).encode():
        raise InputError(
            f"{path} was written by rank {metadata.get(b'rank', b'?').decode(errors='replace')}.",
            "Rank files must keep their names.",
        )


def _to_numpy(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    column = table.column(name)
    if name in NULLABLE_SPAN_COLUMNS:
        column = column.cast(pa.int64()).fill_null(int(NULL))
    values: npt.NDArray[np.int64] = column.to_numpy()
    return values

"""Writes a run folder as the run goes; what a crash leaves behind stays readable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddp_profiler.errors import UsageError
from ddp_profiler.record import paths
from ddp_profiler.schema import (
    CONDENSED_COLUMNS,
    NULLABLE_SPAN_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    RunInfo,
)

NULL = np.iinfo(np.int64).min
"""Stands for null where spans are columns of whole numbers."""

SPAN_SCHEMA = pa.schema(
    [
        pa.field(name, getattr(pa, kind)(), nullable=name in NULLABLE_SPAN_COLUMNS)
        for name, kind in SPAN_COLUMNS
    ]
)


CONDENSED_SCHEMA = pa.schema(
    [
        *SPAN_SCHEMA,
        *(pa.field(name, getattr(pa, kind)(), nullable=False) for name, kind in CONDENSED_COLUMNS),
    ]
)


class SpanWriter:
    """Appends one rank's spans to its Arrow IPC stream.

    Each call of :meth:`write` makes one record batch and hands it to the operating
    system, so that a killed process loses only what it had not yet handed over.

    Args:
        folder: The run folder.
        rank: Global rank; names the file.
        run_id: Stored in the stream, so that files of different runs are told apart.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, run_id: str) -> None:
        metadata = _metadata(rank, run_id)
        path = paths.rank_file(folder, rank)
        try:
            self._sink = pa.OSFile(str(path), "wb")
            self._stream = pa.ipc.new_stream(self._sink, SPAN_SCHEMA.with_metadata(metadata))
            # Arrow writes the schema with the first batch: an empty one makes the file readable
            # from the start.
            self.write({field.name: [] for field in SPAN_SCHEMA})
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error).splitlines()[0]
            raise UsageError(
                f"{path} cannot be written: {reason}.",
                "Choose a folder that every rank can write, with --out.",
            ) from error

    def write(self, columns: Mapping[str, Sequence[int | None]]) -> None:
        """Writes one batch of spans: a sequence for each of ``SPAN_COLUMNS``, of equal length."""
        arrays = [pa.array(columns[field.name], type=field.type) for field in SPAN_SCHEMA]
        self._stream.write_batch(pa.record_batch(arrays, schema=SPAN_SCHEMA))

    def write_columns(self, columns: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Writes spans as a reader has them: arrays of shape [span], null as :data:`NULL`."""
        self._stream.write_batch(_batch(columns, SPAN_SCHEMA))

    def close(self) -> None:
        """Ends the stream. A stream without an end is readable and known to be cut."""
        self._stream.close()
        self._sink.close()


def _metadata(rank: int, run_id: str) -> dict[str, str]:
    return {"schema_version": str(SCHEMA_VERSION), "rank": str(rank), "run_id": run_id}


def _batch(columns: Mapping[str, npt.NDArray[np.int64]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        pa.array(
            columns[field.name],
            type=field.type,
            mask=columns[field.name] == NULL if field.nullable else None,
            safe=False,
        )
        for field in schema
    ]
    return pa.record_batch(arrays, schema=schema)


def condensed_stream(rank: int, run_id: str, columns: Mapping[str, npt.NDArray[np.int64]]) -> bytes:
    """Returns a condensed record as one compressed Arrow IPC stream.

    Args:
        rank: Global rank.
        run_id: Of its run.
        columns: Its spans, condensed, shape [span] each, null as :data:`NULL`.
    """
    schema = CONDENSED_SCHEMA.with_metadata({**_metadata(rank, run_id), "condensed": "1"})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        stream.write_batch(_batch(columns, CONDENSED_SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def write_run_info(folder: Path, info: RunInfo) -> None:
    """Writes ``run.json``, as a whole or not at all."""
    write_json(paths.run_file(folder), info)


def write_json(path: Path, value: object) -> None:
    """Writes a value as indented JSON, as a whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    partial.replace(path)

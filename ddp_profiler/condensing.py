"""A rank's file made small where it lies, so that little travels to where ranks are joined."""

from __future__ import annotations

from pathlib import Path

from ddp_profiler.analysis.condensed import condense
from ddp_profiler.analysis.rank_record import without_kineto
from ddp_profiler.errors import InputError
from ddp_profiler.record import paths, reader, writer

MOST_WHOLE_BYTES = 64 * 2**20
"""Up to so many bytes, files of other nodes are collected whole with ``--collect auto``: a second
or less over a link of 1 Gbit/s."""


def condensed_file(folder: Path, rank: int) -> bytes:
    """Returns a rank's record, condensed, as the bytes of a file that readers know.

    Analysed, it gives the figures of the whole record. A record that was cut stays as it is: how
    far it goes is a finding of its own.

    Raises:
        InputError: The file is missing or no span stream.
        OSError: It cannot be read.
    """
    spans = reader.read_rank(folder, rank)
    if not spans.complete or spans.condensed:
        return paths.rank_file(folder, rank).read_bytes()
    columns = condense(without_kineto(spans.columns))
    return writer.condensed_stream(rank, spans.run_id, columns)


def to_send(folder: Path, rank: int, how: str, senders: int) -> bytes:
    """Returns what a rank sends to rank 0 in place of its file, or that file.

    Args:
        folder: This rank's folder.
        rank: Global rank.
        how: ``whole``, ``condensed``, or ``auto``: condensed where all senders' files, taken to be
            as large as this one, are more than :data:`MOST_WHOLE_BYTES`.
        senders: Ranks that send.

    Raises:
        OSError: The file cannot be read.
    """
    path = paths.rank_file(folder, rank)
    small = how == "auto" and path.stat().st_size * senders <= MOST_WHOLE_BYTES
    if how == "whole" or small:
        return path.read_bytes()
    try:
        return condensed_file(folder, rank)
    except InputError:
        # What is wrong with it shows where it is analysed.
        return path.read_bytes()

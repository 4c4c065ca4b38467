"""A record in several folders: where nodes do not share one, each keeps its ranks' files."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import SPAN_COLUMNS, Failure, RunInfo, SpanKind, Variant

_STATES = ("running", "failed", "complete")
"""From the least to the most that a run.json says of its run."""


def keeper_of(folder: Path, run_id: str) -> int | None:
    """Returns the rank that claimed a folder for a run; None if the run is not there."""
    try:
        info = reader.read_run_info(folder)
    except (InputError, OSError):
        return None
    return info.keeper if info.run_id == run_id else None


class PartWriter:
    """Takes a rank's file from elsewhere: it gets its name once it is whole.

    Args:
        folder: The run folder.
        rank: Global rank; names the file.
        size: Bytes that the file must have.
        sha256: Its digest, hexadecimal.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, size: int, sha256: str) -> None:
        self._target = paths.rank_file(folder, rank)
        self._partial = paths.partial_file(self._target)
        self._size, self._sha256 = size, sha256
        self._digest, self._taken = hashlib.sha256(), 0
        self._file = self._partial.open("xb")

    def write(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._file.write(data)
        self._digest.update(data)
        self._taken += len(data)

    def finish(self) -> None:
        """Gives the file its name.

        Raises:
            InputError: It is not what was announced, or the name is taken.
            OSError: The file cannot be written.
        """
        self._file.close()
        if self._taken != self._size or self._digest.hexdigest() != self._sha256:
            raise InputError(
                f"{self._target} did not come as it was sent: {self._taken} of {self._size} "
                "bytes, or others."
            )
        if self._target.exists():
            raise InputError(f"{self._target} is there already.")
        self._partial.replace(self._target)

    def discard(self) -> None:
        """Removes what has no name yet; does nothing after :meth:`finish`."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Merged:
    """What was joined.

    Attributes:
        info: The run's description in the new folder.
        ranks: The ranks that each folder gave, in the order of the folders; a rank that
            several hold is counted at the first.
        missing: Ranks whose files are in none of the folders.
    """

    info: RunInfo
    ranks: Mapping[Path, tuple[int, ...]]
    missing: tuple[int, ...]


def merge(folders: Sequence[Path], out: Path) -> Merged:
    """Joins the folders that the nodes of one run kept into a new run folder.

    Everything is checked before ``out`` is made; the folders stay as they are.

    Args:
        folders: Two or more run folders of the same run.
        out: The folder to make.

    Raises:
        UsageError: Fewer than two folders, or ``out`` holds a run or cannot be written.
        InputError: A folder holds no run or another one, a file is damaged, or two folders
            have different files of the same rank.
    """
    if len({folder.resolve() for folder in folders}) < 2:
        raise UsageError(
            "There is nothing to join: fewer than two folders are given.",
            "Name the folders that the nodes kept, one after the other.",
        )
    infos = [reader.read_run_info(folder) for folder in folders]
    for folder, info in zip(folders, infos, strict=True):
        if info.run_id != infos[0].run_id:
            raise InputError(
                f"{folder} holds the run {info.run_id}, and {folders[0]} the run "
                f"{infos[0].run_id}.",
                "Name folders of one run only.",
            )
    given = {folder: _checked_files(folder, infos[0].run_id) for folder in folders}
    files = _join_files(given)
    if not files:
        raise InputError(
            f"None of the {len(folders)} folders holds a rank-*.arrows: nothing was measured.",
            "Name the folders that the nodes kept.",
        )
    joined = _join_infos(infos)
    _write(out, files, joined)
    return Merged(
        info=joined,
        ranks={
            folder: tuple(rank for rank, path in own.items() if files[rank] == path)
            for folder, own in given.items()
        },
        missing=tuple(sorted(set(range(joined.world_size)) - set(files))),
    )


def _checked_files(folder: Path, run_id: str) -> dict[int, Path]:
    found, _ = reader.begun_records(folder)
    for rank, path in found.items():
        spans = reader.read_rank(folder, rank)
        if spans.run_id != run_id:
            raise InputError(
                f"{path} belongs to the run {spans.run_id}, not to {run_id}.",
                "Keep the files of different runs in folders of their own.",
            )
    return found


def _join_files(given: Mapping[Path, Mapping[int, Path]]) -> dict[int, Path]:
    files: dict[int, Path] = {}
    for own in given.values():
        for rank, path in own.items():
            first = files.setdefault(rank, path)
            if first == path or filecmp.cmp(first, path, shallow=False):
                continue
            whole = _whole_one(first, path, rank)
            if whole is None:
                raise InputError(
                    f"Rank {rank} has two different files: {first} and {path}.",
                    "Move the wrong one out of its folder; a file that was cut is the shorter one.",
                )
            files[rank] = whole
    return dict(sorted(files.items()))


def _whole_one(one: Path, other: Path, rank: int) -> Path | None:
    """Returns the whole record where the other file is the same one, condensed; else None."""
    both = {path: reader.read_rank(path.parent, rank) for path in (one, other)}
    whole = [path for path, spans in both.items() if not spans.condensed]
    if len(whole) != 1:
        return None
    condensed = both[other if whole[0] == one else one].columns
    columns = both[whole[0]].columns
    told = columns["variant"] != Variant.KINETO
    gradients = (columns["kind"] == SpanKind.GRADIENT) & told
    merged = condensed["kind"] == SpanKind.GRADIENT
    same = int(condensed["collectives"].sum()) == int(gradients.sum()) and all(
        np.array_equal(columns[name][told & ~gradients], condensed[name][~merged])
        for name, _ in SPAN_COLUMNS
    )
    return whole[0] if same else None


def _join_infos(infos: Sequence[RunInfo]) -> RunInfo:
    """Returns what all keepers know together: each field from the one that knows most of it.

    Of a run that was lost, a node may have learnt how it ended, and another one what it measured.
    """

    def best(measure: Callable[[RunInfo], Any]) -> RunInfo:
        return max(infos, key=lambda info: (measure(info), -info.keeper))

    described = best(lambda info: len(info.ranks))
    failures: dict[Failure, None] = dict.fromkeys(
        best(lambda info: (_state(info), len(info.failures))).failures
    )
    for info in infos:
        failures |= dict.fromkeys(info.failures)
    return replace(
        described,
        keeper=0,
        status=best(_state).status,
        failures=tuple(failures),
        environment=best(lambda info: len(info.environment)).environment,
        facts=best(
            lambda info: (len(info.facts), sum(len(fact.machine) for fact in info.facts))
        ).facts,
        clocks=best(lambda info: len(info.clocks)).clocks,
        parts=best(lambda info: len(info.parts)).parts,
        phases=best(lambda info: len(info.phases)).phases,
    )


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Choose a folder with more room, with --out."
    if error.errno == errno.EEXIST:
        return f"Remove {error.filename}, which an earlier run has left, or choose another --out."
    return "Choose a folder that can be written, with --out."


def _state(info: RunInfo) -> int:
    return _STATES.index(info.status) if info.status in _STATES else -1


def _write(out: Path, files: Mapping[int, Path], info: RunInfo) -> None:
    paths.claim_folder(out)
    made: list[Path] = []
    try:
        for rank, source in files.items():
            target = paths.rank_file(out, rank)
            partial = paths.partial_file(target)
            with source.open("rb") as whole, partial.open("xb") as copy:
                made += [partial, target]
                shutil.copyfileobj(whole, copy)
            partial.replace(target)
        writer.write_run_info(out, info)
    except BaseException as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            paths.release_folder(out)
        if isinstance(error, OSError):
            raise UsageError(
                f"The output folder {out} cannot be written: {error.strerror or error}.",
                _remedy(error),
            ) from None
        raise

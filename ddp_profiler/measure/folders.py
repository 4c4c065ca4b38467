"""Finds out which ranks see one run folder, and which keep their files in one of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddp_profiler.errors import DdpProfilerError, UsageError
from ddp_profiler.schema import RecordPart

_LATE_S = 3.0
"""So long a folder that refused a claim is looked at again: a rank of the same node may be about
to describe its claim, and a network file system may show rank 0's claim late."""
_LOOK_AGAIN_S = 0.05


class Board(Protocol):
    """Where ranks make values known to each other."""

    @property
    def rank(self) -> int:
        """Global rank."""
        ...

    def publish(self, key: str, value: object) -> None:
        """Makes a value known to all ranks."""
        ...

    def learn(self, key: str, kind: Any = Any) -> Any:
        """Waits for a value and returns it as ``kind``."""
        ...


@dataclass(frozen=True)
class _Home:
    """Where one rank's file goes; ``problem`` says why it cannot go anywhere."""

    keeper: int
    hostname: str
    folder: str
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class _Settled:
    """What rank 0 makes of all homes."""

    parts: tuple[RecordPart, ...]
    problem: str = ""
    remedy: str = ""


def settle_folders(
    board: Board,
    world_size: int,
    hostname: str,
    folder: Path,
    look: Callable[[], int | None],
    claim: Callable[[], None],
) -> tuple[RecordPart, ...]:
    """Gives every rank a folder for its file: the run's own, or one that its node claims.

    A rank that does not see this run in ``folder`` claims that path where it is. Of several
    that see the same disk one gets it, since a claim is exclusive; the others then see the
    run there. So it does not matter what the nodes share, or what they are called.

    Args:
        board: Makes values known between ranks. All ranks call this alike.
        world_size: Number of ranks.
        hostname: Name of this rank's node.
        folder: The run folder; a relative path is resolved on each node.
        look: Returns the rank that claimed the folder for this run; None where it holds
            no run or another one.
        claim: Claims the folder for this run.

    Returns:
        The folders in use, that of rank 0 first, the same on every rank; empty if it is one.

    Raises:
        UsageError: A node's folder cannot be used. Every rank raises it.
    """
    home = _find_home(board.rank, hostname, folder, look, claim)
    board.publish(f"home/{board.rank}", home)
    if board.rank == 0:
        board.publish("homes", _join([board.learn(f"home/{r}", _Home) for r in range(world_size)]))
    settled: _Settled = board.learn("homes", _Settled)
    if settled.problem:
        raise UsageError(settled.problem, settled.remedy)
    return settled.parts


def _find_home(
    rank: int,
    hostname: str,
    folder: Path,
    look: Callable[[], int | None],
    claim: Callable[[], None],
) -> _Home:
    place = str(folder.absolute())
    keeper = look()
    if keeper is not None:
        return _Home(keeper, hostname, place)
    try:
        claim()
    except (DdpProfilerError, OSError) as error:
        until = time.monotonic() + _LATE_S
        while time.monotonic() < until:
            keeper = look()
            if keeper is not None:
                return _Home(keeper, hostname, place)
            time.sleep(_LOOK_AGAIN_S)
        if isinstance(error, DdpProfilerError):
            return _Home(rank, hostname, place, error.message, error.remedy)
        return _Home(
            rank,
            hostname,
            place,
            f"The output folder {place} cannot be used: {error.strerror or error}.",
            "Choose a folder that can be written on every node, with --out.",
        )
    return _Home(rank, hostname, place)


def _join(homes: list[_Home]) -> _Settled:
    for rank, home in enumerate(homes):
        if home.problem:
            return _Settled(
                (),
                f"Rank {rank} on {home.hostname} does not see rank 0's run folder and cannot "
                f"keep its own: {home.problem}",
                home.remedy,
            )
    keepers = sorted({home.keeper for home in homes})
    if keepers == [0]:
        return _Settled(())
    return _Settled(
        tuple(
            RecordPart(
                keeper=keeper,
                hostname=homes[keeper].hostname,
                folder=homes[keeper].folder,
                ranks=tuple(rank for rank, home in enumerate(homes) if home.keeper == keeper),
            )
            for keeper in keepers
        )
    )

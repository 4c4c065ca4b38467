"""Keeps a run's description: claims the folder, writes ``run.json`` as the run goes.

One rank on each file system keeps it; the others have nothing to write. What belongs to the
end of a run whose nodes share no file system is here too: bringing their parts to rank 0.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_profiler import units
from ddp_profiler._version import __version__
from ddp_profiler.condensing import to_send
from ddp_profiler.config import ScriptConfig, StudyConfig
from ddp_profiler.errors import DdpProfilerError, InputError, UsageError
from ddp_profiler.measure import collect
from ddp_profiler.measure.folders import Board, settle_folders
from ddp_profiler.measure.session import Session
from ddp_profiler.record import parts as record_parts
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import SCHEMA_VERSION, LevelSettings, RecordPart, RunInfo
from ddp_profiler.workload import Workload

Say = Callable[[str], None]


class RunKeeper:
    """A run's description on one rank.

    Attributes:
        folder: The folder that this rank keeps; None on a rank that keeps none.
        info: What is written there.

    Args:
        rank: Global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._main_is_in = False
        self._afterwards: Callable[[], None] | None = None
        self.folder: Path | None = None
        self.info: RunInfo | None = None

    def claim(self, folder: Path, info: RunInfo) -> None:
        """Claims a folder for a run and describes the run there.

        Raises:
            UsageError: The folder is taken or cannot be written.
        """
        folder = paths.tidy(folder)
        paths.claim_folder(folder)
        self._describe_claim(folder, info)

    def claim_default(self, name: str, now: datetime, info: RunInfo, below: Path = Path()) -> None:
        """Claims a fresh folder in ``below``/runs/ for a run and describes the run there.

        Raises:
            UsageError: It cannot be written.
        """
        self._describe_claim(paths.claim_default_folder(name, now, below), info)

    def _describe_claim(self, folder: Path, info: RunInfo) -> None:
        """Describes the run in a folder that was claimed, or gives it back.

        Raises:
            UsageError: The disk takes no more.
        """
        self.folder, self.info = folder, info
        try:
            self.update()
        except OSError as error:
            with contextlib.suppress(OSError):
                paths.release_folder(folder)
            self.folder = self.info = None
            raise UsageError(
                f"The output folder {folder} cannot be used: {error.strerror or error}.",
                "Make room there, or choose another folder with --out.",
            ) from None

    def defer(self, then: Callable[[], None]) -> bool:
        """Has something done once the main thread is through with the folder.

        For a signal's handler, which comes in the middle of whatever that thread does: kept there,
        it would hold the lock that whoever ends the process has to write under.

        Returns:
            Whether the main thread, which calls this, is at the folder now.
        """
        if self._main_is_in:
            self._afterwards = then
        return self._main_is_in

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one thread at a time to the folder."""
        if threading.current_thread() is not threading.main_thread():
            with self._lock:
                yield
            return
        # Around the lock: a signal may come right after it is taken.
        self._main_is_in = True
        try:
            with self._lock:
                yield
        finally:
            self._main_is_in = False
            then, self._afterwards = self._afterwards, None
            if then is not None:
                then()

    def update(self, **changes: Any) -> None:
        """Writes ``run.json`` with some fields changed, where this rank keeps one."""
        with self._alone():
            if self.folder is not None and self.info is not None:
                self.info = replace(self.info, **changes)
                writer.write_run_info(self.folder, self.info)

    def release(self) -> bool:
        """Gives the folder back for the next try, if no rank has begun its record in it.

        Returns:
            Whether this rank keeps no folder any more.
        """
        with self._alone():
            if self.folder is not None and not paths.rank_files(self.folder):
                paths.release_folder(self.folder)
                self.folder = self.info = None
            return self.folder is None

    def stand_in(self, folder: Path, run_id: str) -> None:
        """Keeps a run's folder from now on for the rank that kept it, which is dead.

        Does nothing where this rank does not see the folder.
        """
        with self._alone(), contextlib.suppress(DdpProfilerError, OSError):
            info = reader.read_run_info(folder)
            if self.folder is None and info.run_id == run_id:
                self.folder, self.info = folder, info

    def settle(
        self, board: Board, world_size: int, folder: Path, described: RunInfo
    ) -> tuple[RecordPart, ...]:
        """Finds this rank's folder: the run's own, or one that this node claims for the run.

        Args:
            board: Makes values known between ranks; all ranks call this alike.
            world_size: Number of ranks.
            folder: The run folder.
            described: The run as rank 0 describes it.

        Returns:
            The folders in use, the same on every rank; empty if all ranks see one.

        Raises:
            UsageError: A node's folder cannot be used; every rank raises it.
        """
        try:
            return settle_folders(
                board,
                world_size,
                socket.gethostname(),
                folder,
                lambda: record_parts.keeper_of(folder, described.run_id),
                lambda: self.claim(folder, replace(described, keeper=self._rank)),
            )
        except UsageError:
            self.release()
            raise


def describe(
    config: StudyConfig,
    workload: Workload,
    world_size: int,
    levels: tuple[LevelSettings, ...],
    now: datetime,
) -> RunInfo:
    """Describes a run that begins now."""
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
    settings |= {
        "tokens_per_sample": workload.tokens_per_sample,
        "model_options": dict(workload.options),
    }
    return RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
        status="running",
        created=now.isoformat(timespec="seconds"),
        profiler_version=__version__,
        world_size=world_size,
        settings=settings,
        levels=levels,
    )


def describe_script(config: ScriptConfig, world_size: int, name: str, now: datetime) -> RunInfo:
    """Describes the run of a script that begins now; its level is known when it has trained."""
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(config).items()
    }
    return RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
        status="running",
        created=now.isoformat(timespec="seconds"),
        profiler_version=__version__,
        world_size=world_size,
        settings={**settings, "model": name},
        levels=(),
    )


class PartsCollection:
    """Brings the files of ranks that do not see rank 0's folder to it.

    All ranks make one before they measure.

    Args:
        session: This rank's part in the launch.
        parts: The folders in use; empty if all ranks see one.
        folder: The run folder.
        say: Shows a line to the user.
        how: ``whole``, ``condensed`` or ``auto``, see :func:`ddp_profiler.condensing.to_send`.
    """

    def __init__(
        self,
        session: Session,
        parts: Sequence[RecordPart],
        folder: Path,
        say: Say,
        how: str = "whole",
    ) -> None:
        self._session = session
        self._parts = parts
        self._folder = folder
        self._say = say
        self._how = how
        self._senders = [rank for part in parts if part.keeper != 0 for rank in part.ranks]
        self._carrier: collect.GroupCarrier | None = None
        if self._senders:
            own_group = session.device.backend != "gloo"
            self._carrier = collect.GroupCarrier(session, self._senders, own_group=own_group)

    def run(self, unreachable: str = "") -> dict[int, str] | None:
        """Collects, or hands over; what goes wrong is said and loses nothing.

        Args:
            unreachable: Why rank 0 did not answer before; then nothing is waited for again.

        Returns:
            On rank 0 the ranks whose files did not come, each with the reason. On other ranks
            nothing, or None if rank 0 cannot be reached any more.
        """
        rank, carrier = self._session.rank, self._carrier
        if carrier is None or (rank != 0 and rank not in self._senders):
            return {}
        if rank == 0:
            return collect.collect(
                carrier,
                self._senders,
                lambda sender, size, digest: record_parts.PartWriter(
                    self._folder, sender, size, digest
                ),
                _Progress(self._say),
            )
        reason = unreachable or collect.hand_over(
            carrier,
            paths.rank_file(self._folder, rank),
            lambda _: to_send(self._folder, rank, self._how, len(self._senders)),
        )
        if not reason:
            return {}
        error = InputError(
            f"rank {rank} could not hand over its part ({reason}). It is kept on "
            f"{socket.gethostname()} in {self._folder.absolute()}.",
            "Copy that folder to rank 0's node and join both with: ddp-profiler merge",
        )
        self._say(str(error))
        return None

    def tell_lost(self, lost: Mapping[int, str]) -> None:
        """Says which ranks' files were not collected, where they are, and what to do."""
        kept = [
            f"{units.ranks(there)} on {part.hostname} in {shlex.quote(part.folder)}"
            for part in self._parts
            if (there := [rank for rank in part.ranks if rank in lost])
        ]
        error = InputError(
            f"not all parts were collected ({'; '.join(dict.fromkeys(lost.values()))}). They are "
            f"kept: {'; '.join(kept)}.",
            "Copy what is missing to this node and join: "
            f"ddp-profiler merge {shlex.quote(str(self._folder))} DIR... --out RUN",
        )
        self._say(str(error))


class _Progress:
    """Says how far a collection is, if it takes long."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._next_s = time.monotonic() + 2

    def __call__(self, done: int, total: int) -> None:
        """Is told how many bytes have come, of how many."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + 10
            self._say(
                f"collecting the parts of other nodes: {units.nbytes(done)} of "
                f"{units.nbytes(total)}"
            )

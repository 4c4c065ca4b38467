"""What ranks tell each other when a run fails: who failed first, and what each was doing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ddp_profiler.errors import InputError
from ddp_profiler.measure.bounded import BoundedStore
from ddp_profiler.measure.watch import FAILURES, alive_key
from ddp_profiler.schema import Failure, RankPhase

_REPORTED = "reported"
_PAUSE_S = 0.05
_FIRST_PHASE = "start-up"


def phase_key(rank: int) -> str:
    """Returns the key of a rank's current phase."""
    return f"phase/{rank}"


def _place_key(rank: int) -> str:
    return f"place in code/{rank}"


class FailureBoard:
    """Failures and phases of all ranks, as far as the store can still be asked.

    Args:
        store: What ranks talk through; None for a rank that has not met the others.
        rank: Global rank.
        hosts: Name of each rank's node, by rank.
    """

    def __init__(self, store: BoundedStore | None, rank: int, hosts: Sequence[str]) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts

    def note(self, phase: str, message: str) -> tuple[Failure, ...]:
        """Notes this rank's failure and returns all that are known, the first one first."""
        host = self._hosts[self._rank] if self._hosts else ""
        return self.note_failure(Failure(self._rank, phase, message, host))

    def note_failure(self, failure: Failure) -> tuple[Failure, ...]:
        """Notes a failure, of this rank or of one that cannot say it any more.

        Returns:
            All that are known, the first one first.
        """
        if self._store is None:
            return (failure,)
        try:
            number = self._store.add(FAILURES, 1)
            self._store.set(f"failure/{number}", msgspec.json.encode(failure))
        except InputError:
            return (failure,)
        return self.known() or (failure,)

    def first_to(self, what: str) -> bool | None:
        """Tells whether this rank is the first to do something that one has to do.

        Returns:
            None where the store cannot be asked.
        """
        if self._store is None:
            return None
        try:
            return self._store.add(f"first to/{what}", 1) == 1
        except InputError:
            return None

    def host_of(self, rank: int) -> str:
        """Returns the name of a rank's node; empty where it is not known."""
        return self._hosts[rank] if rank < len(self._hosts) else ""

    def phase_of(self, rank: int) -> str:
        """Returns the last phase that a rank made known, and in words where there is none."""
        if self._store is None:
            return _FIRST_PHASE
        key = phase_key(rank)
        try:
            return self._store.get(key).decode() if self._store.check([key]) else _FIRST_PHASE
        except InputError:
            return "a phase that is not known"

    def tell_place(self, place: str) -> None:
        """Makes known where in the code this rank is."""
        if self._store is not None:
            with contextlib.suppress(InputError):
                self._store.set(_place_key(self._rank), place)

    def known(self) -> tuple[Failure, ...]:
        """Returns the failures noted so far; none where the store cannot be asked."""
        store = self._store
        if store is None:
            return ()
        try:
            keys = [f"failure/{n + 1}" for n in range(store.add(FAILURES, 0))]
            # A rank that died between number and text leaves a gap.
            there = keys if not keys or store.check(keys) else [k for k in keys if store.check([k])]
            found = store.multi_get(there) if there else []
        except InputError:
            return ()
        return tuple(msgspec.json.decode(raw, type=Failure) for raw in found)

    def settle(self, watch_interval_s: float) -> tuple[tuple[Failure, ...], tuple[RankPhase, ...]]:
        """Waits a moment for other ranks' failures and signs of life.

        Ends at once when all ranks have noted a failure.

        Args:
            watch_interval_s: Seconds between two signs of life of a rank.

        Returns:
            The failures, the first one first; the last phase of each rank, empty where the
            store cannot be asked.
        """
        world_size = len(self._hosts)
        if self._store is None:
            return (), ()
        before = self._alive()
        deadline = time.monotonic() + 2.5 * watch_interval_s
        while len(failures := self.known()) < world_size and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        after = self._alive()
        failed = {failure.rank: failure for failure in reversed(failures)}
        raw = self._texts([phase_key(rank) for rank in range(world_size)])
        if not any(raw):
            return failures, ()
        places = self._texts([_place_key(rank) for rank in range(world_size)])
        phases = []
        for rank, text in enumerate(raw):
            responds: bool | None = None
            if rank in failed and failed[rank].signal:
                responds = False
            elif rank == self._rank or rank in failed:
                responds = True
            elif before is not None and after is not None:
                responds = after[rank] > before[rank]
            phase = failed[rank].phase if rank in failed else text
            phases.append(RankPhase(rank, self._hosts[rank], phase, responds, places[rank]))
        return failures, tuple(phases)

    def mark_reported(self) -> None:
        """Tells other ranks that the failure is kept and shown."""
        if self._store is not None:
            with contextlib.suppress(InputError):
                self._store.set(_REPORTED, "1")

    def await_report(self, limit_s: float, in_vain: Callable[[], bool] = lambda: False) -> bool:
        """Waits until rank 0 has kept and shown the failure, and not longer than the limit.

        Args:
            limit_s: Seconds.
            in_vain: Tells whether rank 0 cannot report any more.

        Returns:
            Whether it has, as far as is known; true where the store cannot be asked.
        """
        store = self._store
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(InputError):
            while store is not None:
                # Asked first: a report may come just before its rank ends.
                last = in_vain() or time.monotonic() >= deadline
                if store.check([_REPORTED]):
                    return True
                if last:
                    return False
                time.sleep(_PAUSE_S)
        return True

    def _texts(self, keys: Sequence[str]) -> list[str]:
        """Returns the texts of keys; empty where there is none or the store cannot be asked."""
        store = self._store
        if store is None:
            return [""] * len(keys)
        try:
            if store.check(keys):
                return [raw.decode() for raw in store.multi_get(keys)]
            return [store.get(key).decode() if store.check([key]) else "" for key in keys]
        except InputError:
            return [""] * len(keys)

    def _alive(self) -> dict[int, int] | None:
        """Returns each rank's count of signs of life; None where the store cannot be asked."""
        counts: dict[int, int] = {}
        store: Any = self._store
        try:
            keys = [alive_key(rank) for rank in range(len(self._hosts))]
            if store.check(keys):
                return {rank: int(raw) for rank, raw in enumerate(store.multi_get(keys))}
            for rank, key in enumerate(keys):
                counts[rank] = store.add(key, 0)
        except (InputError, ValueError):
            return None
        return counts

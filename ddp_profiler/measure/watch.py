"""A thread that notices when a run is lost: another rank has failed, or the store is out of reach.

It judges nothing by how long a rank takes. A slow rank, a long step or a rank that waits for a
level leave the store as it is, and the store answers from a thread of its own; so only a failure
that a rank has noted, or a store without an answer, ends a run from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ddp_profiler.errors import InputError
from ddp_profiler.measure.bounded import BoundedStore

FAILURES = "failures"
"""Counter of the failures that ranks have noted."""
_RANKS_A_SECOND = 200
_LEAST_INTERVAL_S = 1.0


def alive_key(rank: int) -> str:
    """Returns the key of a rank's sign of life: a counter that moves while it can reach us."""
    return f"alive/{rank}"


class Watch(threading.Thread):
    """Gives a sign of life now and then, and acts when the run is lost.

    Args:
        store: A connection that nobody else uses, or an operation of theirs could hold it up.
        rank: Global rank.
        world_size: Number of ranks.
        limit_s: Seconds without an answer after which the store counts as lost.
        farewell_s: Seconds that this rank may still take once another one has failed.
        on_failure: Told once when a rank has noted a failure.
        on_lost: Told once, and why, when this rank has to be ended.
        tell: Called with each sign of life, to make known what this rank does.
        interval_s: Seconds between two signs; None: 1 s, and more with very many ranks.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        *,
        limit_s: float,
        farewell_s: float,
        on_failure: Callable[[], None],
        on_lost: Callable[[str], None],
        tell: Callable[[], None] = lambda: None,
        interval_s: float | None = None,
    ) -> None:
        super().__init__(daemon=True, name="ddp-profiler-watch")
        self.interval_s = interval_s or max(_LEAST_INTERVAL_S, world_size / _RANKS_A_SECOND)
        self.failed = False
        self._store = store
        self._key = alive_key(rank)
        self._limit_s = limit_s
        self._farewell_s = farewell_s
        self._on_failure = on_failure
        self._on_lost = on_lost
        self._tell_phase = tell
        self._ended = threading.Event()
        self._problem = ""

    def stop(self) -> None:
        """Ends the watch; nothing is reported from here on."""
        self._ended.set()

    def run(self) -> None:
        """Watches until it is stopped or the run is lost."""
        silent_since: float | None = None
        while not self._ended.wait(self.interval_s):
            begin = time.monotonic()
            try:
                failures = self._store.together(self._ask)
            except InputError as error:
                # Counted from the question, not from the last answer: this thread itself may
                # have been held up.
                silent_since = begin if silent_since is None else silent_since
                if time.monotonic() - silent_since >= self._limit_s and not self._ended.is_set():
                    self._on_lost(error.message)
                    return
                continue
            silent_since = None
            if not failures:
                self._tell_phase()
            if failures and not self._ended.is_set():
                self.failed = True
                # On a thread of its own: what is told may block, on a disk for one, or fail, and
                # this rank ends in time all the same.
                threading.Thread(target=self._tell, daemon=True).start()
                left = begin + self._farewell_s - time.monotonic()
                if not self._ended.wait(max(0.0, left)):
                    self._on_lost(
                        "Another rank has failed, and this one did not end by itself."
                        f"{self._problem}"
                    )
                return

    def _ask(self, raw: Any) -> int:
        """Gives the sign of life and returns the number of failures that were noted."""
        raw.add(self._key, 1)
        return int(raw.add(FAILURES, 0))

    def _tell(self) -> None:
        try:
            self._on_failure()
        except Exception as error:
            self._problem = f" Its report failed: {type(error).__name__}: {error}."

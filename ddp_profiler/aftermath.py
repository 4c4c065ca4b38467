"""What a rank does once a run is lost: says so to the others, keeps what is known, and ends.

Every wait here is bounded, since what failed may be the network that the ranks talk over.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from ddp_profiler.errors import EXIT_BAD_INPUT
from ddp_profiler.measure.bounded import NoAnswerError, within
from ddp_profiler.measure.failures import FailureBoard
from ddp_profiler.measure.leave import leave_now
from ddp_profiler.measure.session import Session
from ddp_profiler.measure.study import Phase
from ddp_profiler.report import phases as phase_table
from ddp_profiler.schema import Failure, RankPhase

Keep = Callable[[tuple[Failure, ...], tuple[RankPhase, ...]], None]

_END_S = 12.0
"""From the first word of a failure of its own to the end of the process, at the latest."""
_REPORT_S = 6.0
"""How long a rank stays so that rank 0 can keep and show the failure: when the first rank of a
node ends, its launcher ends the others."""
_WRITE_S = 3.0
_ENDED = (
    "What was measured before is kept: ddp-profiler analyze shows it. Look at the rank that "
    "failed first, and at the link to its node."
)


class Aftermath:
    """The end of a lost run, on one rank.

    Args:
        rank: Global rank.
        keep: Keeps failures and phases in the folder that this rank keeps, if it keeps one.
        say: Shows text to the user.
    """

    def __init__(self, rank: int, keep: Keep, say: Callable[[str], None]) -> None:
        self._rank = rank
        self._keep = keep
        self._say = say
        self._session: Session | None = None
        self._phase = Phase()
        self._noted: tuple[Failure, ...] = ()
        self._main_board: FailureBoard | None = None
        self._report_lock = threading.Lock()
        self._reported = False

    def begin(self, session: Session, phase: Phase) -> None:
        """Begins to watch over a run whose ranks have met."""
        self._session = session
        self._phase = phase
        phase.on_change = session.tell_phase
        session.tell_phase(phase.name)
        session.watch(self._another_failed, self._lost)

    @property
    def met(self) -> bool:
        """Whether ranks have met."""
        return self._session is not None

    def note(self, phase: str, message: str) -> Failure:
        """Tells the others that this rank has failed; returns the failure that came first.

        From here on the process ends soon, whatever hangs.
        """
        end = threading.Timer(_END_S, leave_now, args=(EXIT_BAD_INPUT,))
        end.daemon = True
        end.start()
        self._noted = (Failure(self._rank, phase, message, socket.gethostname()),)
        # Before the store is asked, which may take a while where it is what failed.
        if not self._reported:  # Else the watch's thread has kept more than this.
            self._keep_in_time(self._noted)
        self._main_board = self._board()
        self._noted = self._main_board.note(phase, message)
        return self._noted[0]

    def finish(self) -> None:
        """Keeps the failure, and shows it on rank 0; the others give it the time for that."""
        if self._rank == 0:
            self._report()
            return
        self._keep_in_time(self._noted)
        if self._main_board is not None:
            self._main_board.await_report(_REPORT_S)

    def keep_now(self) -> None:
        """Keeps what is known, without asking others or showing a table."""
        with self._report_lock:
            if not self._reported:
                self._reported = True
                self._keep_in_time(self._noted)

    def _keep_in_time(
        self, failures: tuple[Failure, ...], phases: tuple[RankPhase, ...] = ()
    ) -> None:
        """Keeps failures, unless the disk does not answer or another thread hangs in writing."""
        with contextlib.suppress(NoAnswerError):
            within(_WRITE_S, lambda: self._keep(failures, phases))

    def _board(self) -> FailureBoard:
        if self._session is None:
            return FailureBoard(None, self._rank, [socket.gethostname()] * (self._rank + 1))
        return self._session.failure_board()

    def _report(self) -> None:
        with self._report_lock:
            if self._reported:
                return
            self._reported = True
            # The watch's thread may come first, while the main thread hangs.
            board = self._main_board or self._board()
            # At once, for a launcher that ends all ranks when one of them has ended.
            self._keep_in_time(board.known() or self._noted)
            if self._session is None:
                return
            failures, phases = board.settle(self._session.watch_interval_s)
            failures = failures or self._noted
            self._keep_in_time(failures, phases)
            if failures and phase_table.tells_more(failures, phases):
                self._say("what each rank was doing:\n" + phase_table.render(failures, phases))
            board.mark_reported()

    def _another_failed(self) -> None:
        if self._rank == 0:
            self._report()
        else:
            board = self._main_board or self._board()
            self._keep_in_time(board.known() or self._noted)

    def _lost(self, reason: str) -> None:
        """Ends this process, on a thread of the watch."""
        if self._noted:
            # The main thread has failed too, says so, and is ended in time if it hangs.
            return
        host = socket.gethostname()
        failure = Failure(self._rank, self._phase.name, reason, host)
        if not self._reported:
            self._keep_in_time((failure,))
        self._say(
            f"rank {self._rank} on {host} was ended in {self._phase.name}: {reason}\n{_ENDED}"
        )
        leave_now(EXIT_BAD_INPUT)

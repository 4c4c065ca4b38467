"""What a rank does once a run is lost: says so to the others, keeps what is known, and ends.

Every wait here is bounded, since what failed may be the network that the ranks talk over.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ddp_profiler.errors import EXIT_BAD_INPUT
from ddp_profiler.measure.bounded import NoAnswerError, within
from ddp_profiler.measure.failures import FailureBoard
from ddp_profiler.measure.leave import leave_now
from ddp_profiler.measure.session import Session
from ddp_profiler.measure.siblings import SiblingEnd, Siblings
from ddp_profiler.measure.signals import end_by
from ddp_profiler.measure.study import Phase
from ddp_profiler.report import phases as phase_table
from ddp_profiler.schema import Failure, RankPhase

Keep = Callable[[tuple[Failure, ...], tuple[RankPhase, ...]], None]

_END_S = 12.0
"""From the first word of a failure of its own to the end of the process, at the latest."""
_REPORT_S = 6.0
"""How long a rank stays so that rank 0 can keep and show the failure: when the first rank of a
node ends, its launcher ends the others."""
_PARK_S = 20.0
"""A main thread that is kept ends the process at last, if whoever was to do it did not."""
_WRITE_S = 3.0
_SHOW_S = 5.0
"""What rank 0 may take to show what was measured, once it was told to end."""
LINGER_S = 30.0
"""A rank that is still there so long after rank 0 is through hangs."""
_LAUNCHER_S = 0.5
"""A rank whose peer is gone, or that is told to end, waits this long for the news of a death."""
_CONSEQUENCE = re.compile(
    "timed out|time-out|timeout after|closed by peer|reset by peer|connection closed|"
    "broken pipe|socket closed|nothing moved|another rank has failed|connection was",
    re.IGNORECASE,
)
"""What a rank meets when another one is gone or hangs."""
_KILLED = (
    "SIGKILL mostly comes from the system when memory is used up (dmesg names it), or from a batch "
    "system that ends the job."
)
_NO_MEMORY = (
    "Give the job more memory, or let ranks need less: a smaller --micro-batch, fewer workers that "
    "load data, fewer ranks on a node."
)
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
        siblings: Notices ranks of this node that die.
        stand_in: Has this rank keep the run folder, in the place of rank 0 that is dead.
        clean: Removes what a process left half written in the folder.
        show: Shows what was measured, on rank 0, and how to see it again.
        report_s: How long rank 0 may take over its report, for which another rank waits.
    """

    def __init__(
        self,
        rank: int,
        keep: Keep,
        say: Callable[[str], None],
        *,
        siblings: Siblings | None = None,
        stand_in: Callable[[], None] = lambda: None,
        clean: Callable[[int], None] = lambda _: None,
        show: Callable[[], None] = lambda: None,
        report_s: float = 60.0,
    ) -> None:
        self._rank = rank
        self._keep = keep
        self._say = say
        self._siblings = siblings or Siblings(rank, 0)
        self._stand_in = stand_in
        self._clean = clean
        self._show = show
        self._report_s = report_s
        self._lock = threading.Lock()
        self._taken = False
        self._main_ends = False
        self._told_late = False
        self._closed = False
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
        session.watch(self._another_failed, self._lost, phase.tell)

    @property
    def met(self) -> bool:
        """Whether ranks have met."""
        return self._session is not None

    def note(self, phase: str, message: str) -> Failure:
        """Tells the others that this rank has failed; returns the failure that came first.

        From here on the process ends soon, whatever hangs. Where what failed is the consequence of
        another rank's death, this rank's own error is not told, and another thread ends it.
        """
        if _CONSEQUENCE.search(message):
            end = self._siblings.ended(_LAUNCHER_S)
            if end is not None:
                # Whichever thread is first.
                self.sibling_ended(end)
        if not self._take():
            self.park()
        self._begin_to_end()
        if _CONSEQUENCE.search(message):
            self._note_stopped()
        self._noted = (Failure(self._rank, phase, message, socket.gethostname()),)
        # Before the store is asked, which may take a while where it is what failed.
        if not self._reported:  # Else the watch's thread has kept more than this.
            self._keep_in_time(self._noted)
        self._main_board = self._board()
        self._noted = self._main_board.note(phase, message)
        return self._noted[0]

    def close(self) -> None:
        """Is told that all is measured and written: what others do is no failure any more."""
        self._closed = True
        self._siblings.mute()
        if self._taken:
            self.park()

    def hold(self) -> None:
        """Keeps the main thread, unless it is what ends this process."""
        if not self._main_ends:
            self.park()

    def park(self) -> NoReturn:
        """Leaves the end of this process to another thread, which has begun it."""
        while True:
            threading.Event().wait(_PARK_S)
            leave_now(EXIT_BAD_INPUT)

    def sibling_ended(self, end: SiblingEnd) -> None:
        """Is told, on a thread, that another rank of this node has ended before the run has."""
        if end.code == 0:
            self._end_after(end.rank)
        if end.code == 0 or self._closed:
            return
        alone = self._siblings.launcher_is_gone
        if not end.signal and (alone or self._tells_itself() or self._taken):
            # It has said why, and so has whoever waits for it.
            return
        if not self._take():
            return
        self._begin_to_end()
        board = self._main_board = self._board()
        if any(failure.rank == end.rank for failure in board.known()):
            # It has told by itself, and rank 0 shows it.
            self._noted = board.known()
            if self._rank == 0:
                self._report()
            self._leave(EXIT_BAD_INPUT)
        speaks = board.first_to(f"tell the end of rank {end.rank}")
        if speaks is None:
            speaks = self._siblings.is_lowest_left()
        phase = board.phase_of(end.rank)
        host = board.host_of(end.rank) or socket.gethostname()
        failure = Failure(end.rank, phase, end.words, host, end.signal)
        self._noted = (failure,)
        if speaks:
            self._noted = board.note_failure(failure)
            lines = [f"rank {end.rank} on {host} {end.words} in {phase}."]
            if end.memory:
                lines.append(_NO_MEMORY)
            elif end.signal == "SIGKILL":
                lines.append(_KILLED)
            self._say("\n".join(lines))
        if end.rank == 0 and speaks:
            self._stand_in()
        self._clean(end.pid)
        if self._rank == 0 or (end.rank == 0 and speaks):
            self._report()
        else:
            self._keep_in_time(self._noted)
            self._await_report(board)
        self._leave(EXIT_BAD_INPUT)

    def _end_after(self, rank: int) -> None:
        """Ends this process some time after another rank is through, whatever hangs in it.

        Ranks are through once all is measured and written. One that then hangs, over the end of
        its process group for one, would be waited for by its launcher without end.
        """
        if self._rank == 0:
            # Over its report, which may take long; another rank looks after it.
            return
        limit_s = LINGER_S if rank == 0 else self._report_s + LINGER_S

        def end() -> None:
            host = socket.gethostname()
            self._say(
                f"rank {self._rank} on {host} hangs in {self._phase.at}: it did not end within "
                f"{limit_s:g} s of rank {rank}. All is measured and kept."
            )
            self._leave(EXIT_BAD_INPUT)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()

    def told_to_end(self, number: signal.Signals) -> None:
        """Is told, on a thread, that this process was sent a signal that asks it to end."""
        end = self._siblings.ended(0.0 if self._closed else _LAUNCHER_S)
        if end is not None and end.code != 0:
            # The launcher ends those that are left; the death is being told.
            self.sibling_ended(end)
        if not self._take():
            return
        self._begin_to_end()
        if self._closed:
            if end is not None and end.signal:
                if end.rank == 0:
                    self.tell_late(end.pid, end.words)
                else:
                    phase = self._board().phase_of(end.rank) or "closing"
                    self.tell_late(end.pid, end.words, end.rank, phase)
                self._leave(EXIT_BAD_INPUT)
            self._say(f"told to end ({number.name}) in {self._phase.at}; all is measured and kept.")
            self._clean_own()
            end_by(number)
        board = self._main_board = self._board()
        known = board.known()
        if not known:
            host = socket.gethostname()
            message = f"was told to end ({number.name})"
            failure = Failure(self._rank, self._phase.at, message, host, number.name)
            self._noted = (failure,)
            self._keep_in_time(self._noted)
            if board.first_to("tell a signal") is not False:
                self._say(f"rank {self._rank} on {host} {message} in {self._phase.at}.")
            self._noted = board.note_failure(failure)
        if self._rank == 0:
            self._report()
            with contextlib.suppress(NoAnswerError, Exception):
                within(_SHOW_S, self._show)
        else:
            self._keep_in_time(self._noted or known)
            self._await_report(board)
        self._siblings.resume_stopped()
        self._clean_own()
        end_by(number)

    def tell_late(
        self, pid: int, words: str, rank: int = 0, phase: str = "writing the report"
    ) -> None:
        """Tells that a rank was lost after all was measured, mostly rank 0 over its report."""
        with self._lock:
            first, self._told_late = not self._told_late, True
        if first:
            self._clean(pid)
            self._say(
                f"rank {rank} {words} in {phase}. All is measured and kept; ddp-profiler report "
                "writes the report again."
            )

    def _tells_itself(self) -> bool:
        """Tells whether a rank has noted a failure, or does so in a moment."""
        if self._session is None:
            return False
        board = self._board()
        for _ in range(3):
            if board.known():
                return True
            threading.Event().wait(_LAUNCHER_S / 3)
        return False

    def _note_stopped(self) -> None:
        """Notes ranks of this node that were stopped: for these, this rank has waited."""
        for rank, pid in self._siblings.stopped().items():
            board = self._board()
            if board.first_to(f"tell the end of rank {rank}") is not True:
                continue
            words, host = f"was stopped and did not go on (process {pid})", board.host_of(rank)
            phase = board.phase_of(rank)
            board.note_failure(Failure(rank, phase, words, host, "SIGSTOP"))
            self._say(f"rank {rank} on {host} {words} in {phase}.")

    def _take(self) -> bool:
        """Tells whether the end of this process is the caller's to bring about."""
        with self._lock:
            taken, self._taken = self._taken, True
            if not taken:
                self._main_ends = threading.current_thread() is threading.main_thread()
            return not taken

    def _begin_to_end(self) -> None:
        end = threading.Timer(_END_S, self._leave, args=(EXIT_BAD_INPUT,))
        end.daemon = True
        end.start()

    def _leave(self, code: int) -> None:
        self._siblings.resume_stopped()
        self._clean_own()
        leave_now(code)

    def _clean_own(self) -> None:
        """Removes what this process leaves half written, unless the disk does not answer."""
        with contextlib.suppress(NoAnswerError):
            within(_WRITE_S, lambda: self._clean(os.getpid()))

    def finish(self) -> None:
        """Keeps the failure, and shows it on rank 0; the others give it the time for that."""
        if self._rank == 0:
            self._report()
            self._siblings.resume_stopped()
            return
        self._keep_in_time(self._noted)
        if self._main_board is not None:
            self._await_report(self._main_board)
        self._siblings.resume_stopped()

    def _await_report(self, board: FailureBoard) -> None:
        """Gives rank 0 the time to keep and show the failure; takes its place if it dies too."""

        def is_lost() -> bool:
            end = self._siblings.await_end(0, 0.0)
            return end is not None and end.code != 0

        if board.await_report(_REPORT_S, is_lost) or not is_lost():
            return
        if self._siblings.is_lowest_left():
            self._stand_in()
            self._report()

    def cause_of(self, message: str) -> str:
        """Returns what is behind an error of this rank; the error where nothing is known of it.

        The launcher holds the store that ranks talk through.
        """
        if self._siblings.launcher_is_gone and _CONSEQUENCE.search(message):
            return f"the launcher (process {self._siblings.launcher}) has died"
        return message

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
        board = self._main_board or self._board()
        board.tell_place(place_in_code())
        if self._rank == 0:
            self._report()
        else:
            self._keep_in_time(board.known() or self._noted)

    def _lost(self, reason: str) -> None:
        """Ends this process, on a thread of the watch."""
        if self._noted:
            # The main thread has failed too, says so, and is ended in time if it hangs.
            return
        host = socket.gethostname()
        reason = self.cause_of(reason)
        failure = Failure(self._rank, self._phase.at, reason, host)
        if not self._reported:
            self._keep_in_time((failure,))
        self._say(f"rank {self._rank} on {host} was ended in {self._phase.at}: {reason}\n{_ENDED}")
        leave_now(EXIT_BAD_INPUT)


def place_in_code() -> str:
    """Says where the main thread is: the file, line and function that called into torch."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path == Path(__file__):
            # It has noticed by itself, and waits for its end.
            return ""
        if not {"torch", "threading.py", "selectors.py"} & set(path.parts):
            return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""

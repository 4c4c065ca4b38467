"""Notices at once when another rank of this node has died, and of what.

A rank that is killed says nothing. Its launcher learns of it, and ends the others within a tenth
of a second; what they saw until then is a closed connection, which names nobody. So each rank
waits, on a thread that sleeps in the kernel, for the end of the other processes that its launcher
has started, and reads how they ended before the launcher takes that away.

Linux only; elsewhere nothing is noticed here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_profiler.measure.out_of_memory import MemoryKills

_SAME_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_LOOK_AGAIN_MS = 200
_LOOK_FOR_S = 30.0
_STOPPED = "T"
_EXIT_FIELD = 49
_INFO_BYTES = 64
_INFO_EXIT = 1 << 3
_GET_INFO = 0xC000FF0B | _INFO_BYTES << 16
"""PIDFD_GET_INFO with the first version of ``struct pidfd_info``, of which exit_code is last."""


@dataclass(frozen=True)
class SiblingEnd:
    """How another rank of this node ended.

    Attributes:
        rank: Global rank.
        pid: Its process.
        code: Exit code; below 0 the negative number of the signal; None where it is not known.
        memory: What the kernel has counted of kills for lack of memory, in words; may be empty.
    """

    rank: int
    pid: int
    code: int | None
    memory: str = ""

    @property
    def signal(self) -> str:
        """Name of the signal that ended it; empty where none did or it is not known."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def words(self) -> str:
        """What happened to it, to follow the rank's name."""
        if self.signal:
            memory = f", {self.memory}" if self.memory else ""
            return f"was killed by {self.signal} (process {self.pid}){memory}"
        if self.code is None:
            return f"has died (process {self.pid}; its launcher tells of what)"
        return f"ended with exit code {self.code} (process {self.pid})"


class Siblings(threading.Thread):
    """Waits for the ends of the other ranks that this rank's launcher has started.

    Args:
        rank: Global rank of this process.
        expected: How many others there are on this node.
        environ: Environment variables of this process.
    """

    def __init__(self, rank: int, expected: int, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(daemon=True, name="ddp-profiler-siblings")
        self._rank = rank
        self._expected = expected
        self._environ = dict(environ)
        self._pids: dict[int, int] = {}
        self._ends: dict[int, SiblingEnd] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._on_end: Callable[[SiblingEnd], None] = lambda _: None
        self._muted = False
        self._wake = -1
        self._parent = os.getppid()
        self._memory = MemoryKills()

    @property
    def launcher(self) -> int:
        """Process of the launcher."""
        return self._parent

    @property
    def launcher_is_gone(self) -> bool:
        """Whether the launcher has died; who has lost its parent gets another one."""
        return os.getppid() != self._parent

    def begin(self) -> None:
        """Starts to watch, where this system can and there is somebody to watch."""
        if self._expected > 0 and hasattr(os, "pidfd_open") and Path("/proc/self/stat").exists():
            self._end, self._wake = os.pipe()
            self.start()

    def listen(self, on_end: Callable[[SiblingEnd], None]) -> None:
        """Has ends told to a function from now on, and those that came before at once."""
        with self._lock:
            self._on_end = on_end
            before = tuple(self._ends.values())
        for end in before:
            on_end(end)

    def mute(self) -> None:
        """Tells of no failure any more: what others do from here on does not matter."""
        self._muted = True

    def stop(self) -> None:
        """Ends the watch and its thread."""
        self.mute()
        with self._lock:
            if self._wake >= 0:
                os.write(self._wake, b".")
                os.close(self._wake)
                self._wake = -1

    def ended(self, wait_s: float = 0.0) -> SiblingEnd | None:
        """Returns the first end that was no success, and waits a moment for one."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                for end in self._ends.values():
                    if end.code != 0:
                        return end
                left = deadline - time.monotonic()
                if left <= 0 or not self._pids:
                    return next(iter(self._ends.values()), None)
                self._changed.wait(left)

    def stopped(self) -> dict[int, int]:
        """Returns the processes of ranks that were stopped and have not gone on, by rank."""
        with self._lock:
            pids = {rank: pid for rank, pid in self._pids.items() if rank not in self._ends}
        return {rank: pid for rank, pid in pids.items() if _state(pid) == _STOPPED}

    def resume_stopped(self) -> None:
        """Has stopped ranks go on, so that they notice that the run is lost, and end."""
        for pid in self.stopped().values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def is_lowest_left(self, above: int = 0) -> bool:
        """Tells whether no rank from ``above`` on and below this one is left on this node."""
        with self._lock:
            return not any(above <= r < self._rank and r not in self._ends for r in self._pids)

    def await_end(self, rank: int, limit_s: float) -> SiblingEnd | None:
        """Waits until a rank of this node has ended; None if it does not, or is not here."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while rank in self._pids and rank not in self._ends:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._ends.get(rank)

    def running(self, rank: int) -> int | None:
        """Returns the process of a rank of this node that has not ended; None if there is none."""
        with self._changed:
            return None if rank in self._ends else self._pids.get(rank)

    def run(self) -> None:
        """Watches until the process ends."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        handles: dict[int, int] = {}
        give_up = time.monotonic() + _LOOK_FOR_S
        while True:
            if len(self._pids) < self._expected and time.monotonic() < give_up:
                for rank, pid in self._look().items():
                    if rank in self._pids:
                        continue
                    try:
                        handle = os.pidfd_open(pid)
                    except OSError:
                        continue
                    with self._lock:
                        self._pids[rank] = pid
                    handles[handle] = rank
                    poll.register(handle, select.POLLIN)
            looking = len(self._pids) < self._expected and time.monotonic() < give_up
            for handle, _ in poll.poll(_LOOK_AGAIN_MS if looking else None):
                if handle == self._end:
                    for left in (*handles, self._end):
                        os.close(left)
                    return
                rank = handles.pop(handle)
                pid = self._pids[rank]
                code = _exit_code(pid, handle)
                killed = code == -signal.SIGKILL
                end = SiblingEnd(rank, pid, code, self._memory.words() if killed else "")
                poll.unregister(handle)
                os.close(handle)
                with self._changed:
                    self._ends[rank] = end
                    self._changed.notify_all()
                    tell = self._on_end
                # That another one is through is told all the same: this rank should be as well.
                if not self._muted or code == 0:
                    # On a thread of its own: who is told may wait, and others may end meanwhile.
                    threading.Thread(target=tell, args=(end,), daemon=True).start()

    def _look(self) -> dict[int, int]:
        """Returns the processes of this launch that have this one's parent, by rank."""
        found: dict[int, int] = {}
        with contextlib.suppress(psutil.Error, OSError):
            for process in psutil.Process(self._parent).children():
                with contextlib.suppress(psutil.Error, OSError, ValueError):
                    environ = process.environ()
                    same = all(environ.get(k) == self._environ.get(k) for k in _SAME_LAUNCH)
                    rank = int(environ.get("RANK", ""))
                    if same and rank != self._rank and process.pid != os.getpid():
                        found[rank] = process.pid
        return found


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on: what is before may hold blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _exit_code(pid: int, handle: int) -> int | None:
    """Returns how a process ended; None where neither /proc nor the kernel's handle says it.

    /proc does until its parent has asked for it, which is not for long; Linux 6.15 and later
    keep it with the handle.
    """
    fields = _stat(pid)
    try:
        # Field 52 of all.
        if len(fields) > _EXIT_FIELD and fields[0] in ("Z", "X"):
            return os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
        answer = fcntl.ioctl(
            handle, _GET_INFO, struct.pack("Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0")
        )
        mask, code = struct.unpack_from("Q", answer)[0], struct.unpack_from("i", answer, 60)[0]
        return os.waitstatus_to_exitcode(code) if mask & _INFO_EXIT else None
    except (OSError, ValueError):
        return None

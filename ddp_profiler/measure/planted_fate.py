"""Carries out what is planted to become of a rank, for tests: killed, stopped, failed, looping.

What comes is real: a signal to the process, an exception on its main thread between two
instructions, as one in a model's own code, memory taken until the kernel ends the process. It is
not noticed by anything else here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from ddp_profiler.errors import UsageError
from ddp_profiler.measure.out_of_memory import limit_bytes
from ddp_profiler.workload.plant import PlantedFate

_ON_MAIN_THREAD = signal.SIGUSR1
_AT_ONCE_BYTES = 64 << 20
_SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP}


class Fates:
    """Waits for the phases in which something is planted for this rank.

    Args:
        planted: All that is planted.
        rank: Global rank of this process.
        environ: Environment variables.

    Raises:
        UsageError: Memory is to be filled, and no limit keeps that from the rest of the host.
    """

    def __init__(
        self, planted: Sequence[object], rank: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        # A launch that is tried again is to get through.
        first = environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        mine = [p for p in planted if isinstance(p, PlantedFate) and p.rank == rank]
        self._open = mine if first else []
        if any(p.fate == "fill" for p in self._open):
            limit = limit_bytes()
            if limit is None or limit >= psutil.virtual_memory().total:
                raise UsageError(
                    "fate=fill takes memory until the system ends the rank, and nothing limits it.",
                    "Start the launch in a memory cgroup with a limit.",
                )
        if self._open:
            signal.signal(_ON_MAIN_THREAD, self._on_main_thread)
        self._fate = ""
        self._phase = ""

    def phase_begins(self, phase: str) -> None:
        """Is told each phase of this rank."""
        self._phase = phase
        for planted in [p for p in self._open if p.phase.lower() in phase.lower()]:
            self._open.remove(planted)
            if planted.after_ms:
                timer = threading.Timer(planted.after_ms / 1000, self._carry_out, [planted])
                timer.daemon = True
                timer.start()
            else:
                self._carry_out(planted)

    def _carry_out(self, planted: PlantedFate) -> None:
        if planted.note:
            Path(planted.note).write_text(self._phase)
        fate = planted.fate
        if fate in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fate])
            return
        if fate == "fill":
            taken = []
            while True:
                # Written to, so that it is really taken.
                taken.append(b"x" * _AT_ONCE_BYTES)
        self._fate = fate
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _ON_MAIN_THREAD)

    def _on_main_thread(self, _number: int, _frame: FrameType | None) -> None:
        if self._fate == "raise":
            raise ValueError("planted exception")
        if self._fate == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: planted")
        while True:
            time.sleep(0.01)

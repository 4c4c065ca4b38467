"""Hears SIGINT, SIGTERM and SIGHUP at once, whatever the main thread does.

Python runs a signal's handler on the main thread between two of its own instructions. A rank that
waits in a collective for a rank that is gone gets to none, and its launcher kills it after 30 s
without a word. The interpreter's wake-up descriptor is written to in the signal itself; a thread
reads it and ends the rank in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ddp_profiler.errors import EXIT_INTERRUPTED
from ddp_profiler.measure.leave import leave_now

HEARD = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""SIGHUP comes when a terminal or a connection closes; the launcher passes it on."""


class SignalWatch(threading.Thread):
    """Tells a function, on a thread of its own, which signal came first.

    A second signal ends the process at once.

    Args:
        on_signal: Is told the first signal.
        hold: Called on the main thread, once that runs instructions of Python again; may keep it
            for good, so that it does nothing more while the process ends.
    """

    def __init__(
        self, on_signal: Callable[[signal.Signals], None], hold: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True, name="ddp-profiler-signals")
        self._on_signal = on_signal
        self._hold = hold
        self._before: dict[signal.Signals, Any] = {}
        self._read, self._write = -1, -1

    def install(self) -> None:
        """Hears from now on; does nothing beside the main thread, where signals cannot be had."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in HEARD:
            if (
                number == getattr(signal, "SIGHUP", None)
                and signal.getsignal(number) == signal.SIG_IGN
            ):
                # As nohup has it: the run is to go on.
                continue
            # Without a handler of Python nothing is written. The thread does the work.
            self._before[number] = signal.signal(number, lambda *_: self._hold())
        # A process that is forked is not this rank, and shares the pipe.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.restore)
        self.start()

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        before, self._before = self._before, {}
        if not before:
            return
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        """Waits for signals."""
        first: signal.Signals | None = None
        while True:
            try:
                came = os.read(self._read, 64)
            except OSError:
                return
            for byte in came:
                if byte not in HEARD:
                    continue
                number = signal.Signals(byte)
                if first is None:
                    first = number
                    threading.Thread(target=self._on_signal, args=(number,), daemon=True).start()
                elif number is signal.SIGINT:
                    # Whoever presses Ctrl-C twice wants no report.
                    leave_now(EXIT_INTERRUPTED)


def end_by(number: signal.Signals) -> NoReturn:
    """Ends the process by a signal, as if nobody had caught it; from any thread."""
    if number is signal.SIGINT:
        # As a shell reports it. Torchrun shows the number.
        leave_now(EXIT_INTERRUPTED)
    with contextlib.suppress(Exception):
        # Python gives handlers back on its main thread only, which may hang.
        ctypes.CDLL(None).signal(int(number), None)
        os.kill(os.getpid(), number)
        threading.Event().wait(1.0)
    leave_now(128 + number)

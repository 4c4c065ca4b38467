"""Ends a worker so that its exit code is its own.

Backends complete collectives on threads of theirs. Where such a thread calls back
into Python while the interpreter shuts down, the C++ runtime aborts the process and
the exit code becomes 134; gloo's do so where they let go of the last backward's work
late (pytorch#190489), also after a good end. A worker therefore runs what Python
runs at exit, closes the files that are still open, as tearing the interpreter down
would, and then leaves without that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import gzip
import io
import os
import signal
import sys
import threading
from typing import NoReturn

from ddp_profiler.measure.bounded import NoAnswerError, within

_FLUSH_S = 1.0
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")


def leave(code: int) -> NoReturn:
    """Runs the exit handlers, flushes the streams and ends the process with ``code``.

    Non-daemon threads are waited for, as at a normal exit.
    """
    _run_exit_handlers()
    leave_now(code)


def leave_by(number: signal.Signals) -> NoReturn:
    """Runs the exit handlers and ends the process by a signal, as if nobody had caught it."""
    _run_exit_handlers()
    _flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    leave_now(128 + number)


def leave_now(code: int) -> NoReturn:
    """Flushes the streams and ends the process with ``code``, whatever its threads do."""
    try:
        # A pipe that nobody reads any more would hold this up for ever.
        within(_FLUSH_S, _flush)
    except NoAnswerError:
        pass
    except RuntimeError:  # No thread can be started any more.
        _flush()
    os._exit(code)


def _run_exit_handlers() -> None:
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()


def _flush() -> None:
    """Writes what files still hold back. A process that ends by itself closes them all."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    kept = {id(getattr(sys, name, None)) for name in _STREAMS}
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]
    # Text into what packs it, then what writes through others, the plain files last.
    for file in files:
        if issubclass(type(file), io.TextIOBase):
            with contextlib.suppress(Exception):
                file.flush()
    for kind in (gzip.GzipFile, io.TextIOBase, io.BufferedIOBase):
        for file in files:
            if issubclass(type(file), kind) and id(file) not in kept:
                with contextlib.suppress(Exception):
                    file.flush() if _is_standard(file) else file.close()


def _is_standard(file: io.IOBase) -> bool:
    """Tells whether a file is one of the process's own streams, which stay open to the end."""
    return not file.closed and file.fileno() in (0, 1, 2)

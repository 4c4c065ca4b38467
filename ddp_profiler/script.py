"""Runs a training script that knows nothing of us, under observation.

The script is run as ``python SCRIPT ARGS`` would run it: its arguments in ``sys.argv``, its
folder first on ``sys.path``, as the module ``__main__`` until the process ends. What it prints
stays alone on stdout, ours goes to stderr; its exit code is passed through.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType

from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import EXIT_DONE
from ddp_profiler.measure.leave import leave, leave_by
from ddp_profiler.measure.topology import Topology
from ddp_profiler.observe.observation import Observation, failure_of


class ScriptRun:
    """A script under observation on one rank.

    Args:
        config: The settings, with a script.
        topology: This rank's place.
        say: Shows a line to the user.
        show: Shows, on rank 0, what a run folder holds.
    """

    def __init__(
        self,
        config: ScriptConfig,
        topology: Topology,
        say: Callable[[str], None],
        show: Callable[[Path], None],
    ) -> None:
        script = config.script or ""
        self._config = config
        self._script = script
        self._observation = Observation(
            config, topology, say, show, name=script if config.module else Path(script).stem
        )

    def prepare(self) -> None:
        """Meets the other ranks, claims the run folder and looks out for models.

        Raises:
            DdpProfilerError: The folder is taken, or other ranks did not come.
        """
        self._observation.begin()

    def run(self) -> int:
        """Runs the script and returns its exit code; mostly it ends this process as well."""
        try:
            self._execute()
        except SystemExit as end:
            self._observation.finish(failure_of(end))
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return self._end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except KeyboardInterrupt as error:
            self._observation.finish(failure_of(error))
            _show_error(error)
            leave_by(signal.SIGINT)
        except BaseException as error:
            self._observation.finish(failure_of(error))
            _show_error(error)
            # Not by raising it: completions that are still out could abort the interpreter's end.
            leave(1)
        self._observation.finish(None)
        return self._end(EXIT_DONE)

    def _end(self, code: int) -> int:
        """Ends the process with the script's code, where it was observed.

        Without tearing the interpreter down: a thread of gloo that lets go of what it took along
        from Python just then would abort the process (exit code -6, seen in 1 of 40 runs).
        """
        if self._observation.built and not self._observation.in_child:
            leave(code & 0xFF)
        return code

    def _execute(self) -> None:
        """Runs the script or module as ``python`` would."""
        script = self._script
        sys.argv = [script, *self._config.arguments]
        # What ours holds is in use; the script's stays there for what runs at exit.
        self._own_main = sys.modules["__main__"]
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if self._config.module:
            # As for `python -m`, the working folder is the first on the path already.
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
            return
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(script).resolve().parent)
        if pkgutil.get_importer(script) is not None or script.endswith(".pyc"):
            # A folder or an archive with a __main__.py in it, or code without its source.
            runpy.run_path(script, run_name="__main__")
            return
        path = os.path.abspath(script)  # noqa: PTH100 (as Python does it: links stay)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
        exec(code, main.__dict__)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the script's own first frame on."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    return trace


def _show_error(error: BaseException) -> None:
    """Shows an exception as Python would."""
    shown = error.with_traceback(_own_frames(error.__traceback__))
    sys.excepthook(type(shown), shown, shown.__traceback__)

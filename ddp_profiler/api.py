"""A line in a program or a notebook, for those who do not start it through ``ddp_profiler.run``.

::

    with ddp_profiler.profile(steps=20) as run:
        train()
    print(run.report())

or ``ddp_profiler.attach()`` before training, and nothing else: what is observed, and what stays
as it was, is that of a script, see docs/scripts.md.
"""

from __future__ import annotations

import inspect
import multiprocessing.util
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_profiler import units
from ddp_profiler.analysis.results import Summary
from ddp_profiler.conclusion import check_expectation, conclude
from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import DdpProfilerError, UsageError
from ddp_profiler.load import load_summary
from ddp_profiler.measure.scripts.default_group import find_place
from ddp_profiler.naming import options_as_arguments
from ddp_profiler.observe.observation import Observation, failure_of
from ddp_profiler.record import paths
from ddp_profiler.report import console
from ddp_profiler.report.text import for_encoding

NAME = "ddp_profiler"


class Profiling:
    """Training of this process under observation; made by :func:`profile` and :func:`attach`.

    As a context manager it begins and ends with the block. An exception passes through, and the
    run is kept as failed.

    Attributes:
        folder: The run folder, from the begin on; the same on all ranks.
    """

    def __init__(self, config: ScriptConfig, name: str, *, show: bool) -> None:
        self.folder: Path | None = None
        self._config = config
        self._name = name
        self._show = show
        self._observation: Observation | None = None
        self._begun = False
        self._ended = False
        self._rank = 0
        self._summary: Summary | None = None
        self._at_exit: Any = None
        self._old_error: BaseException | None = None

    def __enter__(self) -> Profiling:
        """Begins to observe."""
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it; an exception passes through."""
        self._end(failure_of(error))

    @property
    def summary(self) -> Summary | None:
        """All figures, on rank 0; None on other ranks, and where no step was recorded.

        May be asked for as soon as a window is over, also while training goes on.
        """
        if self._rank == 0 and self._summary is None and self.folder is not None:
            if not paths.rank_files(self.folder):
                # Nothing that trains was seen, so far or at all.
                return None
            summary = load_summary(self.folder)
            if not summary.levels:
                return None
            if not self._ended:
                return summary
            self._summary = summary
        return self._summary

    def report(self) -> str:
        """Returns the table as text; where there is none to show, one line that says so."""
        summary = self.summary
        if summary is None:
            why = "no step was recorded" if self._rank == 0 else "rank 0 shows it"
            return f"Nothing to show on rank {self._rank}: {why}. Run folder: {self.folder}"
        return f"{console.render(summary)}Run folder: {self.folder}"

    def detach(self) -> Profiling:
        """Ends observing: everything is taken out, the record ends, and rank 0 shows it.

        Twice is once. Training may go on.
        """
        self._end(None)
        return self

    def _begin(self) -> None:
        if self._begun:
            raise UsageError("This has been used already.", "Call profile() or attach() again.")
        current = Observation.current
        if current is not None and not current.observes_a_script:
            raise UsageError(
                "This process is observed already.",
                "End that first: leave its block, or call ddp_profiler.detach().",
            )
        try:
            topology, store = find_place()
            self._rank = topology.rank
            if current is not None:
                self._begun, self.folder = True, current.folder
                if self._rank == 0:
                    self._say("ddp_profiler.run observes this script; the line in it does nothing.")
                return
            observation = Observation(
                self._config, topology, self._say, self._conclude, name=self._name, store=store
            )
            observation.begin()
        except DdpProfilerError as error:
            raise _in_python(error) from None
        self._begun, self._observation, self.folder = True, observation, observation.folder

    def _end(self, failure: str | None) -> None:
        global _attached
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        if _attached is self:
            _attached = None
        if self._observation is not None and not self._ended:
            self._ended = True
            self._observation.finish(failure)
            self._observation = None

    def _end_with_the_process(self) -> None:
        """Has the record end when the process does, if nobody ends it before."""
        self._old_error = _last_error()
        # Not atexit: processes of multiprocessing end without it.
        self._at_exit = multiprocessing.util.Finalize(None, _end_at_exit, (self,), exitpriority=1)

    def _conclude(self, folder: Path) -> None:
        """Shows a finished run on stderr; stdout is the program's."""
        if not self._show:
            return
        stream = sys.stderr
        try:
            self._summary, text = conclude(folder, color=stream is not None and stream.isatty())
            if stream is not None:
                encoding = getattr(stream, "encoding", None)
                stream.write(for_encoding(text, encoding))
                stream.flush()
            check_expectation(self._summary)
        except Exception as error:
            if self._config.debug:
                traceback.print_exception(error)
            if isinstance(error, DdpProfilerError):
                self._say(str(error))
            else:
                self._say(f"the result could not be shown: {error}. It is kept in {folder}.")

    def _say(self, text: str) -> None:
        units.tell(NAME, _as_python(text))


_attached: Profiling | None = None
"""What :func:`detach` ends."""


def profile(
    *,
    steps: int = ScriptConfig.steps,
    warmup: int = ScriptConfig.warmup,
    every: int | None = None,
    batch_dim: int = ScriptConfig.batch_dim,
    expect_global_batch: int | None = None,
    replay: str | None = None,
    out: str | Path | None = None,
    timeout: float = ScriptConfig.timeout_s,
    name: str | None = None,
    show: bool = True,
    debug: bool = False,
) -> Profiling:
    """Returns a context manager that observes the training in its block.

    All ranks enter it, and equally often; after ``init_process_group``, or before where
    torchrun has started them. Models are found by themselves: a DistributedDataParallel that is
    built in the block, and one that was there before, at its first forward. Nothing of ours is
    left in torch after the observed steps, and at the latest after the block.

    Args:
        steps: Optimizer steps to observe in each variant, plain and instrumented.
        warmup: Optimizer steps before that, recorded and left out of the figures; at least 2.
        every: Observe as many again every so many optimizer steps, until the block ends.
        batch_dim: Dimension of the model's first input tensor that counts samples.
        expect_global_batch: The global batch that you believe to have; checked.
        replay: ``package.module:function``, your own loss of the whole global batch, which the
            gradients of one step are compared with; see docs/scripts.md.
        out: Run folder to create; a fresh one below ``runs/`` where None.
        timeout: Seconds after which waiting for other ranks at the begin is given up.
        name: What the run is called; the program's name where None.
        show: Whether rank 0 shows the table on stderr at the end, and writes ``summary.json``
            and the plots, which takes it some seconds.
        debug: Show stack traces of our own errors.

    Raises:
        UsageError: A setting is out of its range. Entering the block raises it as well, where
            the folder is taken or another observation goes on.
    """
    try:
        config = ScriptConfig(
            script=None,
            steps=steps,
            warmup=warmup,
            every=every,
            batch_dim=batch_dim,
            expect_global_batch=expect_global_batch,
            replay=replay,
            out=None if out is None else Path(out),
            timeout_s=timeout,
            debug=debug,
        )
    except DdpProfilerError as error:
        raise _in_python(error) from None
    return Profiling(config, name or _program(), show=show)


_ARGUMENTS = {name.replace("_", "-"): name for name in inspect.signature(profile).parameters}
"""The options that are arguments of ours as well; those of others, such as torchrun, stay."""


def attach(**options: Any) -> Profiling:
    """Begins to observe the training that follows, with the options of :func:`profile`.

    It ends with :func:`detach`, and else with the process. A process that ends by ``sys.exit``
    is taken for one that has ended well: only a block sees that.

    Returns:
        What gives access to the run folder and the figures.

    Raises:
        UsageError: See :func:`profile`.
    """
    global _attached
    profiling = profile(**options)
    profiling._begin()
    profiling._end_with_the_process()
    _attached = profiling
    return profiling


def detach() -> Profiling:
    """Ends what :func:`attach` has begun; see :meth:`Profiling.detach`.

    Raises:
        UsageError: Nothing is attached.
    """
    if _attached is None:
        raise UsageError("Nothing is attached.", "Call ddp_profiler.attach() before training.")
    return _attached.detach()


def _end_at_exit(profiling: Profiling) -> None:
    error = sys.exc_info()[1] or _last_error()
    profiling._end(failure_of(None if error is profiling._old_error else error))


def _last_error() -> BaseException | None:
    """Returns the exception that nobody caught; in an interactive session it ends nothing."""
    if hasattr(sys, "ps1"):
        return None
    found: BaseException | None = getattr(sys, "last_value", None)
    return found


def _program() -> str:
    """Returns the name of what runs: the script's, or that of a session."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).stem if main and not hasattr(sys, "ps1") else "session"


def _in_python(error: DdpProfilerError) -> DdpProfilerError:
    """Returns an error that names arguments instead of options of the command line."""
    return type(error)(_as_python(error.message), _as_python(error.remedy))


def _as_python(text: str) -> str:
    """Turns options of the command line into arguments.

    >>> _as_python("--expect-global-batch 0 is below 1; --out, --debug shows it.")
    'expect_global_batch=0 is below 1; out, debug=True shows it.'
    >>> _as_python("torchrun --standalone --nproc_per_node=2 SCRIPT")
    'torchrun --standalone --nproc_per_node=2 SCRIPT'
    """
    return options_as_arguments(text, _ARGUMENTS, flags=("debug",))

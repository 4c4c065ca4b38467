"""Runs a training script that knows nothing of us, observes it, and shows what was seen.

The script is run as ``python SCRIPT ARGS`` would run it: its arguments in ``sys.argv``, its
folder first on ``sys.path``, ``__main__`` as its name. What it prints stays alone on stdout,
ours goes to stderr; its exit code is passed through. If anything here fails, it is said once
and the script goes on as if we were not there.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import EXIT_DONE
from ddp_profiler.keeper import RunKeeper, describe_script
from ddp_profiler.measure import environment, kernel
from ddp_profiler.measure.attachment import Attachment
from ddp_profiler.measure.leave import leave, leave_by
from ddp_profiler.measure.loop import block_plan
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.script_board import ScriptBoard
from ddp_profiler.measure.steps import typical
from ddp_profiler.measure.study import make_timeline
from ddp_profiler.measure.topology import Topology
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import (
    Failure,
    LevelFacts,
    LevelSettings,
    ParameterFacts,
    RankPlace,
    RunInfo,
    Variant,
)

LEVEL = "script"
"""The id of the only level of such a run."""

_OTHERS_S = 10.0
"""How long rank 0 waits at the end for the records of other ranks."""
_OTHERS_OF_A_FAILURE_S = 0.5
"""The same after a failure: ranks of a script that fails need not end together."""
_OBSERVING = "observing"
"""The phase of a failure that is ours."""


@dataclass(frozen=True)
class _End:
    """How a rank's part has ended: what failed, if anything, and when (seconds since 1970)."""

    phase: str
    message: str
    hostname: str
    at_s: float


class ScriptRun:
    """A script under observation on one rank.

    Args:
        config: The settings.
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
        self._config = config
        self._topology = topology
        self._say = say
        self._show = show
        self._keeper = RunKeeper(topology.rank)
        self._board: ScriptBoard
        self._folder: Path
        self._run_id = ""
        self._stream: writer.SpanWriter | None = None
        self._failure: str | None = None
        self._level: LevelSettings | None = None
        self._facts: LevelFacts | None = None
        self._environment: dict[str, dict[str, Any]] = {}
        self._attachment = Attachment(
            self._make_recorder,
            _plan(config.warmup, config.steps),
            batch_dim=config.batch_dim,
            on_failure=self._step_aside,
            on_block=self._block_begins,
        )

    def prepare(self) -> None:
        """Meets the other ranks and claims the run folder, before the script begins.

        Raises:
            DdpProfilerError: The folder is taken, or other ranks did not come.
        """
        config, rank = self._config, self._topology.rank
        name = config.script if config.module else Path(config.script).stem
        if rank == 0:
            now = datetime.now().astimezone()
            folder = (config.out or paths.default_folder(name, now)).absolute()
            description = describe_script(config, self._topology.world_size, name, now)
            self._keeper.claim(folder, description)
        self._board = ScriptBoard(self._topology, config.timeout_s)
        if rank == 0:
            self._board.publish("run", (str(self._keeper.folder), self._keeper.info))
        folder_name, described = self._board.learn("run", tuple[str, RunInfo])
        self._folder, self._run_id = Path(folder_name), described.run_id
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Runs the script and returns its exit code; mostly it ends this process as well."""
        self._attachment.install()
        try:
            _execute(self._config)
        except SystemExit as end:
            self._finish(None if end.code in (None, 0) else f"sys.exit({end.code!r})")
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return self._end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except KeyboardInterrupt as error:
            self._finish("interrupted")
            _show_error(error)
            leave_by(signal.SIGINT)
        except BaseException as error:
            first = (str(error).splitlines() or ["no message"])[0]
            self._finish(f"{type(error).__name__}: {first}")
            _show_error(error)
            # Not by raising it: completions that are still out could abort the interpreter's end.
            leave(1)
        self._finish(None)
        return self._end(EXIT_DONE)

    def _end(self, code: int) -> int:
        """Ends the process with the script's code, where it was observed.

        Without tearing the interpreter down: a thread of gloo that lets go of what it took along
        from Python just then would abort the process (exit code -6, seen in 1 of 40 runs).
        """
        if self._attachment.built:
            leave(code & 0xFF)
        return code

    # -- while the script trains --------------------------------------------------------------

    def _make_recorder(self, device: torch.device) -> Recorder:
        """Makes the recorder when the script builds its first DDP."""
        rank = self._topology.rank
        self._stream = writer.SpanWriter(self._folder, rank, self._run_id)
        place = RankPlace(
            rank=rank,
            local_rank=self._topology.local_rank,
            node=0,
            hostname=socket.gethostname(),
            clock_domain=kernel.shared("time"),
            device=str(device),
            pid=os.getpid(),
        )
        self._board.publish(f"place/{rank}", place)
        return Recorder(make_timeline(device), self._stream.write)

    def _block_begins(self, variant: Variant | None) -> None:
        """Is told between two blocks; what is kept here a run that is killed leaves behind."""
        if variant is Variant.WARMUP and self._level is None and self._trained:
            self._describe(final=False)
            self._keep()
        elif variant is None:
            self._describe(final=True)
            self._attachment.let_go()
            self._close_stream()
            self._keep(status="complete")
            if self._topology.rank == 0:
                config = self._config
                self._say(
                    f"{config.warmup} + {2 * config.steps} steps were observed; training goes on "
                    f"without us. ddp-profiler analyze {self._folder} shows them already."
                )

    @property
    def _trained(self) -> bool:
        return self._attachment.started and self._attachment.tracker.step > 0

    def _step_aside(self, error: Exception) -> None:
        """Is told that something of ours has failed; says it once."""
        if self._failure is not None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        if self._config.debug:
            traceback.print_exception(error)
        self._say(
            f"observing rank {self._topology.rank} has failed and ends; training goes on "
            f"({self._failure}). --debug shows the stack trace."
        )

    # -- afterwards ---------------------------------------------------------------------------

    def _finish(self, failure: str | None) -> None:
        """Ends the record; what fails here is said and changes nothing for the script."""
        try:
            self._end_observing()
        except Exception as error:
            self._step_aside(error)
        try:
            self._end_record(failure)
            if self._keeper.folder is not None and self._trained and not self._failure:
                self._conclude(self._keeper.folder)
        except Exception as error:
            self._step_aside(error)

    def _conclude(self, folder: Path) -> None:
        seen, warmup = self._attachment.tracker.step, self._config.warmup
        if seen > warmup:
            self._show(folder)
        else:
            self._say(
                f"only {seen} optimizer step{'s were' if seen != 1 else ' was'} seen, and the "
                f"first {warmup} warm up (--warmup): there is nothing to show."
            )

    def _end_observing(self) -> None:
        """Takes out what is still there, and describes what was seen."""
        attachment = self._attachment
        try:
            if attachment.started and not attachment.tracker.done and not self._failure:
                attachment.tracker.finish()
                if self._trained:
                    self._describe(final=True)
        finally:
            attachment.uninstall()
            self._close_stream()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _end_record(self, failure: str | None) -> None:
        """Has ``run.json`` say how the run has ended."""
        rank, built = self._topology.rank, self._attachment.built
        if failure:
            end = _End("training", failure, socket.gethostname(), time.time())
        else:
            end = _End(_OBSERVING, self._failure or "", socket.gethostname(), time.time())
        self._board.publish(f"ended/{rank}", end)
        if rank != 0:
            if failure and not self._board.await_one("ended/0", _OTHERS_OF_A_FAILURE_S):
                self._keep_for_rank_0(end)
            return
        if not built and not failure:
            self._say(
                "the script never built DistributedDataParallel, so there is nothing to split; "
                "FSDP, DataParallel and training without either are not observed. Without SCRIPT, "
                "a built-in model is measured."
            )
        self._board.await_all("ended", _OTHERS_OF_A_FAILURE_S if failure else _OTHERS_S)
        ends = {r: self._board.find(f"ended/{r}", _End) for r in range(self._topology.world_size)}
        failed = sorted(
            ((r, e) for r, e in ends.items() if e is not None and e.message),
            key=lambda item: item[1].at_s,
        )
        self._keep(
            status="failed" if failed else "complete",
            failures=tuple(Failure(r, e.phase, e.message, e.hostname) for r, e in failed),
        )

    def _keep_for_rank_0(self, end: _End) -> None:
        """Notes a failure in ``run.json`` from another rank: rank 0 trains on, and will be killed.

        Where this rank does not see rank 0's folder, torchrun's own report has to do.
        """
        if not paths.run_file(self._folder).is_file():
            return
        info = reader.read_run_info(self._folder)
        if info.run_id == self._run_id and not info.failures:
            rank = self._topology.rank
            failure = Failure(rank, end.phase, end.message, end.hostname)
            writer.write_run_info(self._folder, replace(info, status="failed", failures=(failure,)))

    def _keep(self, **changes: Any) -> None:
        """Writes what is known so far, on rank 0."""
        if self._topology.rank == 0:
            if self._level is not None and self._facts is not None:
                changes |= {"levels": (self._level,), "facts": (self._facts,)}
                changes |= {"ranks": self._places(), "environment": self._environment}
            self._keeper.update(**changes)

    def _describe(self, *, final: bool) -> None:
        """Describes what the script turned out to do, by what this rank has seen.

        Args:
            final: Whether DDP has built its buckets for good: not before the second step.
        """
        attachment, tracker = self._attachment, self._attachment.tracker
        reduced = attachment.reduced()
        buckets = attachment.bucket_bytes() if final else None
        first, ddps = attachment.ddps[0], attachment.describe_ddps()
        self._facts = LevelFacts(
            id=LEVEL,
            parameters=sum(p.numel() for p in reduced.values()),
            gradient_bytes=sum(p.nbytes for p in reduced.values()),
            num_buckets=len(buckets) if buckets else None,
            bucket_bytes=buckets,
            sources=attachment.sources,
            reduced=tuple(ParameterFacts(name, p.nbytes) for name, p in reduced.items()),
            built_by=ddps[0].built_by,
            ddps=ddps,
            optimized=attachment.optimized,
            reduced_outside_bytes=attachment.recorder.reduced_outside_bytes,
        )
        self._level = LevelSettings(
            id=LEVEL,
            dp=first.process_group.size(),
            micro_batch=typical(tracker.samples, 1),
            accumulation=typical(tracker.micro_steps, 1),
            placement="packed",
            ranks=tuple(range(self._topology.world_size)),
        )
        if not self._environment:
            self._environment = {
                "0": environment.describe(
                    next(first.parameters()).device,
                    torch.get_num_threads(),
                    self._topology.local_world_size,
                    first.process_group._get_backend_name().lower(),
                )
            }

    def _places(self) -> tuple[RankPlace, ...]:
        """Returns where the ranks run that have built a model so far."""
        found = []
        nodes: dict[str, int] = {}
        for rank in range(self._topology.world_size):
            place: RankPlace | None = self._board.find(f"place/{rank}", RankPlace)
            if place is not None:
                node = nodes.setdefault(place.hostname, len(nodes))
                found.append(replace(place, node=node))
        return tuple(found)


def _plan(warmup: int, steps: int) -> Sequence[tuple[Variant, int]]:
    """Plans the blocks of a script's steps.

    The warm-up is two blocks: what rank 0 writes between them takes it some time, for which
    the others wait in the step that follows.
    """
    return [(Variant.WARMUP, warmup - 1), (Variant.WARMUP, 1), *block_plan(steps)]


def _execute(config: ScriptConfig) -> None:
    """Runs a script or a module as ``python`` would."""
    sys.argv = [config.script, *config.arguments]
    # As for `python -m`, the working folder is the first already; with -P there is none.
    if config.module:
        runpy.run_module(config.script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(config.script).resolve().parent)
    runpy.run_path(config.script, run_name="__main__")


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

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
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import EXIT_DONE
from ddp_profiler.keeper import RunKeeper, describe_script
from ddp_profiler.measure import environment
from ddp_profiler.measure.attachment import Attachment
from ddp_profiler.measure.leave import leave
from ddp_profiler.measure.loop import block_plan
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.script_board import ScriptBoard
from ddp_profiler.measure.steps import typical
from ddp_profiler.measure.study import make_timeline
from ddp_profiler.measure.topology import Topology
from ddp_profiler.record import paths, writer
from ddp_profiler.schema import Failure, LevelFacts, LevelSettings, RankPlace, RunInfo, Variant

LEVEL = "script"
"""The id of the only level of such a run."""

_OTHERS_S = 10.0
"""How long rank 0 waits at the end for the records of other ranks."""


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
        self._failed = False
        plan = [(Variant.WARMUP, config.warmup), *block_plan(config.steps)]
        self._attachment = Attachment(
            self._make_recorder, plan, batch_dim=config.batch_dim, on_failure=self._step_aside
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
        """Runs the script and returns 0; other ends of the script end this process as well."""
        self._attachment.install()
        try:
            _execute(self._config)
        except SystemExit as end:
            self._finish(None if end.code in (None, 0) else f"sys.exit({end.code!r})")
            raise
        except KeyboardInterrupt:
            self._finish("interrupted")
            _die_of(signal.SIGINT)
        except BaseException as error:
            first = (str(error).splitlines() or ["no message"])[0]
            self._finish(f"{type(error).__name__}: {first}")
            _leave_with(error)
        self._finish(None)
        return EXIT_DONE

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
            clock_domain=environment.clock_domain(),
            device=str(device),
            pid=os.getpid(),
        )
        self._board.publish(f"place/{rank}", place)
        return Recorder(make_timeline(device), self._stream.write)

    def _step_aside(self, error: Exception) -> None:
        self._failed = True
        if self._config.debug:
            traceback.print_exc()
        self._say(
            f"observing rank {self._topology.rank} has failed and ends; training goes on "
            f"({type(error).__name__}: {error}). --debug shows the stack trace."
        )

    # -- afterwards ---------------------------------------------------------------------------

    def _finish(self, failure: str | None) -> None:
        """Ends the record; what fails here is said and changes nothing for the script."""
        try:
            self._end_record(failure)
            if self._keeper.folder is not None and self._attachment.started and not self._failed:
                self._show(self._keeper.folder)
        except Exception as error:
            self._step_aside(error)

    def _end_record(self, failure: str | None) -> None:
        attachment, rank = self._attachment, self._topology.rank
        if attachment.started:
            attachment.tracker.finish()
            facts, level = self._describe_level()
        attachment.uninstall()
        if self._stream is not None:
            self._stream.close()
        self._board.publish(f"ended/{rank}", failure or "")
        if rank != 0:
            return
        if not attachment.started:
            self._say(
                "the script never built DistributedDataParallel, so there is nothing to split. "
                "FSDP, DataParallel and training without either are not measured."
            )
            self._keeper.update(status="failed" if failure else "complete")
            return
        # Not longer: ranks of a script that fails need not end together.
        self._board.await_all("ended", 0.5 if failure else _OTHERS_S)
        self._keeper.update(
            status="failed" if failure else "complete",
            levels=(level,),
            facts=(facts,),
            ranks=self._places(),
            environment=self._environment(),
            failures=(Failure(rank, "training", failure, socket.gethostname()),) if failure else (),
        )

    def _describe_level(self) -> tuple[LevelFacts, LevelSettings]:
        """Describes what the script turned out to do, by what this rank has seen."""
        attachment, tracker = self._attachment, self._attachment.tracker
        parameters, buckets = attachment.parameters(), attachment.bucket_bytes()
        facts = LevelFacts(
            id=LEVEL,
            parameters=sum(
                p.numel()
                for ddp in attachment.ddps
                for p in {id(q): q for q in ddp.parameters()}.values()
                if p.requires_grad
            ),
            gradient_bytes=sum(p.nbytes for p in parameters),
            num_buckets=len(buckets) if buckets else None,
            bucket_bytes=buckets,
            sources=attachment.sources,
            reduced=parameters,
        )
        level = LevelSettings(
            id=LEVEL,
            dp=attachment.ddps[0].process_group.size(),
            micro_batch=typical(tracker.samples, 1),
            accumulation=typical(tracker.micro_steps, 1),
            placement="packed",
            ranks=tuple(range(self._topology.world_size)),
        )
        return facts, level

    def _places(self) -> tuple[RankPlace, ...]:
        """Returns where the ranks ran that have trained."""
        found = []
        nodes: dict[str, int] = {}
        for rank in range(self._topology.world_size):
            place: RankPlace = self._board.learn(f"place/{rank}", RankPlace)
            node = nodes.setdefault(place.hostname, len(nodes))
            found.append(replace(place, node=node))
        return tuple(found)

    def _environment(self) -> dict[str, dict[str, Any]]:
        device = next(self._attachment.ddps[0].parameters()).device
        backend = self._attachment.ddps[0].process_group._get_backend_name().lower()
        return {
            "0": environment.describe(
                device, torch.get_num_threads(), self._topology.local_world_size, backend
            )
        }


def _execute(config: ScriptConfig) -> None:
    """Runs a script or a module as ``python`` would."""
    if config.module:
        sys.argv = [config.script, *config.arguments]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(config.script, run_name="__main__", alter_sys=True)
        return
    sys.argv = [config.script, *config.arguments]
    sys.path[0] = str(Path(config.script).resolve().parent)
    runpy.run_path(config.script, run_name="__main__")


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the script's own first frame on."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    return trace


def _leave_with(error: BaseException) -> NoReturn:
    """Shows an exception as Python would, and ends as Python would: with code 1."""
    shown = error.with_traceback(_own_frames(error.__traceback__))
    sys.excepthook(type(shown), shown, shown.__traceback__)
    leave(1)


def _die_of(number: signal.Signals) -> NoReturn:
    """Ends this process by a signal, as if nobody had caught it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    leave(128 + number)

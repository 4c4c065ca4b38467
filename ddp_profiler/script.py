"""Runs a training script that knows nothing of us, observes it, and shows what was seen.

The script is run as ``python SCRIPT ARGS`` would run it: its arguments in ``sys.argv``, its
folder first on ``sys.path``, ``__main__`` as its name. What it prints stays alone on stdout,
ours goes to stderr; its exit code is passed through. If anything here fails, it is said once
and the script goes on as if we were not there.
"""

from __future__ import annotations

import os
import runpy
import shlex
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

from ddp_profiler import units
from ddp_profiler.batch import by_value, unequal
from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import EXIT_DONE
from ddp_profiler.keeper import RunKeeper, describe_script
from ddp_profiler.measure import environment, kernel
from ddp_profiler.measure.attachment import Attachment
from ddp_profiler.measure.clock_sync import local_clock
from ddp_profiler.measure.kept_step import KeptStep
from ddp_profiler.measure.leave import leave, leave_by
from ddp_profiler.measure.loop import block_plan
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.other_training import describe
from ddp_profiler.measure.replay import Replay, load_oracle, not_compared
from ddp_profiler.measure.script_board import ScriptBoard
from ddp_profiler.measure.script_clocks import ScriptClocks
from ddp_profiler.measure.steps import typical
from ddp_profiler.measure.study import make_timeline
from ddp_profiler.measure.topology import Topology
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import (
    BatchProof,
    Failure,
    LevelFacts,
    LevelSettings,
    ParameterFacts,
    RankFeed,
    RankPlace,
    RecordPart,
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
        self._clocks: ScriptClocks
        self._parts: tuple[RecordPart, ...] = ()
        self._folder: Path
        self._run_id = ""
        self._stream: writer.SpanWriter | None = None
        self._failure: str | None = None
        self._level: LevelSettings | None = None
        self._facts: LevelFacts | None = None
        self._described = False
        """Whether this rank has described its node."""
        # The last step but one of the warm-up: what keeping it costs falls into the last one.
        self._kept = (
            KeptStep(config.warmup - 2, leads=topology.rank == 0, batch_dim=config.batch_dim)
            if config.replay
            else None
        )
        self._replay: Replay | None = None
        self._attachment = Attachment(
            self._make_recorder,
            _plan(config.warmup, config.steps),
            batch_dim=config.batch_dim,
            on_failure=self._step_aside,
            on_block=self._block_begins,
            kept=self._kept,
            on_feed=self._publish_feed,
        )

    def prepare(self) -> None:
        """Meets the other ranks and claims the run folder, before the script begins.

        Raises:
            DdpProfilerError: The folder is taken, other ranks did not come, or there is no
                function as ``--replay`` names it.
        """
        config, rank = self._config, self._topology.rank
        if config.replay is not None and self._kept is not None:
            # Before the ranks meet: all of them find the same.
            here = None if config.module else Path(config.script).resolve().parent
            self._replay = Replay(config.replay, load_oracle(config.replay, here), self._kept)
        name = config.script if config.module else Path(config.script).stem
        if rank == 0:
            now = datetime.now().astimezone()
            description = describe_script(config, self._topology.world_size, name, now)
            if config.out is None:
                self._keeper.claim_default(name, now, description, Path.cwd())
            else:
                self._keeper.claim(config.out.absolute(), description)
        self._board = ScriptBoard(self._topology, config.timeout_s)
        if rank == 0:
            self._board.publish("run", (str(self._keeper.folder), self._keeper.info))
        folder_name, described = self._board.learn("run", tuple[str, RunInfo])
        self._folder, self._run_id = Path(folder_name), described.run_id
        self._parts = self._keeper.settle(
            self._board, self._topology.world_size, self._folder, described
        )
        self._keeper.update(parts=self._parts)
        self._clocks = ScriptClocks(self._board, self._topology.world_size, local_clock())
        problem = self._clocks.open()
        if problem:
            self._say(f"waiting between hosts will not be told from transfer: {problem}.")

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
        if self._replay is not None and self._trained:
            self._share(self._replay)
        if variant is Variant.WARMUP and self._level is None and self._trained:
            # Between blocks of the warm-up: the other ranks wait for what takes time here.
            self._clocks.compare()
            self._describe(final=False)
            self._keep()
            self._warn_of_unequal_epochs()
        elif variant is None:
            self._clocks.compare()
            self._clocks.close()
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

    def _warn_of_unequal_epochs(self) -> None:
        """Says that ranks will part at the end of an epoch, while there is somebody to say it."""
        if self._topology.rank != 0:
            return
        feeds = [feed for feed in self._feeds() if feed.loaders and not feed.joins]
        counts = unequal({feed.rank: feed.loaders[0].batches for feed in feeds})
        if counts:
            self._say(
                f"micro-batches of an epoch: {by_value(counts)}. At its end the ranks with more "
                "will wait without end for the others, unless a number of steps ends it before."
            )

    def _publish_feed(self) -> None:
        """Makes known what feeds training here: before ranks of unequal loaders can hang."""
        rank, feed = self._topology.rank, self._attachment.feed
        known = RankFeed(rank, tuple(feed.loaders), tuple(feed.digests), feed.joins)
        self._board.publish(f"feed/{rank}", known)

    @property
    def _trained(self) -> bool:
        return self._attachment.started and self._attachment.tracker.step > 0

    def _step_aside(self, error: Exception) -> None:
        """Is told that something of ours has failed; says it once."""
        if self._failure is not None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        if self._kept is not None:
            # What it holds the script may want to free.
            self._kept.give_up("observing has failed")
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
            shows = self._topology.rank == 0 and self._trained and not self._failure
            if shows and self._keeper.folder is not None:
                self._conclude(self._keeper.folder)
        except Exception as error:
            self._step_aside(error)

    def _conclude(self, folder: Path) -> None:
        seen, warmup = self._attachment.tracker.step, self._config.warmup
        if seen > warmup:
            self._show(folder)
            self._tell_parts(folder)
        else:
            self._say(
                f"only {seen} optimizer step{'s were' if seen != 1 else ' was'} seen, and the "
                f"first {warmup} warm up (--warmup): there is nothing to show."
            )

    def _tell_parts(self, folder: Path) -> None:
        """Says where the record of other nodes is that do not see rank 0's folder."""
        kept = [
            f"{units.ranks(part.ranks)} on {part.hostname} in {shlex.quote(part.folder)}"
            for part in self._parts
            if part.keeper != 0
        ]
        if kept:
            self._say(
                f"other nodes do not see this folder and keep their own: {'; '.join(kept)}.\n"
                "Copy them to this node and join: ddp-profiler merge "
                f"{shlex.quote(str(folder))} DIR... --out RUN"
            )

    def _end_observing(self) -> None:
        """Takes out what is still there, and describes what was seen."""
        attachment = self._attachment
        try:
            if attachment.started and not attachment.tracker.done and not self._failure:
                attachment.tracker.finish()
                # Where the plan ended with this step, it is described and let go of already.
                if self._trained and not attachment.tracker.done:
                    self._clocks.compare()
                    self._describe(final=True)
        finally:
            self._clocks.close()
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
            if failure and self._replay is not None:
                paths.replay_file(self._folder, rank).unlink(missing_ok=True)
            if self._keeper.folder is not None:
                self._keep_part(end)
            elif failure and not self._board.await_one("ended/0", _OTHERS_OF_A_FAILURE_S):
                self._keep_for_rank_0(end)
            return
        if not built and not failure:
            self._say(describe(self._attachment.elsewhere, self._topology.world_size))
        self._board.await_all("ended", _OTHERS_OF_A_FAILURE_S if failure else _OTHERS_S)
        if self._replay is not None and self._facts is not None:
            self._facts = replace(self._facts, proof=self._prove(self._replay, failure))
        ends = {r: self._board.find(f"ended/{r}", _End) for r in range(self._topology.world_size)}
        failed = sorted(
            ((r, e) for r, e in ends.items() if e is not None and e.message),
            key=lambda item: item[1].at_s,
        )
        self._keep(
            status="failed" if failed else "complete",
            failures=tuple(Failure(r, e.phase, e.message, e.hostname) for r, e in failed),
        )

    def _keep_part(self, end: _End) -> None:
        """Completes the description of a folder that this node keeps for itself."""
        failures = (
            (Failure(self._topology.rank, end.phase, end.message, end.hostname),)
            if end.message
            else ()
        )
        self._keep(status="failed" if failures else "complete", failures=failures)

    # -- the replay ---------------------------------------------------------------------------

    def _share(self, replay: Replay) -> None:
        """Has this rank's micro-batches wait for rank 0 in the run folder."""
        rank = self._topology.rank
        if not paths.run_file(self._folder).is_file():
            # Nobody would ever fetch them there, nor remove them.
            replay.kept.give_up("its node does not see the run folder")
        problem = replay.share(paths.replay_file(self._folder, rank))
        if problem is not None:
            self._board.publish(f"replay/{rank}", problem)

    def _prove(self, replay: Replay, failure: str | None) -> BatchProof:
        """Computes the kept step again on rank 0, when the script has ended."""
        try:
            if failure:
                return not_compared("the script has failed")
            return replay.prove(
                self._level.accumulation if self._level else 1,
                lambda rank: paths.replay_file(self._folder, rank),
                lambda rank: self._board.find(f"replay/{rank}", str),
            )
        finally:
            for rank in range(self._topology.world_size):
                paths.replay_file(self._folder, rank).unlink(missing_ok=True)

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
        """Writes what is known so far, on rank 0 and where a node keeps a folder of its own."""
        if self._keeper.folder is None:
            return
        if self._level is not None and self._facts is not None:
            places = self._places()
            facts = replace(self._facts, feeds=self._feeds())
            changes |= {"levels": (self._level,), "facts": (facts,), "ranks": places}
            changes |= {"environment": self._environments(places)}
            if self._topology.rank == 0:
                changes |= {"clocks": self._clocks.found()}
        self._keeper.update(**changes)

    def _describe(self, *, final: bool) -> None:
        """Describes what the script turned out to do, by what this rank has seen.

        Args:
            final: Whether DDP has built its buckets for good: not before the second step.
        """
        attachment, tracker = self._attachment, self._attachment.tracker
        reduced = attachment.reduced()
        buckets = attachment.bucket_bytes() if final else None
        first = attachment.ddps[0]
        self._facts = LevelFacts(
            id=LEVEL,
            parameters=sum(p.numel() for p in reduced.values()),
            gradient_bytes=sum(p.nbytes for p in reduced.values()),
            num_buckets=len(buckets) if buckets else None,
            bucket_bytes=buckets,
            sources=attachment.sources,
            reduced=tuple(ParameterFacts(name, p.nbytes) for name, p in reduced.items()),
            loss_divisor=attachment.loss_divisor,
        )
        self._level = LevelSettings(
            id=LEVEL,
            dp=first.process_group.size(),
            micro_batch=typical(tracker.samples, 1),
            accumulation=typical(tracker.micro_steps, 1),
            placement="packed",
            ranks=tuple(range(self._topology.world_size)),
        )
        if self._topology.local_rank == 0 and not self._described:
            self._described = True
            own = environment.describe(
                next(first.parameters()).device,
                torch.get_num_threads(),
                self._topology.local_world_size,
                first.process_group._get_backend_name().lower(),
            )
            self._board.publish(f"environment/{self._topology.rank}", own)

    def _environments(self, places: tuple[RankPlace, ...]) -> dict[str, dict[str, Any]]:
        """Returns what the first rank of each node has said of it, by node."""
        found: dict[str, dict[str, Any]] = {}
        for place in places:
            own = self._board.find(f"environment/{place.rank}") if place.local_rank == 0 else None
            if own is not None:
                found.setdefault(str(place.node), own)
        return found

    def _feeds(self) -> tuple[RankFeed, ...]:
        """Returns what feeds training on the ranks that have said so."""
        ranks = range(self._topology.world_size)
        found = [self._board.find(f"feed/{rank}", RankFeed) for rank in ranks]
        return tuple(feed for feed in found if feed is not None)

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

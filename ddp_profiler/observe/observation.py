"""Observes training on one rank, keeps its record, and has it shown at the end.

This is what a script that is run and a program that observes itself have in common: ranks meet,
the run folder, the recorder, what is described and when, and how the record ends. If anything
here fails, it is said once and training goes on as if we were not there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ddp_profiler import units
from ddp_profiler.config import ScriptConfig
from ddp_profiler.errors import DdpProfilerError, UsageError
from ddp_profiler.keeper import RunKeeper, describe_script
from ddp_profiler.measure.clock_sync import local_clock
from ddp_profiler.measure.loop import block_plan
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.attachment import Attachment
from ddp_profiler.measure.scripts.board import ScriptBoard
from ddp_profiler.measure.scripts.clocks import ScriptClocks
from ddp_profiler.measure.scripts.other_training import describe
from ddp_profiler.measure.siblings import SiblingEnd, Siblings
from ddp_profiler.measure.study import make_timeline
from ddp_profiler.measure.topology import Topology
from ddp_profiler.observe.description import Description
from ddp_profiler.observe.oracle import OracleCheck
from ddp_profiler.record import paths, reader, writer
from ddp_profiler.schema import (
    Failure,
    RecordPart,
    RunInfo,
    Variant,
)

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


@dataclass(frozen=True)
class _Claim:
    """What rank 0 says of the run folder: where it is, or why there is none."""

    folder: str
    info: RunInfo | None
    problem: str = ""
    remedy: str = ""


class Observation:
    """Training under observation on one rank; one at a time in a process.

    Args:
        config: The settings.
        topology: This rank's place. Where nobody launched it, local ranks follow from the
            hosts' names.
        say: Shows a line to the user.
        show: Shows, on rank 0, what a run folder holds.
        name: What the run is called, and its folder where the settings name none.
        store: A store of torch that all ranks have; that of the launcher where None.

    Attributes:
        folder: The run folder, once ranks have met.
        in_child: Whether this is the copy in a forked process, which observes nothing.
        current: The observation that goes on in this process.
    """

    current: Observation | None = None

    def __init__(
        self,
        config: ScriptConfig,
        topology: Topology,
        say: Callable[[str], None],
        show: Callable[[Path], None],
        *,
        name: str,
        store: Any = None,
    ) -> None:
        self._config = config
        self._topology = topology
        self._name = name
        self._store = store
        self._say = say
        self._show = show
        self._keeper = RunKeeper(topology.rank)
        self._board: ScriptBoard
        self._clocks: ScriptClocks
        self._description: Description
        self._parts: tuple[RecordPart, ...] = ()
        self.folder: Path | None = None
        self.in_child = False
        self._run_id = ""
        self._stream: writer.SpanWriter | None = None
        self._failure: str | None = None
        self._siblings = Siblings(
            topology.rank, topology.local_world_size - 1 if topology.launched else 0
        )
        self._dead: tuple[Failure, ...] = ()
        """Ranks of this node that died while this one trained."""
        self._described = False
        """Whether a whole window was described."""
        self._oracle = OracleCheck(config, topology.rank) if config.replay else None
        self._attachment = Attachment(
            self._make_recorder,
            _plan(config),
            warmup=config.warmup,
            batch_dim=config.batch_dim,
            on_failure=self._step_aside,
            on_block=self._block_begins,
            kept=self._oracle.kept if self._oracle else None,
            on_feed=lambda: self._description.publish_feed(),
        )

    @property
    def observes_a_script(self) -> bool:
        """Whether a script is run that need not know of it."""
        return self._config.script is not None

    def leave_to_parent(self) -> None:
        """Is told in a process that was forked: what it does is no part of this rank's training."""
        self.in_child = True
        self._attachment.installed = False
        Observation.current = None

    @property
    def built(self) -> bool:
        """Whether a DistributedDataParallel was seen."""
        return self._attachment.built

    def begin(self) -> None:
        """Meets the other ranks, claims the run folder, and looks out for models.

        Call it on the thread that trains.

        Raises:
            DdpProfilerError: The folder is taken, other ranks did not come, or there is no
                function as ``--replay`` names it. Nothing is observed then.
        """
        if self._oracle is not None:
            # Before the ranks meet: all of them find the same.
            self._oracle.load()
        self._meet()
        self._siblings.listen(self._sibling_ended)
        self._siblings.begin()
        Observation.current = self
        self._attachment.install()

    def _meet(self) -> None:
        problem: DdpProfilerError | None = None
        if self._topology.rank == 0:
            try:
                self._claim()
            except DdpProfilerError as error:
                problem = error
        try:
            self._board = ScriptBoard(self._topology, self._config.timeout_s, self._store)
        except DdpProfilerError as error:
            raise problem or error from None
        if self._topology.rank == 0:
            said = (problem.message, problem.remedy) if problem else ("", "")
            claim = _Claim(str(self._keeper.folder), self._keeper.info, *said)
            self._board.publish("run", claim)
            if problem is not None:
                raise problem
        learned: _Claim = self._board.learn("run", _Claim)
        if learned.info is None:
            raise UsageError(learned.problem, learned.remedy)
        self.folder, self._run_id = Path(learned.folder), learned.info.run_id
        self._parts = self._keeper.settle(
            self._board, self._topology.world_size, self.folder, learned.info
        )
        self._keeper.update(parts=self._parts)
        if not self._topology.launched:
            self._topology = self._located()
        self._description = Description(self._topology, self._board, self._attachment)
        self._clocks = ScriptClocks(self._board, self._topology.world_size, local_clock())
        problem_of_clocks = self._clocks.open()
        if problem_of_clocks:
            self._say(f"waiting between hosts will not be told from transfer: {problem_of_clocks}.")

    def _claim(self) -> None:
        """Claims the run folder, or a fresh one where the settings name none."""
        now = datetime.now().astimezone()
        described = describe_script(self._config, self._topology.world_size, self._name, now)
        if self._config.out is None:
            self._keeper.claim_default(self._name, now, described, Path.cwd())
        else:
            self._keeper.claim(paths.of_attempt(self._config.out.absolute(), os.environ), described)

    def _located(self) -> Topology:
        """Finds this rank's place on its node, where no launcher has said it."""
        own, ranks = self._topology, range(self._topology.world_size)
        self._board.publish(f"host/{own.rank}", socket.gethostname())
        hosts = [self._board.learn(f"host/{rank}", str) for rank in ranks]
        here = [rank for rank in ranks if hosts[rank] == hosts[own.rank]]
        return replace(own, local_rank=here.index(own.rank), local_world_size=len(here))

    # -- while the model trains ---------------------------------------------------------------

    def _make_recorder(self, device: torch.device) -> Recorder:
        """Makes the recorder when the first DDP is seen."""
        assert self.folder is not None
        self._stream = writer.SpanWriter(self.folder, self._topology.rank, self._run_id)
        self._description.publish_place(device)
        return Recorder(make_timeline(device), self._stream.write)

    def _block_begins(self, variant: Variant | None) -> None:
        """Is told between two blocks; what is kept here a run that is killed leaves behind."""
        description = self._description
        if self._oracle is not None and self._trained and self.folder is not None:
            self._oracle.share(self.folder, self._board)
        if variant is Variant.WARMUP and description.level is None and self._trained:
            # Between blocks of the warm-up: the other ranks wait for what takes time here.
            self._clocks.compare()
            description.update(final=False)
            self._keep()
            warning = description.unequal_epochs() if self._topology.rank == 0 else ""
            if warning:
                self._say(warning)
        elif variant is None:
            self._clocks.compare()
            first, self._described = not self._described, True
            description.update(final=True)
            if self._attachment.tracker.done:
                self._clocks.close()
                self._attachment.let_go()
                self._close_stream()
                self._keep(status="complete")
            else:
                self._keep()
            if self._topology.rank == 0 and first:
                self._say(self._after_a_window())

    def _after_a_window(self) -> str:
        config = self._config
        seen = f"{config.warmup} + {config.window} steps were observed; "
        shown = f"ddp-profiler analyze {self.folder}"
        if config.every is None:
            return f"{seen}training goes on without us. {shown} shows them already."
        return f"{seen}so will {config.window} of every {config.every} be. {shown} shows them."

    @property
    def _trained(self) -> bool:
        return self._attachment.started and self._attachment.tracker.step > 0

    def _step_aside(self, error: Exception) -> None:
        """Is told that something of ours has failed; says it once."""
        if self._failure is not None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        if self._oracle is not None:
            # What it holds the script may want to free.
            self._oracle.kept.give_up("observing has failed")
        if self._config.debug:
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exception(error)
        self._say(
            f"observing rank {self._topology.rank} has failed and ends; training goes on "
            f"({self._failure}). --debug shows the stack trace."
        )

    def _sibling_ended(self, end: SiblingEnd) -> None:
        """Is told, on a thread, that another rank of this node has ended while this one trains.

        The launcher ends this rank within a tenth of a second, so it is kept at once.
        """
        if end.code == 0 or (not end.signal and self._board.find(f"ended/{end.rank}", _End)):
            return
        step = self._attachment.tracker.step if self._attachment.started else 0
        phase = f"training, about step {step}"
        host = socket.gethostname()
        failure = Failure(end.rank, phase, end.words, host, end.signal)
        self._dead = (*self._dead, failure)
        first = self._siblings.is_lowest_left()
        try:
            if self._keeper.folder is not None:
                self._keeper.update(status="failed", failures=self._dead)
            elif first:
                self._stand_in(failure)
        except OSError as error:
            self._say(f"run.json cannot be written: {error}")
        if first and end.signal:
            self._say(
                f"rank {end.rank} on {host} {end.words} in {phase}. What was observed is kept: "
                f"ddp-profiler analyze {self.folder}"
            )

    # -- afterwards ---------------------------------------------------------------------------

    def finish(self, failure: str | None) -> None:
        """Ends the record; what fails here is said and changes nothing for the training.

        Args:
            failure: Why training has ended before its end; None where it has not.
        """
        if self.in_child:
            return
        if not failure:
            self._siblings.stop()
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
        finally:
            self._siblings.stop()
            if Observation.current is self:
                Observation.current = None

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
                # Where the plan ended with this step, that is done already.
                if self._trained and not attachment.tracker.done:
                    self._clocks.compare()
                # The models of a window that was cut may not be all there are.
                if self._trained and not self._described:
                    self._description.update(final=True)
        finally:
            self._clocks.close()
            attachment.let_go()
            self._close_stream()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _end_record(self, failure: str | None) -> None:
        """Has ``run.json`` say how the run has ended."""
        rank = self._topology.rank
        if failure:
            end = _End("training", failure, socket.gethostname(), time.time())
        else:
            end = _End(_OBSERVING, self._failure or "", socket.gethostname(), time.time())
        self._board.publish(f"ended/{rank}", end)
        if rank != 0:
            if failure and self._oracle is not None and self.folder is not None:
                self._oracle.withdraw(self.folder)
            if self._keeper.folder is not None:
                self._keep_part(end)
            elif failure and not self._board.await_one("ended/0", _OTHERS_OF_A_FAILURE_S):
                self._keep_for_rank_0(end)
            return
        if not self.built and not failure:
            self._say(describe(self._attachment.elsewhere, self._topology.world_size))
        self._board.await_all("ended", _OTHERS_OF_A_FAILURE_S if failure else _OTHERS_S)
        self._compare(failed=bool(failure))
        ends = {r: self._board.find(f"ended/{r}", _End) for r in range(self._topology.world_size)}
        failed = sorted(
            ((r, e) for r, e in ends.items() if e is not None and e.message),
            key=lambda item: item[1].at_s,
        )
        told = [Failure(r, e.phase, e.message, e.hostname) for r, e in failed]
        known = {failure.rank for failure in self._dead}
        failures = (*self._dead, *(f for f in told if f.rank not in known))
        self._keep(status="failed" if failures else "complete", failures=failures)

    def _compare(self, *, failed: bool) -> None:
        """Has the oracle, if there is one, judge the gradients of the kept step."""
        level, facts = self._description.level, self._description.facts
        if self._oracle is None or self.folder is None or level is None or facts is None:
            return
        proof = self._oracle.prove(
            self.folder,
            self._board,
            ranks=self._topology.world_size,
            accumulation=level.accumulation,
            failed=failed,
        )
        self._description.facts = replace(facts, proof=proof)

    def _keep_part(self, end: _End) -> None:
        """Completes the description of a folder that this node keeps for itself."""
        failures = (
            (Failure(self._topology.rank, end.phase, end.message, end.hostname),)
            if end.message
            else ()
        )
        self._keep(status="failed" if failures else "complete", failures=failures)

    def _keep_for_rank_0(self, end: _End) -> None:
        """Notes a failure from another rank: rank 0 trains on, and will be killed."""
        self._stand_in(Failure(self._topology.rank, end.phase, end.message, end.hostname))

    def _stand_in(self, failure: Failure) -> None:
        """Writes a failure into the ``run.json`` that rank 0 keeps.

        Where this rank does not see rank 0's folder, torchrun's own report has to do.
        """
        if self.folder is None or not paths.run_file(self.folder).is_file():
            return
        info = reader.read_run_info(self.folder)
        if info.run_id == self._run_id and not info.failures:
            writer.write_run_info(self.folder, replace(info, status="failed", failures=(failure,)))

    def _keep(self, **changes: Any) -> None:
        """Writes what is known so far, on rank 0 and where a node keeps a folder of its own."""
        if self._keeper.folder is None:
            return
        known = self._description.fields()
        if known and self._topology.rank == 0:
            known["clocks"] = self._clocks.found()
        self._keeper.update(**known, **changes)


def _leave_to_parent() -> None:
    if Observation.current is not None:
        Observation.current.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _plan(config: ScriptConfig) -> Iterator[tuple[Variant | None, int]]:
    """Plans the blocks of observed steps; the variant None stands for steps between windows.

    The warm-up is two blocks: what rank 0 writes between them takes it some time, for which
    the others wait in the step that follows.
    """
    yield Variant.WARMUP, config.warmup - 1
    yield Variant.WARMUP, 1
    yield from block_plan(config.steps)
    while config.every is not None:
        yield None, config.every - config.window
        yield from block_plan(config.steps)


def failure_of(error: BaseException | None) -> str | None:
    """Says why training has ended, by the exception that ended it; None where it ended well."""
    if error is None:
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"sys.exit({error.code!r})"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first = (str(error).splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"

"""Worker entry: ``torchrun --nproc_per_node=N -m ddp_profiler.run``.

Every rank runs it. It wires workload, measurement, record and report together.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from ddp_profiler import units
from ddp_profiler.cli import error_text, parse_click, worker_options, write_out
from ddp_profiler.config import ScriptConfig, StudyConfig
from ddp_profiler.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    DdpProfilerError,
    InputError,
    UsageError,
)
from ddp_profiler.measure import nccl
from ddp_profiler.measure.leave import leave_now
from ddp_profiler.measure.siblings import SiblingEnd, Siblings
from ddp_profiler.measure.signals import SignalWatch, end_by
from ddp_profiler.measure.topology import Topology, place_levels, plan_levels, read_topology
from ddp_profiler.record import paths, writer
from ddp_profiler.schema import (
    ClockReading,
    Failure,
    LevelFacts,
    LevelSettings,
    RankPhase,
    RunInfo,
)

NAME = "ddp_profiler.run"

_LEAST_REPORT_S = 60.0
"""So long at least rank 0 may take over its report, whatever --timeout is."""
_TIMED_OUT = (
    "A rank has died or hangs, or a link is down; --timeout S waits longer. What was measured "
    "before is kept."
)

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT, errno.EIO, errno.ESTALE)
"""What writing to a folder meets whose disk is full, read-only or gone."""
_DISK_REMEDY = (
    "What reached the disk before is kept: ddp-profiler analyze shows it. Make room, or choose "
    "another folder with --out."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this rank's part of a study and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        topology = read_topology(os.environ)
    except DdpProfilerError as error:
        return _complain(error, speaks=True)
    speaks = topology.rank == 0
    try:
        config = parse_click(worker_options.command, given, NAME, quiet=not speaks)
    except DdpProfilerError as error:
        return _complain(error, speaks)
    if isinstance(config, ScriptConfig | StudyConfig) and config.nccl is not None:
        try:
            # Before torch is imported. This process may begin anew here.
            nccl.use(config.nccl)
        except DdpProfilerError as error:
            # Once on each node: the file may be one node's own.
            return _complain(error, speaks=topology.local_rank == 0)
    if isinstance(config, ScriptConfig):
        return _run_script(config, topology)
    if not isinstance(config, StudyConfig):  # --help was asked for
        return EXIT_DONE
    if not topology.launched:
        _say(
            "started without torchrun, so this is dp = 1 on one rank. For more: "
            "torchrun --nproc_per_node=N -m ddp_profiler.run"
        )
    return _Worker(config, topology).run()


def _complain(error: DdpProfilerError, speaks: bool) -> int:
    """Prints an error and returns its exit code; what all ranks meet alike is printed once.

    torchrun ends all ranks when the first one ends. A rank that is not the one to speak
    waits for that; if it is still there after a moment, the error is its own.
    """
    if not speaks:
        time.sleep(2)
    _say(error_text(error))
    return error.exit_code


def _say(text: str) -> None:
    units.tell(NAME, text)


def _run_script(config: ScriptConfig, topology: Topology) -> int:
    """Runs a script of the user's and shows what was seen; returns the exit code."""
    from ddp_profiler.script import ScriptRun

    def show(folder: Path) -> None:
        # stdout is the script's.
        with contextlib.redirect_stdout(sys.stderr):
            _conclude(folder, config.debug)

    script = ScriptRun(config, topology, _say, show)
    try:
        script.prepare()
    except DdpProfilerError as error:
        return _complain(error, speaks=topology.local_rank == 0)
    return script.run()


class _Worker:
    """One rank from its settings to its exit code."""

    def __init__(self, config: StudyConfig, topology: Topology) -> None:
        self.config = config
        self.topology = topology
        self.levels: tuple[LevelSettings, ...] = ()
        self._keeper: Any = None
        self._aftermath: Any = None
        self._fates: Any = None
        self._folder: Path | None = None
        """The run folder, as rank 0 names it."""
        self._run_id = ""
        self._early_end = threading.Lock()
        self._siblings = Siblings(topology.rank, topology.local_world_size - 1)
        self._signals = SignalWatch(self._told_to_end, self._hold)
        self._complete = False
        """All levels are measured, and what follows is an extra."""
        self._nothing_measured = False
        """The settings were refused before anything was recorded."""
        self._told_before: tuple[Failure, ...] = ()
        """Failures that rank 0 had kept before this rank took its place."""
        self._said_unkept = False
        """It was said that run.json cannot be written."""

    def run(self) -> int:
        rank = self.topology.rank
        self._siblings.listen(self._sibling_ended)
        self._siblings.begin()
        self._signals.install()
        try:
            self.levels = plan_levels(self.config, self.topology.world_size)
            prepared = self._prepare()
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception as error:
            if self.config.debug:
                traceback.print_exc()
            if not isinstance(error, DdpProfilerError):
                error = InputError(
                    f"Rank {rank} could not be set up: {_one_line(error)}.",
                    "--debug shows the stack trace.",
                )
            # Once on each node: the setting or the machine at fault may be one node's own.
            return _complain(error, speaks=self.topology.local_rank == 0)
        return self._measure(*prepared)

    def _prepare(self) -> tuple[Any, Any]:
        """Checks all that can be checked before ranks meet: one clear line, no timing lost."""
        from ddp_profiler import keeper
        from ddp_profiler.measure import batches, interfaces, session, study
        from ddp_profiler.measure.planted_fate import Fates
        from ddp_profiler.workload.plant import check_plants, parse_plants

        topology = self.topology
        plants = parse_plants(self.config.plants)
        check_plants(plants, topology.world_size, [lv.dp for lv in self.levels])
        self._fates = Fates(plants, topology.rank)
        self._fates.phase_begins("start-up")
        device = session.choose_device(topology, self.config.backend, self.config.threads_per_rank)
        if self.config.nccl is not None and device.backend != "nccl":
            raise UsageError(
                f"--nccl names an NCCL, and this run would use {device.backend}.",
                "Leave --nccl out, or start no more ranks on a node than it has GPUs.",
            )
        interfaces.find_route(device.backend)
        if topology.local_world_size < topology.world_size:
            # Under NCCL, gloo carries clock readings and files between nodes.
            interfaces.find_route("gloo")
        workload = study.build_workload(self.config, self.levels[0].micro_batch)
        for level in self.levels:
            batches.check_data(workload, level)
        self._keeper = keeper.RunKeeper(topology.rank)
        if topology.rank == 0:
            now = datetime.now().astimezone()
            info = keeper.describe(self.config, workload, topology.world_size, self.levels, now)
            if self.config.out is None:
                self._keeper.claim_default(workload.name, now, info)
            else:
                self._keeper.claim(paths.of_attempt(self.config.out, os.environ), info)
        return device, workload

    def _measure(self, device: Any, workload: Any) -> int:
        from ddp_profiler.aftermath import Aftermath
        from ddp_profiler.measure import study
        from ddp_profiler.measure.leave import leave

        phase = study.Phase()
        phase.planted = self._fates.phase_begins
        aftermath = Aftermath(
            self.topology.rank,
            self._keep_failure,
            _say,
            siblings=self._siblings,
            stand_in=self._stand_in,
            clean=self._clean,
            show=self._show,
            report_s=self._report_s,
        )
        with self._early_end:
            self._aftermath = aftermath
        where = f"rank {self.topology.rank} on {socket.gethostname()}"
        try:
            parts = self._study(device, workload, phase, aftermath)
        except DdpProfilerError as error:
            if self.config.debug:
                traceback.print_exc()
            shown = error
            if aftermath.met:
                kind = UsageError if isinstance(error, UsageError) else InputError
                shown = kind(f"{where} failed in {phase.at}: {error.message}", error.remedy)
            self._give_up(aftermath, phase.at, error.message, shown)
        except KeyboardInterrupt:
            aftermath.note(phase.name, "interrupted")
            aftermath.keep_now()
            leave(EXIT_INTERRUPTED)
        except (Exception, SystemExit) as error:
            if self.config.debug:
                traceback.print_exc()
            message = _one_line(error)
            remedy = _remedy(message)
            if isinstance(error, OSError) and error.errno in _DISK:
                message, remedy, self._said_unkept = _of_disk(error), _DISK_REMEDY, True
            failure = InputError(f"{where} failed in {phase.at}: {message}", remedy)
            self._give_up(aftermath, phase.at, message, failure)
        aftermath.close()
        code = EXIT_DONE
        if self.topology.rank == 0:
            phase.name = "writing the report"
            try:
                code = _conclude(self._keeper.folder, self.config.debug)
            except KeyboardInterrupt:
                code = EXIT_INTERRUPTED
            except Exception as error:
                if self.config.debug:
                    traceback.print_exc()
                host = socket.gethostname()
                _say(
                    f"rank 0 on {host} failed in {phase.at}: {_one_line(error)}. All is measured "
                    "and kept; ddp-profiler report writes the report again."
                )
                code = EXIT_BAD_INPUT
        else:
            code = self._outlast(aftermath)
        self._resume_stopped()
        if parts:
            # A node may have been lost on the way, and with it connections of this process.
            leave(code)
        return code

    def _resume_stopped(self) -> None:
        """Has ranks of this node that are stopped go on: the launcher waits for them."""
        for rank, pid in self._siblings.stopped().items():
            _say(
                f"rank {rank} on {socket.gethostname()} was stopped (process {pid}) once all was "
                "measured; it is told to go on, so that it ends."
            )
        self._siblings.resume_stopped()

    @property
    def _report_s(self) -> float:
        """How long rank 0 may take over its report, in seconds."""
        return max(self.config.timeout_s, _LEAST_REPORT_S)

    def _outlast(self, aftermath: Any) -> int:
        """Stays on rank 0's node until that has written its report, to tell if it dies over it.

        The launcher waits for it as well, without end; here one rank does, asleep.
        """
        if self._siblings.is_lowest_left(above=1):
            limit_s = self._report_s
            end = self._siblings.await_end(0, limit_s)
            if end is not None and end.signal:
                aftermath.tell_late(end.pid, end.words)
                return EXIT_BAD_INPUT
            pid = self._siblings.running(0)
            if end is None and pid is not None:
                if 0 in self._siblings.stopped():
                    words = f"was stopped and did not go on for {limit_s:g} s (process {pid})"
                else:
                    words = f"hangs: it did not end within {limit_s:g} s"
                aftermath.tell_late(pid, words)
                # The launcher ends it when this rank fails: a stopped one cannot be told.
                self._siblings.resume_stopped()
                return EXIT_BAD_INPUT
        return EXIT_DONE

    def _give_up(
        self, aftermath: Any, phase: str, message: str, error: DdpProfilerError
    ) -> NoReturn:
        """Ends this rank after an error; of all ranks' errors the first one is shown."""
        from ddp_profiler.measure.leave import leave

        topology, host = self.topology, socket.gethostname()
        speaks = True
        self._nothing_measured = isinstance(error, UsageError)
        behind = aftermath.cause_of(message)
        if behind != message:
            # Every rank meets this alike.
            speaks = topology.local_rank == 0
            message = behind
            error = InputError(
                f"rank {topology.rank} on {host} failed in {phase}: {message}",
                "What was measured before is kept: ddp-profiler analyze shows it.",
            )
        first = aftermath.note(phase, message)
        self._clean(os.getpid())
        if not aftermath.met:
            aftermath.finish()
            leave(_complain(error, speaks=topology.local_rank == 0))
        if (first.rank, first.message) == (topology.rank, message):
            if speaks:
                _complain(error, speaks=True)
        elif first.hostname != host and topology.local_rank == 0:
            _say(
                f"rank {topology.rank} on {host} ended in {phase}, after rank {first.rank} on "
                f"{first.hostname} had failed in {first.phase}: {first.message}"
            )
        aftermath.finish()
        leave(error.exit_code)

    def _study(self, device: Any, workload: Any, phase: Any, aftermath: Any) -> Any:
        """Measures and collects; returns the folders in use, none where all ranks see one."""
        from ddp_profiler.keeper import PartsCollection
        from ddp_profiler.measure import collect, study
        from ddp_profiler.measure.clock_sync import ClockSync, local_clock
        from ddp_profiler.measure.session import CLOSING_S, Session
        from ddp_profiler.report.progress import NoProgress, StudyProgress
        from ddp_profiler.workload.plant import parse_plants, planted_clock

        config, rank, keeper = self.config, self.topology.rank, self._keeper
        phase.name = "meeting the other ranks"
        session = Session(self.topology, device, config.timeout_s, join=False)
        aftermath.begin(session, phase)
        phase.name = "starting the process group"
        session.join()
        phase.name = "agreeing on the run folder"
        if rank == 0:
            session.publish("run", (str(keeper.folder), keeper.info))
        folder_name, described = session.learn("run", tuple[str, RunInfo])
        folder = Path(folder_name)
        self._folder, self._run_id = folder, described.run_id
        parts = keeper.settle(session, self.topology.world_size, folder, described)
        phase.name = "describing the run"
        collection = PartsCollection(session, parts, folder, _say, config.collect)
        clock = local_clock(planted_clock(parse_plants(config.plants), rank))
        places = session.gather_places(clock.domain)
        self.levels = place_levels(self.levels, places, config.placement)
        self._describe(session, places, parts, device)
        phase.name = "checking what the backend can reduce"
        session.check_reducible({p.dtype for p in workload.module.parameters() if p.requires_grad})
        if rank == 0:
            _say(self._plan_line(workload, device, session))
            if config.placement == "spread" and not any(
                level.placement == "spread" for level in self.levels
            ):
                _say(
                    "--placement spread changes nothing here: no level between dp = 1 and "
                    f"{self.topology.world_size} can use more nodes."
                )
        samples = len(workload.dataset)
        del workload
        if config.find_micro_batch:
            self._find_micro_batch(session, phase, samples)

        phase.name = "making the group that compares clocks"
        clock_sync = ClockSync(places, clock, session)
        if rank == 0 and clock_sync.problem:
            _say(
                f"waiting between hosts will not be told from transfer: {clock_sync.problem}.\n"
                "Gloo must find a way between the nodes; GLOO_SOCKET_IFNAME names its interface."
            )
        phase.name = "opening the record"
        stream = writer.SpanWriter(folder, rank, described.run_id)
        visits = len(self.levels) * (config.repeat + (config.kineto > 0))
        progress = StudyProgress(visits + config.confirm) if rank == 0 else NoProgress()
        try:
            study.Study(
                config,
                self.levels,
                session,
                stream.write,
                progress,
                phase,
                clock.monotonic,
                clock_sync,
                self._keep_facts,
                trace_file=lambda level: paths.kineto_file(folder, level.id, rank),
                say=_say,
            ).run()
        finally:
            stream.close()
        phase.name = "collecting the parts of other nodes"
        lost = collection.run(self._share_facts(session) if parts else "")
        if config.confirm:
            # All is measured and written: what goes wrong from here on takes nothing of it away.
            keeper.update(status="complete")
            self._complete = True
            self._confirm(session, clock.monotonic, progress, phase, folder, visits, bool(lost))
        phase.name = "closing"
        # Before the wait, in which a launcher may end this rank: all is measured and written.
        keeper.update(status="complete")
        self._complete = True
        if lost is None:
            # Not even the store can be reached: what this node measured is complete all the same.
            session.stop_watching()
        elif not lost:
            session.close(heartbeat=collect.HEARTBEAT)
        else:
            # A node that is gone may be why, and what is here can be analysed.
            with contextlib.suppress(DdpProfilerError, RuntimeError):
                session.close(heartbeat=collect.HEARTBEAT, limit_s=CLOSING_S)
            collection.tell_lost(lost)
        return parts

    def _confirm(
        self,
        session: Any,
        clock: Any,
        progress: Any,
        phase: Any,
        folder: Path,
        number: int,
        lost: bool,
    ) -> None:
        """Measures the change of settings that is predicted to gain most."""
        from ddp_profiler.measure.confirm import confirm_if_proposed

        def proposed() -> Any:
            if lost:
                _say("nothing is confirmed: the record of another node is missing.")
                return None
            return _propose(folder)

        found = confirm_if_proposed(
            proposed, self.config, self.levels, session, clock, progress, phase, number
        )
        if found is not None:
            self._keeper.update(confirmation=found)

    def _describe(self, session: Any, places: Any, parts: Any, device: Any) -> None:
        """Completes the run's description, on each rank that keeps one."""
        from ddp_profiler.measure import environment

        rank, keeper = self.topology.rank, self._keeper
        node = places[rank].node
        if rank == min(place.rank for place in places if place.node == node):
            session.publish(
                f"environment/{node}",
                environment.describe(
                    device.device, device.threads, self.topology.local_world_size, device.backend
                ),
            )
        if rank == 0:
            nodes = sorted({place.node for place in places})
            keeper.update(
                levels=self.levels,
                ranks=places,
                environment={str(n): session.learn(f"environment/{n}") for n in nodes},
                parts=parts,
            )
            session.publish("described", keeper.info)
        elif keeper.info is not None:
            described = session.learn("described", RunInfo)
            keeper.update(
                levels=described.levels,
                ranks=described.ranks,
                environment=described.environment,
                parts=described.parts,
            )

    def _find_micro_batch(self, session: Any, phase: Any, samples: int) -> None:
        """Measures memory and speed against the micro-batch; levels use it where that is open.

        Args:
            session: This rank's part in the launch.
            phase: Kept up to date for error messages.
            samples: Samples of the data, of which every level needs a micro-step.
        """
        from ddp_profiler.analysis.micro_batch import curve
        from ddp_profiler.measure.micro_batch import search_on_level

        config = self.config
        level = max(self.levels, key=lambda level: (level.dp, level.placement == "packed"))
        if self.topology.rank == 0:
            _say(
                f"finding the micro-batch at dp {level.dp}: doubling until memory is used up or "
                "samples get slower"
            )
        found = search_on_level(config, level, session, phase, _say)
        result = curve(found)
        chosen = None
        if config.micro_batch is None and config.global_batch is None and result is not None:
            chosen = result.efficient_micro_batch
        if chosen is not None:
            chosen = min(chosen, samples // level.dp)
            self.levels = tuple(replace(level, micro_batch=chosen) for level in self.levels)
            if self.topology.rank == 0:
                _say(f"the levels use micro-batch {chosen}")
        self._keeper.update(micro_batches=found, levels=self.levels)

    def _share_facts(self, session: Any) -> str:
        """Gives every keeper what rank 0 knows: the clocks, and what the machine gave each rank.

        Returns:
            Why rank 0 did not say it; empty if it did.
        """
        keeper = self._keeper
        if self.topology.rank == 0:
            session.publish("facts", (keeper.info.facts, keeper.info.clocks))
        elif keeper.info is not None:
            # Without it the node's own folder says less, and its part is whole all the same.
            try:
                self._keep_facts(
                    *session.learn("facts", tuple[tuple[LevelFacts, ...], tuple[ClockReading, ...]])
                )
            except DdpProfilerError as error:
                return error.message.removesuffix(".")
        return ""

    def _keep_facts(self, facts: tuple[LevelFacts, ...], clocks: tuple[ClockReading, ...]) -> None:
        """Writes what is known so far: a run that dies later can be read."""
        self._keeper.update(facts=facts, clocks=clocks)

    def _plan_line(self, workload: Any, device: Any, session: Any) -> str:
        from ddp_profiler.measure import interfaces

        size = sum(p.numel() for p in workload.module.parameters() if p.requires_grad)
        levels = ", ".join(level.id for level in self.levels)
        via = ""
        if len({place.node for place in session.places}) > 1:
            route = interfaces.find_route(device.backend)
            via = f" via {route}"
        return (
            f"{workload.name}, {size:,} parameters, {device.backend} on {device.device.type}{via}, "
            f"{device.threads} thread{'' if device.threads == 1 else 's'} a rank; levels: {levels}"
        )

    def _sibling_ended(self, end: SiblingEnd) -> None:
        """Is told, on a thread, that another rank of this node has ended."""
        with self._early_end:
            if self._aftermath is None:
                if end.signal:
                    self._end_early(f"rank {end.rank} on {socket.gethostname()} {end.words}", end)
                return
        self._aftermath.sibling_ended(end)

    def _told_to_end(self, number: signal.Signals) -> None:
        """Is told, on a thread, that this process was sent a signal."""
        # A death that this is the consequence of says more.
        if self._aftermath is None:
            self._siblings.ended(0.3)
        with self._early_end:
            if self._aftermath is None:
                end = self._siblings.ended()
                if end is None or end.code == 0:
                    own = SiblingEnd(self.topology.rank, os.getpid(), -number)
                    host = socket.gethostname()
                    text = f"rank {own.rank} on {host} was told to end ({number.name})"
                    self._end_early(text, own, speaks=self.topology.local_rank == 0)
                elif end.signal:
                    self._end_early(f"rank {end.rank} on {socket.gethostname()} {end.words}", end)
                if self._keeper is not None:
                    self._keeper.release()
                end_by(number)
        self._aftermath.told_to_end(number)

    def _hold(self) -> None:
        """Keeps the main thread while another one ends the process."""
        if self._keeper is not None and self._keeper.defer(self._hold):
            return
        if self._aftermath is None:
            threading.Event().wait()
        else:
            self._aftermath.hold()

    def _end_early(self, text: str, end: SiblingEnd, *, speaks: bool | None = None) -> NoReturn:
        """Ends this rank before it could meet others; the folder is given back."""
        if self._siblings.is_lowest_left() if speaks is None else speaks:
            _say(f"{text} in start-up.")
        if self._keeper is not None:
            self._keeper.release()
        if end.rank == self.topology.rank:
            end_by(signal.Signals(-(end.code or -signal.SIGTERM)))
        leave_now(EXIT_BAD_INPUT)

    def _stand_in(self) -> None:
        """Keeps the run folder in the place of rank 0, where this rank sees it."""
        if self._folder is not None and self._keeper.folder is None:
            self._keeper.stand_in(self._folder, self._run_id)
            if self._keeper.info is not None:
                self._told_before = self._keeper.info.failures

    def _clean(self, pid: int) -> None:
        """Removes what a process of this run has left half written."""
        if self._folder is not None:
            paths.remove_partials(self._folder, pid)

    def _show(self) -> None:
        """Shows what was measured until the run was told to end."""
        from ddp_profiler.load import load_summary
        from ddp_profiler.report import console
        from ddp_profiler.report.text import for_encoding

        folder = self._keeper.folder
        try:
            color = sys.stdout is not None and sys.stdout.isatty()
            text = console.render(load_summary(folder), color=color)
            write_out(for_encoding(text, getattr(sys.stdout, "encoding", None)))
        except DdpProfilerError as error:
            _say(error_text(error))
        _say(f"what was measured is kept: ddp-profiler analyze {folder}")

    def _keep_failure(self, failures: tuple[Failure, ...], phases: tuple[RankPhase, ...]) -> None:
        """Keeps failures in run.json; called on the main thread or while it hangs."""
        try:
            if self._nothing_measured and self._keeper.release():
                return
            status = "complete" if self._complete else "failed"
            # What rank 0 itself could say of its end comes first.
            failures = tuple(dict.fromkeys((*self._told_before, *failures)))
            self._keeper.update(status=status, failures=failures, phases=phases)
        except OSError as error:
            # Tried again with more that is known, and said once.
            if not self._said_unkept:
                self._said_unkept = True
                _say(f"run.json cannot be written: {error.strerror or error}")


def _of_disk(error: OSError) -> str:
    return f"the run folder takes no more: {os.strerror(error.errno or 0)}"


def _propose(folder: Path) -> Any:
    """Returns the change at the largest level that is predicted to gain most; None for none."""
    from ddp_profiler.load import load_summary
    from ddp_profiler.predict.prediction import Predictor
    from ddp_profiler.predict.proposals import best_to_confirm, propose
    from ddp_profiler.schema import Change, Confirmation

    try:
        best = best_to_confirm(propose(Predictor.of(load_summary(folder))))
    except DdpProfilerError as error:
        _say(f"nothing is confirmed: {error.message}")
        return None
    except Exception as error:
        # The others wait for an answer, and the study is complete without this.
        _say(f"nothing is confirmed: {_one_line(error)}")
        return None
    if best is None:
        _say("nothing is confirmed: no change of settings is predicted to gain beyond its error.")
        return None
    return Confirmation(
        level=best.level,
        change=Change(
            bucket_cap_mb=best.request.bucket_cap_mb,
            accumulation=best.request.accumulation if best.setting == "accumulation" else None,
            reduce_once=best.request.reduce_once,
            bucket_view=best.request.bucket_view,
        ),
        setting=best.setting,
        text=best.text,
        predicted_gain_ms=best.gain_ms,
        predicted_interval90_ms=best.gain_interval90,
    )


def _remedy(message: str) -> str:
    lowered = message.lower()
    if "timed out" in lowered:
        return _TIMED_OUT
    if "memoryerror" in lowered or "out of memory" in lowered or "allocate memory" in lowered:
        return "Choose a smaller --micro-batch; what was measured before is kept."
    return "--debug shows the stack trace; what was measured before is kept."


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the model called sys.exit({error.code})"
    # Gloo begins with the place in its own source.
    text = re.sub(r"^\[[^]]*\.(?:cc|cpp|h):\d+\]\s*", "", str(error).strip()).splitlines()
    message = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno})" if frames else message


def _conclude(folder: Path, debug: bool) -> int:
    """Analyses a finished run, prints its table and where its files are; returns the exit code.

    The run is measured and kept whatever happens here.
    """
    from ddp_profiler.conclusion import check_expectation, conclude
    from ddp_profiler.report.text import for_encoding

    again = f"The measurements are kept; try: ddp-profiler analyze {folder}"
    try:
        color = sys.stdout is not None and sys.stdout.isatty()
        summary, text = conclude(folder, color=color)
        write_out(for_encoding(text, getattr(sys.stdout, "encoding", None)))
        check_expectation(summary)
    except DdpProfilerError as error:
        return _complain(error, speaks=True)
    except Exception as error:
        if debug:
            traceback.print_exc()
        disk = isinstance(error, OSError) and error.errno in _DISK
        reason = f"{error}" if disk else _one_line(error)
        failure = InputError(f"rank 0 failed in writing the report: {reason}", again)
        return _complain(failure, speaks=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())

"""Worker entry: ``torchrun --nproc_per_node=N -m ddp_profiler.run``.

Every rank runs it. It wires workload, measurement, record and report together.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_profiler import units
from ddp_profiler._version import __version__
from ddp_profiler.analysis.results import Summary
from ddp_profiler.cli import error_text, parse_click, worker_options, write_out
from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import EXIT_DONE, CheckFailed, DdpProfilerError, InputError, UsageError
from ddp_profiler.load import load_summary
from ddp_profiler.measure.topology import Topology, place_levels, plan_levels, read_topology
from ddp_profiler.record import parts as record_parts
from ddp_profiler.record import paths, writer
from ddp_profiler.schema import (
    SCHEMA_VERSION,
    ClockReading,
    Failure,
    LevelFacts,
    LevelSettings,
    RecordPart,
    RunInfo,
)

NAME = "ddp_profiler.run"

_LAST_WAIT_S = 15.0
"""So long rank 0 waits for the others to close, once a collection has shown that some are gone."""


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
    if not isinstance(config, StudyConfig):  # --help was asked for
        return EXIT_DONE
    if not topology.launched:
        print(
            f"{NAME}: started without torchrun, so this is dp = 1 on one rank. For more: "
            "torchrun --nproc_per_node=N -m ddp_profiler.run",
            file=sys.stderr,
        )
    return _Worker(config, topology).run()


def _complain(error: DdpProfilerError, speaks: bool) -> int:
    """Prints an error and returns its exit code; what all ranks meet alike is printed once.

    torchrun ends all ranks when the first one ends. A rank that is not the one to speak
    waits for that; if it is still there after a moment, the error is its own.
    """
    if not speaks:
        time.sleep(2)
    print(f"{NAME}: {error_text(error)}", file=sys.stderr, flush=True)
    return error.exit_code


class _Worker:
    """One rank from its settings to its exit code."""

    def __init__(self, config: StudyConfig, topology: Topology) -> None:
        self.config = config
        self.topology = topology
        self.levels: tuple[LevelSettings, ...] = ()
        self.folder: Path | None = None
        self.info: RunInfo | None = None

    def run(self) -> int:
        rank = self.topology.rank
        try:
            self.levels = plan_levels(self.config, self.topology.world_size)
            prepared = self._prepare()
        except Exception as error:
            if self.config.debug:
                traceback.print_exc()
            if not isinstance(error, DdpProfilerError):
                error = InputError(
                    f"Rank {rank} could not be set up: {_one_line(error)}.",
                    "--debug shows the stack trace.",
                )
            return _complain(error, speaks=rank == 0)
        return self._measure(*prepared)

    def _prepare(self) -> tuple[Any, Any]:
        """Checks all that can be checked before ranks meet: one clear line, no timing lost."""
        from ddp_profiler.measure import batches, session, study
        from ddp_profiler.workload.plant import parse_plants

        parse_plants(self.config.plants)
        device = session.choose_device(
            self.topology, self.config.backend, self.config.threads_per_rank
        )
        workload = study.build_workload(self.config, self.levels[0].micro_batch)
        for level in self.levels:
            batches.check_data(workload, level)
        if self.topology.rank == 0:
            now = datetime.now().astimezone()
            folder = self.config.out or paths.default_folder(workload.name, now)
            paths.claim_folder(folder)
            self.folder = folder
            self.info = self._describe(workload, now)
            writer.write_run_info(folder, self.info)
        return device, workload

    def _describe(self, workload: Any, now: datetime) -> RunInfo:
        config = self.config
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(config).items()
        }
        settings |= {
            "tokens_per_sample": workload.tokens_per_sample,
            "model_options": dict(workload.options),
        }
        return RunInfo(
            schema_version=SCHEMA_VERSION,
            run_id=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
            status="running",
            created=now.isoformat(timespec="seconds"),
            profiler_version=__version__,
            world_size=self.topology.world_size,
            settings=settings,
            levels=self.levels,
        )

    def _measure(self, device: Any, workload: Any) -> int:
        from ddp_profiler.measure import study
        from ddp_profiler.measure.leave import leave

        phase = study.Phase()
        failures = _Failures(self.topology.rank)
        try:
            self._study(device, workload, phase, failures)
        except DdpProfilerError as error:
            if self.config.debug:
                traceback.print_exc()
            first = self._fail(failures, phase.name, str(error).splitlines()[0])
            leave(_complain(error, speaks=first))
        except KeyboardInterrupt:
            self._fail(failures, phase.name, "interrupted")
            leave(130)
        except (Exception, SystemExit) as error:
            if self.config.debug:
                traceback.print_exc()
            message = _one_line(error)
            first = self._fail(failures, phase.name, message)
            failure = InputError(
                f"rank {self.topology.rank} failed in {phase.name}: {message}",
                "--debug shows the stack trace; what was measured before is kept.",
            )
            leave(_complain(failure, speaks=first))
        if self.folder is not None and self.topology.rank == 0:
            return _conclude(self.folder, self.config.debug)
        return EXIT_DONE

    def _study(self, device: Any, workload: Any, phase: Any, failures: _Failures) -> None:
        from ddp_profiler.measure import collect, environment, study
        from ddp_profiler.measure.clock_sync import ClockSync, local_clock
        from ddp_profiler.measure.session import Session
        from ddp_profiler.report.progress import NoProgress, StudyProgress
        from ddp_profiler.workload.plant import parse_plants, planted_clock

        config, rank = self.config, self.topology.rank
        phase.name = "meeting the other ranks"
        session = Session(self.topology, device, config.timeout_s)
        failures.store = session.store
        if rank == 0:
            session.publish("run", (str(self.folder), self.info))
        folder_name, described = session.learn("run", tuple[str, RunInfo])
        folder, run_id = Path(folder_name), described.run_id
        phase.name = "agreeing on the run folder"
        parts = self._settle(session, folder, described)
        senders = [r for part in parts if part.keeper != 0 for r in part.ranks]
        phase.name = "meeting the other ranks"
        carrier = (
            collect.GroupCarrier(session, senders, own_group=device.backend != "gloo")
            if senders
            else None
        )
        clock = local_clock(planted_clock(parse_plants(config.plants), rank))
        places = session.gather_places(clock.domain)
        self.levels = place_levels(self.levels, places, config.placement)
        node = places[rank].node
        if rank == min(place.rank for place in places if place.node == node):
            session.publish(
                f"environment/{node}",
                environment.describe(
                    device.device, device.threads, self.topology.local_world_size, device.backend
                ),
            )
        phase.name = "checking what the backend can reduce"
        session.check_reducible({p.dtype for p in workload.module.parameters() if p.requires_grad})
        if rank == 0 and self.info is not None:
            nodes = sorted({place.node for place in places})
            self.info = replace(
                self.info,
                levels=self.levels,
                ranks=places,
                environment={str(n): session.learn(f"environment/{n}") for n in nodes},
                parts=parts,
            )
            session.publish("described", self.info)
            print(f"{NAME}: {self._plan_line(workload, device)}", file=sys.stderr)
            if config.placement == "spread" and not any(
                level.placement == "spread" for level in self.levels
            ):
                print(
                    f"{NAME}: --placement spread changes nothing here: no level between dp = 1 "
                    f"and {self.topology.world_size} can use more nodes.",
                    file=sys.stderr,
                )
        elif self.info is not None:
            self.info = replace(session.learn("described", RunInfo), keeper=rank)
        self._keep()
        del workload

        phase.name = "making the group that compares clocks"
        clock_sync = ClockSync(places, rank, clock, session.timeout)
        stream = writer.SpanWriter(folder, rank, run_id)
        progress = StudyProgress(len(self.levels) * config.repeat) if rank == 0 else NoProgress()
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
            ).run()
        finally:
            stream.close()
        phase.name = "collecting the parts of other nodes"
        lost = self._collect(carrier, senders, folder) if carrier else {}
        phase.name = "closing"
        if lost is None:
            # Not even the store can be reached: what this node measured is complete all the same.
            pass
        elif not lost:
            session.close(heartbeat=collect.HEARTBEAT)
        else:
            # A node that is gone may be why, and what is here can be analysed.
            with contextlib.suppress(DdpProfilerError, RuntimeError):
                session.close(limit_s=_LAST_WAIT_S)
        if self.info is not None:
            self.info = replace(self.info, status="complete")
            self._keep()
        if lost:
            _tell_lost(parts, lost, folder)

    def _settle(self, session: Any, folder: Path, described: RunInfo) -> tuple[RecordPart, ...]:
        """Finds this rank's folder: the run's own, or one that this node claims for the run."""
        from ddp_profiler.measure.folders import settle_folders

        def claim() -> None:
            paths.claim_folder(folder)
            self.folder, self.info = folder, replace(described, keeper=session.rank)
            self._keep()

        try:
            return settle_folders(
                session,
                self.topology.world_size,
                socket.gethostname(),
                folder,
                lambda: record_parts.keeper_of(folder, described.run_id),
                claim,
            )
        except UsageError:
            # Nothing was measured: the folder is free for the next try.
            if self.folder is not None:
                paths.release_folder(self.folder)
                self.folder = self.info = None
            raise

    def _collect(self, carrier: Any, senders: Sequence[int], folder: Path) -> dict[int, str] | None:
        """Brings the files that rank 0 does not see to it.

        Returns:
            On rank 0 the ranks whose files did not come, each with the reason. On other ranks
            nothing, or None if rank 0 cannot be reached any more.
        """
        from ddp_profiler.measure import collect

        rank = self.topology.rank
        if rank == 0:
            return collect.collect(
                carrier,
                senders,
                lambda sender, size, sha256: record_parts.PartWriter(folder, sender, size, sha256),
                _CollectionProgress(),
            )
        if rank not in senders:
            return {}
        reason = collect.hand_over(carrier, paths.rank_file(folder, rank))
        if not reason:
            return {}
        error = InputError(
            f"rank {rank} could not hand over its part ({reason}). It is kept on "
            f"{socket.gethostname()} in {folder.absolute()}.",
            "Copy that folder to rank 0's node and join both with: ddp-profiler merge",
        )
        print(f"{NAME}: {error_text(error)}", file=sys.stderr, flush=True)
        return None

    def _keep(self) -> None:
        """Writes run.json, where this rank keeps one."""
        if self.folder is not None and self.info is not None:
            writer.write_run_info(self.folder, self.info)

    def _keep_facts(self, facts: tuple[LevelFacts, ...], clocks: tuple[ClockReading, ...]) -> None:
        """Writes what is known so far: a run that dies later can be read."""
        if self.info is not None:
            self.info = replace(self.info, facts=facts, clocks=clocks)
            self._keep()

    def _plan_line(self, workload: Any, device: Any) -> str:
        size = sum(p.numel() for p in workload.module.parameters() if p.requires_grad)
        levels = ", ".join(level.id for level in self.levels)
        return (
            f"{workload.name}, {size:,} parameters, {device.backend} on {device.device.type}, "
            f"{device.threads} threads a rank; levels: {levels}"
        )

    def _fail(self, failures: _Failures, phase: str, message: str) -> bool:
        """Keeps the failure in run.json; tells whether it is the first one of all ranks."""
        known = failures.note(phase, message)
        if self.folder is not None and self.info is not None:
            self.info = replace(self.info, status="failed", failures=known)
            try:
                writer.write_run_info(self.folder, self.info)
            except OSError as error:
                print(f"{NAME}: run.json cannot be written: {error}", file=sys.stderr)
        return known[0].rank == self.topology.rank


class _CollectionProgress:
    """Says on stderr how far a collection is, if it takes long."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + 2

    def __call__(self, done: int, total: int) -> None:
        """Is told how many bytes have come, of how many."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + 10
            print(
                f"{NAME}: collecting the parts of other nodes: {units.nbytes(done)} of "
                f"{units.nbytes(total)}",
                file=sys.stderr,
                flush=True,
            )


def _tell_lost(parts: Sequence[RecordPart], lost: Mapping[int, str], folder: Path | None) -> None:
    """Says which ranks' files were not collected, where they are, and what to do."""
    if not lost:
        return
    kept = [
        f"{units.ranks(there)} on {part.hostname} in {part.folder}"
        for part in parts
        if (there := [rank for rank in part.ranks if rank in lost])
    ]
    error = InputError(
        f"not all parts were collected ({'; '.join(dict.fromkeys(lost.values()))}). They are "
        f"kept: {'; '.join(kept)}.",
        f"Copy what is missing to this node and join: ddp-profiler merge {folder} DIR... --out RUN",
    )
    print(f"{NAME}: {error_text(error)}", file=sys.stderr, flush=True)


class _Failures:
    """Failures of all ranks, in the order in which they were noted in the store."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.store: Any = None

    def note(self, phase: str, message: str) -> tuple[Failure, ...]:
        """Notes this rank's failure and returns all that are known."""
        own = Failure(self._rank, phase, message)
        if self.store is None:
            return (own,)
        try:
            number = self.store.add("failures", 1)
            self.store.set(f"failure/{number}", f"{self._rank}\n{phase}\n{message}")
            found = []
            for earlier in range(1, number):
                rank, *texts = self.store.get(f"failure/{earlier}").decode().split("\n", 2)
                found.append(Failure(int(rank), *texts))
        except Exception:  # the store may be what failed
            return (own,)
        return (*found, own)


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the model called sys.exit({error.code})"
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno})" if frames else message


def _conclude(folder: Path, debug: bool) -> int:
    """Analyses a finished run, prints its table and where its files are; returns the exit code.

    The run is measured and kept whatever happens here.
    """
    from ddp_profiler.report import console, plots

    again = f"The measurements are kept; try: ddp-profiler analyze {folder}"
    try:
        summary = load_summary(folder)
        writer.write_json(paths.summary_file(folder), summary)
        saved = plots.save_all(summary, folder)
        lines = [f"  {path}" for path in (paths.summary_file(folder), *saved)]
        text = "\n".join(
            [
                console.render(summary, color=sys.stdout is not None and sys.stdout.isatty()),
                *lines,
                f"Run folder: {folder}",
            ]
        )
        write_out(console.for_encoding(text + "\n", getattr(sys.stdout, "encoding", None)))
        _check_expectation(summary)
    except DdpProfilerError as error:
        return _complain(error, speaks=True)
    except Exception as error:
        if debug:
            traceback.print_exc()
        failure = InputError(f"The result could not be shown: {_one_line(error)}", again)
        return _complain(failure, speaks=True)
    return EXIT_DONE


def _check_expectation(summary: Summary) -> None:
    """Compares the observed global batch with the one that the user expects.

    Raises:
        CheckFailed: They differ at a level that the user's word is about.
    """
    wrong = [
        f"{level.id} {level.batch_check.observed}"
        for level in summary.levels
        if level.batch_check.declared is not None
        and level.batch_check.observed != level.batch_check.declared
    ]
    if wrong:
        expected = summary.run.settings["expect_global_batch"]
        raise CheckFailed(
            f"The global batch is not {expected} samples a step; observed: {', '.join(wrong)}.",
            "It is micro-batch x accumulation x dp; see the table above.",
        )


if __name__ == "__main__":
    sys.exit(main())

"""Worker entry: ``torchrun --nproc_per_node=N -m ddp_profiler.run``.

Every rank runs it. It wires workload, measurement, record and report together.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from ddp_profiler._version import __version__
from ddp_profiler.analysis.results import Summary
from ddp_profiler.cli import parse_click, worker_options, write_out
from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import EXIT_DONE, CheckFailed, DdpProfilerError, InputError
from ddp_profiler.load import load_summary
from ddp_profiler.measure.topology import Topology, plan_levels, read_topology
from ddp_profiler.record import paths, writer
from ddp_profiler.schema import (
    SCHEMA_VERSION,
    Failure,
    LevelFacts,
    LevelSettings,
    RankPhase,
    RunInfo,
)

NAME = "ddp_profiler.run"
_TIMED_OUT = (
    "A rank has died or hangs, or a link is down; --timeout S waits longer. What was measured "
    "before is kept."
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
    print(f"{NAME}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


class _Worker:
    """One rank from its settings to its exit code."""

    def __init__(self, config: StudyConfig, topology: Topology) -> None:
        self.config = config
        self.topology = topology
        self.levels: tuple[LevelSettings, ...] = ()
        self.folder: Path | None = None
        self.info: RunInfo | None = None
        self._info_lock = threading.Lock()

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
            # Once on each node: the setting or the machine at fault may be one node's own.
            return _complain(error, speaks=self.topology.local_rank == 0)
        return self._measure(*prepared)

    def _prepare(self) -> tuple[Any, Any]:
        """Checks all that can be checked before ranks meet: one clear line, no timing lost."""
        from ddp_profiler.measure import batches, interfaces, session, study
        from ddp_profiler.workload.plant import parse_plants

        parse_plants(self.config.plants)
        device = session.choose_device(
            self.topology, self.config.backend, self.config.threads_per_rank
        )
        interfaces.find_route(device.backend)
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
        from ddp_profiler.aftermath import Aftermath
        from ddp_profiler.measure import study
        from ddp_profiler.measure.bounded import StoreLostError
        from ddp_profiler.measure.leave import leave

        phase = study.Phase()
        aftermath = Aftermath(self.topology.rank, self._keep_failure, _say)
        try:
            self._study(device, workload, phase, aftermath)
        except DdpProfilerError as error:
            if self.config.debug:
                traceback.print_exc()
            shown: DdpProfilerError = error
            if isinstance(error, StoreLostError):
                where = f"rank {self.topology.rank} on {socket.gethostname()}"
                shown = InputError(f"{where} failed in {phase.name}: {error.message}", error.remedy)
            self._give_up(aftermath, phase.name, error.message, shown)
        except KeyboardInterrupt:
            aftermath.note(phase.name, "interrupted")
            aftermath.keep_now()
            leave(130)
        except (Exception, SystemExit) as error:
            if self.config.debug:
                traceback.print_exc()
            message = _one_line(error)
            failure = InputError(
                f"rank {self.topology.rank} failed in {phase.name}: {message}",
                _TIMED_OUT
                if "timed out" in message.lower()
                else "--debug shows the stack trace; what was measured before is kept.",
            )
            self._give_up(aftermath, phase.name, message, failure)
        if self.folder is not None:
            return _conclude(self.folder, self.config.debug)
        return EXIT_DONE

    def _give_up(
        self, aftermath: Any, phase: str, message: str, error: DdpProfilerError
    ) -> NoReturn:
        """Ends this rank after an error; of all ranks' errors the first one is shown."""
        from ddp_profiler.measure.leave import leave

        topology, host = self.topology, socket.gethostname()
        first = aftermath.note(phase, message)
        if not aftermath.met:
            aftermath.finish()
            leave(_complain(error, speaks=topology.local_rank == 0))
        if first.rank == topology.rank:
            _complain(error, speaks=True)
        elif first.hostname != host and topology.local_rank == 0:
            _say(
                f"rank {topology.rank} on {host} ended in {phase}, after rank {first.rank} on "
                f"{first.hostname} had failed in {first.phase}: {first.message}"
            )
        aftermath.finish()
        leave(error.exit_code)

    def _study(self, device: Any, workload: Any, phase: Any, aftermath: Any) -> None:
        from ddp_profiler.measure import environment, study
        from ddp_profiler.measure.session import Session
        from ddp_profiler.report.progress import NoProgress, StudyProgress

        config, rank = self.config, self.topology.rank
        phase.name = "meeting the other ranks"
        session = Session(self.topology, device, config.timeout_s, join=False)
        aftermath.begin(session, phase)
        phase.name = "starting the process group"
        session.join()
        if self.info is not None:
            session.publish("run", [str(self.folder), self.info.run_id])
        folder_name, run_id = session.learn("run", tuple[str, str])
        folder = Path(folder_name)
        folder.mkdir(parents=True, exist_ok=True)
        places = session.gather_places()
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
        if self.info is not None:
            nodes = sorted({place.node for place in places})
            self._update(
                ranks=places,
                environment={str(n): session.learn(f"environment/{n}") for n in nodes},
            )
            print(f"{NAME}: {self._plan_line(workload, device)}", file=sys.stderr)
        del workload

        stream = writer.SpanWriter(folder, rank, run_id)
        progress = StudyProgress(len(self.levels) * config.repeat) if rank == 0 else NoProgress()
        try:
            study.Study(
                config, self.levels, session, stream.write, progress, phase, self._keep_facts
            ).run()
        finally:
            stream.close()
        phase.name = "closing"
        session.close()
        self._update(status="complete")

    def _keep_facts(self, facts: tuple[LevelFacts, ...]) -> None:
        """Writes what is known of the levels so far: a run that dies later can be read."""
        self._update(facts=facts)

    def _plan_line(self, workload: Any, device: Any) -> str:
        size = sum(p.numel() for p in workload.module.parameters() if p.requires_grad)
        levels = ", ".join(level.id for level in self.levels)
        return (
            f"{workload.name}, {size:,} parameters, {device.backend} on {device.device.type}, "
            f"{device.threads} threads a rank; levels: {levels}"
        )

    def _keep_failure(self, failures: tuple[Failure, ...], phases: tuple[RankPhase, ...]) -> None:
        """Keeps failures in run.json; called on the main thread or while it hangs."""
        if self.folder is None or self.info is None:
            return
        try:
            self._update(status="failed", failures=failures, phases=phases)
        except OSError as error:
            _say(f"run.json cannot be written: {error}")

    def _update(self, **changes: Any) -> None:
        """Writes ``run.json`` with some fields changed."""
        with self._info_lock:
            if self.folder is not None and self.info is not None:
                self.info = replace(self.info, **changes)
                writer.write_run_info(self.folder, self.info)


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

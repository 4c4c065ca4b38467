"""Worker entry: ``torchrun --nproc_per_node=N -m ddp_profiler.run``.

Every rank runs it. It wires workload, measurement, record and report together.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ddp_profiler._version import __version__
from ddp_profiler.analysis.results import Summary
from ddp_profiler.cli import parse_click, write_out
from ddp_profiler.config import (
    BACKENDS,
    DEFAULT_MICRO_BATCH,
    DEFAULT_MODEL,
    PRECISIONS,
    SCALINGS,
    StudyConfig,
    parse_numbers,
)
from ddp_profiler.errors import EXIT_DONE, CheckFailed, DdpProfilerError, InputError
from ddp_profiler.load import load_summary
from ddp_profiler.measure.topology import Topology, plan_levels, read_topology
from ddp_profiler.record import paths, writer
from ddp_profiler.schema import SCHEMA_VERSION, Failure, LevelFacts, LevelSettings, RunInfo
from ddp_profiler.workload.catalog import BUILTIN_MODELS

NAME = "ddp_profiler.run"

_MODELS = "\n".join(f"    {name:<10} {text}" for name, text in BUILTIN_MODELS.items())
_HELP = f"""Time every part of a data-parallel training step at several scales.

Trains a model at dp = 1, 2, 4, ... up to the number of ranks, in this one launch,
and shows how long data, forward, backward, exposed and hidden communication and
the optimizer take at each. Works without any option.

\b
Examples:
    torchrun --nproc_per_node=8 -m ddp_profiler.run
    torchrun --nproc_per_node=8 -m ddp_profiler.run --data FILE --accumulate 1,4
    torchrun --nproc_per_node=2 -m ddp_profiler.run --model mlp:width=2048 --dp 2

\b
Models (options after a colon, as in mlp:width=2048,depth=8):
{_MODELS}
    package.module:factory   a model of your own, see docs/custom-models.md

Exit codes: 0 done; 1 a check that you asked for does not hold; 2 wrong usage or
settings; 3 unusable input. torchrun itself ends with 1 when a rank fails.
"""


def _numbers(
    _: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    if text is None or (text == "all" and parameter.name == "dp"):
        return None
    return parse_numbers(parameter.opts[0], text)


_defaults = StudyConfig()


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Model, with its options.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Any text file: trains a byte-level language model on it. Default: synthetic data.",
)
@click.option(
    "--dp",
    default="all",
    callback=_numbers,
    show_default=True,
    help="Data-parallel sizes to measure, such as 1,2,8; all: powers of two and the world size.",
)
@click.option(
    "--accumulate",
    callback=_numbers,
    help="Micro-steps in an optimizer step; several values, as in 1,4, are several levels. "
    "Default: 1, or what --global-batch and --micro-batch ask for.",
)
@click.option(
    "--micro-batch",
    type=int,
    help=f"Samples of one rank in one micro-step. Default: {DEFAULT_MICRO_BATCH}, or what "
    "--global-batch and --accumulate ask for.",
)
@click.option(
    "--scaling",
    metavar="|".join(SCALINGS),
    help="weak: micro-batch and accumulation stay; strong: the global batch stays. "
    "Default: strong with --global-batch, else weak.",
)
@click.option(
    "--global-batch",
    type=int,
    help="Samples in an optimizer step over all ranks: micro-batch x accumulation x dp.",
)
@click.option(
    "--expect-global-batch",
    type=int,
    help="The global batch that you believe to have: exit code 1 if another is observed at "
    "the largest dp (strong scaling: at any).",
)
@click.option(
    "--repeat",
    type=int,
    default=1,
    show_default=True,
    help="Measure each level afresh this often, in shuffled order; intervals then come from "
    "these repetitions.",
)
@click.option(
    "--steps",
    type=int,
    default=_defaults.steps,
    show_default=True,
    help="Optimizer steps to measure at each level, plain and instrumented each.",
)
@click.option(
    "--warmup",
    type=int,
    default=_defaults.warmup,
    show_default=True,
    help="Optimizer steps before that; recorded, left out of the figures.",
)
@click.option(
    "--precision",
    default=_defaults.precision,
    show_default=True,
    metavar="|".join(PRECISIONS),
    help="bf16 and fp16 mean autocast; parameters and gradients stay fp32.",
)
@click.option(
    "--bucket-cap-mb",
    type=float,
    default=_defaults.bucket_cap_mb,
    show_default=True,
    help="Size limit of DDP's gradient buckets, in MB of 2^20 bytes.",
)
@click.option(
    "--allreduce-max-mb",
    type=float,
    default=_defaults.allreduce_max_mb,
    show_default=True,
    help="Largest message of the AllReduce sweep in isolation; 0 leaves the sweep out.",
)
@click.option(
    "--backend",
    default=_defaults.backend,
    show_default=True,
    metavar="|".join(BACKENDS),
    help="auto: nccl where each rank has a GPU of its own, else gloo.",
)
@click.option(
    "--threads-per-rank",
    type=int,
    help="Threads of each rank at every dp. Default: the node's cores shared out evenly.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=_defaults.timeout_s,
    show_default=True,
    help="Seconds after which waiting for another rank is given up.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run folder to create. Default: a fresh one below runs/.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of parameters and data.")
@click.option(
    "--plant",
    "plants",
    multiple=True,
    metavar="SPEC",
    help="FOR TESTS ONLY: add a delay, as in part=backward,ms=30,rank=1.",
)
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def _command(**options: Any) -> StudyConfig:
    return StudyConfig(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this rank's part of a study and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        topology = read_topology(os.environ)
    except DdpProfilerError as error:
        return _complain(error, speaks=True)
    speaks = topology.rank == 0
    try:
        config = parse_click(_command, given, NAME, quiet=not speaks)
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
        if self.folder is not None:
            return _conclude(self.folder, self.config.debug)
        return EXIT_DONE

    def _study(self, device: Any, workload: Any, phase: Any, failures: _Failures) -> None:
        from ddp_profiler.measure import environment, study
        from ddp_profiler.measure.session import Session
        from ddp_profiler.report.progress import NoProgress, StudyProgress

        config, rank = self.config, self.topology.rank
        phase.name = "meeting the other ranks"
        session = Session(self.topology, device, config.timeout_s)
        failures.store = session.store
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
            self.info = replace(
                self.info,
                ranks=places,
                environment={str(n): session.learn(f"environment/{n}") for n in nodes},
            )
            writer.write_run_info(folder, self.info)
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
        if self.info is not None:
            self.info = replace(self.info, status="complete")
            writer.write_run_info(folder, self.info)

    def _keep_facts(self, facts: tuple[LevelFacts, ...]) -> None:
        """Writes what is known of the levels so far: a run that dies later can be read."""
        if self.folder is not None and self.info is not None:
            self.info = replace(self.info, facts=facts)
            writer.write_run_info(self.folder, self.info)

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

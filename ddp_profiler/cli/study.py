"""``ddp-profiler study``: a training script at several dp, one launch each, analysed together."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime
from pathlib import Path

import click

from ddp_profiler import units
from ddp_profiler.cli import NAME, write_out
from ddp_profiler.config import parse_numbers


@click.command(
    "study", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)
@click.option(
    "--dp",
    metavar="N,...",
    required=True,
    callback=lambda _, __, text: parse_numbers("--dp", text),
    help="Data-parallel sizes to launch, such as 1,2,4.",
)
@click.option(
    "--keep-global-batch",
    metavar="ARG",
    help="The script's own argument for its batch on a rank, or for its accumulation. Its value "
    "is meant for dp = 1 and is divided by dp: the global batch stays (strong scaling). Exit code "
    "1 if it was observed not to.",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    default=20,
    show_default=True,
    help="Optimizer steps to observe at each dp, plain and instrumented each.",
)
@click.option(
    "--warmup",
    type=int,
    metavar="N",
    default=5,
    show_default=True,
    help="Optimizer steps before that; recorded, left out of the figures.",
)
@click.option("--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.option(
    "--batch-dim",
    type=int,
    metavar="D",
    default=0,
    show_default=True,
    help="The dimension of the model's first input that counts samples.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run folder to create. Default: a fresh one below runs/.",
)
@click.argument(
    "script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]..."
)
def command(
    dp: tuple[int, ...],
    keep_global_batch: str | None,
    steps: int,
    warmup: int,
    module: bool,
    batch_dim: int,
    out: Path | None,
    script: tuple[str, ...],
) -> None:
    """Launch SCRIPT once for each dp, on this machine, and compare.

    Each launch is a torchrun of its own, with ports of its own, and with the same number
    of threads a rank. The script needs no change. What the launches print is kept in
    RUN/launches/; the table at the end compares them as a built-in study would.

    \b
    Examples:
        ddp-profiler study --dp 1,2,4 -- train.py --lr 3e-4
        ddp-profiler study --dp 1,2 --keep-global-batch --batch-size \\
            -- train.py --batch-size 64
    """  # noqa: D301 (click needs the character itself)
    from ddp_profiler import launches
    from ddp_profiler.conclusion import check_kept_batch, conclude
    from ddp_profiler.errors import UsageError
    from ddp_profiler.record import paths
    from ddp_profiler.record.launches import join_launches, read_launch
    from ddp_profiler.report.text import for_encoding

    if min(dp) < 1:
        raise UsageError(f"--dp {min(dp)} is below 1.", "Give sizes such as --dp 1,2,4.")
    now = datetime.now().astimezone()
    name = script[0] if module else Path(script[0]).stem
    options = ("--steps", str(steps), "--warmup", str(warmup), "--batch-dim", str(batch_dim))

    def plan(folder: Path) -> tuple[launches.Launch, ...]:
        given = (*options, *(("--module",) if module else ()))
        return launches.plan_launches(dp, folder, script, given, keep_global_batch)

    # Before a folder is taken: what cannot be planned leaves none behind.
    plan(Path())
    if out is None:
        folder = paths.claim_default_folder(f"{name}-study", now)
    else:
        folder = paths.tidy(out)
        paths.claim_folder(folder)
    planned = plan(folder)
    environ = launches.environment(max(dp), _tell)
    done = []
    begun: list[launches.Launch] = []
    try:
        for number, launch in enumerate(planned, 1):
            _tell(f"[{number}/{len(planned)}] dp {launch.dp} ...")
            begin = time.monotonic()
            begun.append(launch)
            with launches.ended_by_signals():
                launches.run_launch(launch, environ)
            _tell(f"[{number}/{len(planned)}] dp {launch.dp}  {time.monotonic() - begin:.1f} s")
            # Before it counts: one launch without a level must not cost those before it.
            read_launch(launch.folder)
            done.append(launch.folder)
    finally:
        # What was measured before a launch failed is kept and can be read.
        if len(done) < len(begun) and paths.is_run(begun[-1].folder):
            _tell(
                f"what the launch at dp {begun[-1].dp} recorded is kept: "
                f"ddp-profiler analyze {shlex.quote(str(begun[-1].folder))}"
            )
        if not done:
            paths.release_folder(folder)
        else:
            settings = {"dp": list(dp), "keep_global_batch": keep_global_batch}
            join_launches(done, folder, settings, now)
            if len(done) < len(planned):
                sizes = ", ".join(str(launch.dp) for launch in planned[: len(done)])
                _tell(
                    f"what was measured at dp {sizes} is kept: "
                    f"ddp-profiler analyze {shlex.quote(str(folder))}"
                )
    color = sys.stdout is not None and sys.stdout.isatty()
    summary, text = conclude(folder, color=color)
    write_out(for_encoding(text, getattr(sys.stdout, "encoding", None)))
    unknown = check_kept_batch(summary)
    if unknown:
        _tell(unknown)


def _tell(text: str) -> None:
    units.tell(NAME, text)

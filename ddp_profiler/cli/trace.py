"""``ddp-profiler trace``: where the time went, from Kineto traces of any training job."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click

from ddp_profiler.cli import ascii_json, write_out
from ddp_profiler.errors import UsageError


@click.command("trace")
@click.argument(
    "paths", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in us.")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Rank of the file, where the file does not say it.",
)
@click.option(
    "--lenient",
    is_flag=True,
    help="Repair broken names and cut files where that is safe, and count it.",
)
@click.option(
    "--max-unpacked-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Most GB that a compressed file may unpack to.  [default: 17]",
)
@click.option(
    "--timeline",
    metavar="FILE.json.gz",
    type=click.Path(path_type=Path),
    help="Write the parts of all ranks on one clock, for Perfetto.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Ranks to read at once.  [default: one a core]",
)
def command(
    paths: tuple[Path, ...],
    as_json: bool,
    rank: int | None,
    lenient: bool,
    max_unpacked_gb: float | None,
    timeline: Path | None,
    jobs: int | None,
) -> None:
    """Show where the time of each step went, from traces of torch.profiler.

    FILE is a trace of one rank, .json or .json.gz; FOLDER holds those of several.
    They may come from any framework, from NVIDIA or AMD GPUs, or from gloo on CPUs.
    A rank's steps are split into computation, communication, what of it overlaps
    with computation, copies, and idling. Of several ranks, their clocks are tied by
    collectives that end together, and waiting for others is told from transfer.
    Nothing is changed.

    \b
    Examples:
        ddp-profiler trace traces/
        ddp-profiler trace rank0.json.gz --json | jq '.ranks[0].total'
        ddp-profiler trace traces/ --timeline timeline.json.gz
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading traces needs.
    import os

    from ddp_profiler.report import console, traces
    from ddp_profiler.report.progress import ReadingProgress
    from ddp_profiler.trace import gather
    from ddp_profiler.trace.analysis import analyse
    from ddp_profiler.trace.source import DEFAULT_LIMIT_BYTES
    from ddp_profiler.trace.timeline import check_target, write_timeline

    if max_unpacked_gb is not None and not math.isfinite(max_unpacked_gb):
        raise UsageError(
            f"--max-unpacked-gb {max_unpacked_gb} is no size.", "Give a number of GB, such as 100."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if timeline is not None:
        check_target(timeline, paths)
    limit = DEFAULT_LIMIT_BYTES if max_unpacked_gb is None else int(max_unpacked_gb * 1e9)
    with ReadingProgress() as progress:
        found = gather.read_ranks(
            paths,
            rank=rank,
            lenient=lenient,
            limit_bytes=limit,
            jobs=jobs or cores or 1,
            progress=progress.tell,
        )
    analysis = analyse(found)
    written = None
    if timeline is not None:
        written = write_timeline(timeline, found.ranks, analysis.across)
    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        # Piece by piece: there may be some hundred bytes for each collective.
        for piece in traces.json_pieces(found, analysis, written):
            write_out(ascii_json(piece, encoding))
    else:
        color = sys.stdout is not None and sys.stdout.isatty()
        write_out(
            console.for_encoding(traces.render(found, analysis, written, color=color), encoding)
        )

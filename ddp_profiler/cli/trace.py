"""``ddp-profiler trace``: where the time went, from Kineto traces of any training job."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ddp_profiler import units
from ddp_profiler.cli import ascii_json, write_out
from ddp_profiler.errors import UsageError


@click.command("trace")
@click.argument(
    "paths", metavar="FILE|FOLDER|RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, times in us.")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="N",
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
    metavar="GB",
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
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Also write trace.json, trace.txt and pictures into the new folder DIR.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks to read at once.  [default: one a core]",
)
def command(
    paths: tuple[Path, ...],
    as_json: bool,
    rank: int | None,
    lenient: bool,
    max_unpacked_gb: float | None,
    timeline: Path | None,
    out: Path | None,
    jobs: int | None,
) -> None:
    """Show where the time of each step went, from traces of torch.profiler.

    FILE is a trace of one rank, .json or .json.gz; FOLDER holds those of several.
    They may come from any framework, from NVIDIA or AMD GPUs, or from gloo on CPUs.
    A rank's steps are split into computation, communication, what of it overlaps
    with computation, copies, and idling. Of several ranks, their clocks are tied by
    collectives that end together, and waiting for others is told from transfer.
    RUN is the folder of a study with --kineto: each of its levels is shown, and
    torch.profiler's record beside the study's own of the same steps. Nothing is
    changed.

    \b
    Examples:
        ddp-profiler trace traces/
        ddp-profiler trace rank0.json.gz --json | jq '.ranks[0].total'
        ddp-profiler trace traces/ --timeline timeline.json.gz --out report
        ddp-profiler trace runs/NAME --json | jq '.compared'
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading traces needs.
    import os

    from ddp_profiler.record import paths as run_paths
    from ddp_profiler.report import traces
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
    if out is not None:
        # It loads matplotlib.
        from ddp_profiler.report.trace_folder import check_folder

        check_folder(out)
    how: dict[str, Any] = {
        "lenient": lenient,
        "limit_bytes": DEFAULT_LIMIT_BYTES
        if max_unpacked_gb is None
        else int(max_unpacked_gb * 1e9),
        "jobs": jobs or cores or 1,
    }
    runs = [path for path in paths if run_paths.is_run(path)]
    if runs:
        _refuse_beside_run(runs[0], len(paths) > 1 or rank is not None)
        _show_run(runs[0], how, timeline, out, as_json=as_json)
        return
    with ReadingProgress() as progress:
        found = gather.read_ranks(paths, rank=rank, progress=progress.tell, **how)
    analysis = analyse(found)
    written = None
    if timeline is not None:
        written = write_timeline(timeline, found.ranks, analysis.across)
    _show(
        lambda: traces.json_pieces(found, analysis, written),
        lambda color: traces.render(found, analysis, written, color=color),
        out,
        {"": (found, analysis)},
        as_json=as_json,
    )


def _refuse_beside_run(run: Path, others: bool) -> None:
    if others:
        raise UsageError(
            f"{run} is a run folder, which is read alone and states its ranks.",
            f"Leave --rank and other paths out, or name the folder of one level: {run}/kineto/"
            "LEVEL.",
        )


def _show_run(
    folder: Path, how: Mapping[str, Any], timeline: Path | None, out: Path | None, *, as_json: bool
) -> None:
    """Shows the traces of a run's levels beside the run's own record."""
    from ddp_profiler import captured
    from ddp_profiler.report import captured as report
    from ddp_profiler.report.progress import ReadingProgress
    from ddp_profiler.trace.analysis import analyse
    from ddp_profiler.trace.timeline import write_timeline

    if timeline is not None and len(levels := captured.levels_with_traces(folder)) > 1:
        raise UsageError(
            f"{folder} has traces of {len(levels)} levels; a timeline is of one.",
            f"Name its folder, such as {folder}/kineto/{levels[-1]}.",
        )
    with ReadingProgress() as progress:
        run = captured.read_captured(folder, progress=progress.tell, **how)
    analyses = [analyse(level.found) for level in run.levels]
    written = None
    if timeline is not None:
        written = write_timeline(timeline, run.levels[0].found.ranks, analyses[0].across)
    _show(
        lambda: report.json_pieces(run, analyses, written),
        lambda color: report.render(run, analyses, written, color=color),
        out,
        {
            level.level: (level.found, analysis)
            for level, analysis in zip(run.levels, analyses, strict=True)
        },
        as_json=as_json,
    )


def _show(
    content: Callable[[], Iterable[str]],
    render: Callable[[bool], str],
    out: Path | None,
    pictures: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Prints the table or the JSON, and writes both with pictures where that is asked for.

    Args:
        content: Makes the JSON, in pieces.
        render: Makes the table, with or without colour.
        out: Folder for all of it; None for none.
        pictures: What is drawn, as for ``trace_folder.write_folder``.
        as_json: Whether JSON is printed, and nothing else.
    """
    from ddp_profiler.report.text import for_encoding

    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    files = []
    if out is not None:
        from ddp_profiler.report.trace_folder import write_folder

        text = "".join(ascii_json(piece, "ascii") for piece in content())
        files = write_folder(out, text, render(False), pictures)
    if as_json:
        # Piece by piece: there may be some hundred bytes for each collective.
        for piece in content():
            write_out(ascii_json(piece, encoding))
        return
    table = render(sys.stdout is not None and sys.stdout.isatty())
    lines = [units.printable(f"  {path}") + "\n" for path in files]
    write_out(for_encoding("".join([table, *lines]), encoding))

"""``ddp-profiler merge``: joins the folders that nodes without a shared file system kept."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddp_profiler import units
from ddp_profiler.cli import write_out


@click.command("merge")
@click.argument(
    "folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--out",
    metavar="RUN",
    required=True,
    type=click.Path(path_type=Path),
    help="Run folder to create; one that holds a run is refused.",
)
def command(folders: tuple[Path, ...], out: Path) -> None:
    """Join the folders that the nodes of one run kept, into the new folder RUN.

    Nodes without a shared file system each keep the files of their own ranks. A run
    collects them at its end; where that failed, it says so. Then copy the nodes'
    folders to one machine and join them. They must be of the same run. Ranks that
    are in none of them are named, and the rest is joined. The folders stay as they
    are.

    \b
    Example, for a run on node0 and node1 with --out runs/NAME, on node0:
        scp -r node1:$PWD/runs/NAME node1-part
        ddp-profiler merge runs/NAME node1-part --out runs/NAME-joined
        ddp-profiler analyze runs/NAME-joined
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading a run needs.
    from ddp_profiler.record import parts
    from ddp_profiler.report.text import for_encoding

    merged = parts.merge(folders, out)
    lines = [f"Run {merged.info.run_id}, {merged.info.status}"]
    for folder, ranks in merged.ranks.items():
        lines.append(f"  {folder}: {units.ranks(ranks) if ranks else 'nothing new'}")
    if merged.missing:
        lines.append(f"  missing: {units.ranks(merged.missing)}")
    lines.append(f"Run folder: {out}")
    text = "\n".join(units.printable(line) for line in lines) + "\n"
    write_out(for_encoding(text, getattr(sys.stdout, "encoding", None)))

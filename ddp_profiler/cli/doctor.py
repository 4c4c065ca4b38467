"""``ddp-profiler doctor``: what decides the speed of several ranks, looked at before a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ddp_profiler.cli import ascii_json, write_out
from ddp_profiler.errors import EXIT_CHECK_FAILED, EXIT_DONE


@click.command("doctor")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks that you would start on this node.  [default: what the launcher says, else one "
    "for each GPU, else 2]",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes of the run: with one, what only other nodes would stumble on is left out; with "
    "several, a loopback interface is an ERROR.  [default: what the launcher says]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Where run folders would be written.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as JSON, with all facts that were read.",
)
def command(ranks: int | None, nodes: int | None, out: Path, as_json: bool) -> int:
    """Look at this machine before a run: what decides the speed of several ranks.

    torch and NCCL (the library that is loaded, and the wheels), driver, GPUs and their
    links, the interfaces that gloo and NCCL would take, names, ports, cores and threads,
    clocks, disk, limits, variables and combinations that are known to hurt. Each line is
    ok, WARNING or ERROR with a remedy, or - where it does not apply. It needs no GPU, no
    root and no torch, changes nothing, and ends in about a minute whatever hangs.

    On several nodes run it on each, and best by the launcher that starts the ranks: what a
    job may use (cores, limits, variables) is often not what a login may.

    \b
    Examples:
        ddp-profiler doctor
        ddp-profiler doctor --nodes 1
        ddp-profiler doctor --nodes 4 --ranks 8 --out /scratch/runs
        ddp-profiler doctor --json
        srun --nodes=2 --ntasks-per-node=1 ddp-profiler doctor --ranks 8

    Exit codes: 0 a run can start, with warnings or without; 1 something makes a run
    impossible (an ERROR).
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what the examination needs.
    from ddp_profiler.doctor import examination, text
    from ddp_profiler.report.text import for_encoding

    found = examination.examine(examination.readers(out), ranks, nodes)
    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        document = json.dumps(examination.as_json(found), indent=2, ensure_ascii=False)
        write_out(ascii_json(document, encoding) + "\n")
    else:
        color = sys.stdout is not None and sys.stdout.isatty()
        write_out(for_encoding(text.render(found, color=color), encoding))
    return EXIT_DONE if found.can_run else EXIT_CHECK_FAILED

"""``ddp-profiler report``: report.html and the plots of a run folder."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_profiler.cli import write_out


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Write report.html and plots/ of RUN, and name them.

    RUN is the folder that ddp_profiler.run names when it ends. report.html is one
    file without scripts that opens anywhere and loads nothing: what the step time
    goes to, scaling, ranks against each other, a typical step, the batch proof and
    what more ranks would bring. It is derived anew from the raw marks, so a run
    that was cut short has one too. A report that is there is replaced.

    \b
    Example:
        ddp-profiler report runs/NAME
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading a run needs.
    from ddp_profiler.errors import InputError
    from ddp_profiler.load import load_report
    from ddp_profiler.report import plots
    from ddp_profiler.report.page import render

    found = load_report(run)
    try:
        saved = plots.save_all(found.summary, run)
        page = render.save(found.summary, found.details, found.outlook, run)
    except OSError as error:
        raise InputError(
            f"{run} cannot be written: {error.strerror or error}.",
            "Copy the run folder to where you may write, and report on that.",
        ) from error
    write_out("".join(f"{path}\n" for path in (*saved, page)))

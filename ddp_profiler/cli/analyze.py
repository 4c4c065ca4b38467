"""``ddp-profiler analyze``: the table, or summary.json, of a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("analyze")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the content of summary.json.")
def command(run: Path, as_json: bool) -> None:
    r"""Show where the step time of RUN went, level by level.

    RUN is the folder that ddp_profiler.run names when it ends. The figures are
    derived anew from the raw marks, so a run that was cut short can be read too:
    it is then marked PARTIAL. Nothing in the folder is changed.

    \b
    Example:
        ddp-profiler analyze runs/gpt-tiny-20260101-120000
        ddp-profiler analyze runs/gpt-tiny-20260101-120000 --json | jq '.levels[].breakdown_ms'
    """
    # Here, so that --help does not load what reading a run needs.
    import msgspec

    from ddp_profiler.load import load_summary
    from ddp_profiler.report import console

    summary = load_summary(run)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        click.echo(text)
    else:
        click.echo(console.render(summary, color=sys.stdout.isatty()), nl=False)

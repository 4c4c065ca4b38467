"""``ddp-profiler analyze``: the table, or summary.json, of a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddp_profiler.cli import ascii_json, write_out


@click.command("analyze")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the content of summary.json.")
def command(run: Path, as_json: bool) -> None:
    """Show where the step time of RUN went, level by level.

    RUN is the folder that ddp_profiler.run names when it ends. The figures are
    derived anew from the raw marks, so a run that was cut short can be read too:
    it is then marked PARTIAL. Nothing in the folder is changed.

    \b
    Examples:
        ddp-profiler analyze runs/NAME
        ddp-profiler analyze runs/NAME --json | jq '.levels[].breakdown_ms'
    """  # noqa: D301 (click needs the character itself)
    # Here, so that --help does not load what reading a run needs.
    import msgspec

    from ddp_profiler.load import load_summary
    from ddp_profiler.report import console
    from ddp_profiler.report.text import for_encoding

    summary = load_summary(run)
    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        write_out(ascii_json(text, encoding) + "\n")
    else:
        color = sys.stdout is not None and sys.stdout.isatty()
        write_out(for_encoding(console.render(summary, color=color), encoding))

"""``ddp-profiler compare``: whether the step changed between two sets of launches, and where."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ddp_profiler.cli import ascii_json, write_out
from ddp_profiler.errors import CheckFailed, InputError, UsageError

_SIDES = ("--base", "--new")
_OBSTACLES_SHOWN = 3
_REMEDY = "Give ddp-profiler compare BASE NEW, or --base RUN... --new RUN..."


class _ManyRuns(click.Command):
    """Lets --base and --new take all words up to the next option, as a shell's * gives them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option, taken = None, 0
        for word in args:
            if word in _SIDES:
                option, taken = word, 0
            elif word.startswith("-"):
                option = None
            elif option is not None:
                # The first word after it belongs to it anyway.
                spread += [option] if taken else []
                taken += 1
            spread.append(word)
        return super().parse_args(ctx, spread)


@click.command("compare", cls=_ManyRuns)
@click.argument("runs", nargs=-1, metavar="[BASE NEW]", type=click.Path(path_type=Path))
@click.option(
    "--base",
    "bases",
    multiple=True,
    metavar="RUN...",
    type=click.Path(path_type=Path),
    help="Launches of BASE, one or more run folders.",
)
@click.option(
    "--new",
    "news",
    multiple=True,
    metavar="RUN...",
    type=click.Path(path_type=Path),
    help="Launches of NEW, one or more run folders.",
)
@click.option(
    "--fail-above",
    type=float,
    metavar="PCT",
    help="Exit with 1 where a step is measurably slower, and by more than PCT per cent.",
)
@click.option(
    "--launch-sd",
    type=float,
    metavar="PCT",
    help="With one launch a side: launches of the same code differ by so much (standard "
    "deviation, in per cent of the step). An assumption of yours.",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Compare what cannot be compared, such as different models, and say so.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    runs: tuple[Path, ...],
    bases: tuple[Path, ...],
    news: tuple[Path, ...],
    fail_above: float | None,
    launch_sd: float | None,
    anyway: bool,
    as_json: bool,
) -> None:
    """Tell whether the step of NEW differs from that of BASE, and in which part.

    BASE and NEW are run folders, or folders that hold the run folders of several
    launches; --base and --new take the launches one by one. Launches of the same
    code differ by more than steps do, so give several: 5 a side, launched in
    turns. With one a side nothing is called a change.

    \b
    Examples:
        ddp-profiler compare runs/BASE runs/NEW
        ddp-profiler compare --base runs/base-* --new runs/new-*
        ddp-profiler compare base-runs/ new-runs/ --fail-above 5
        ddp-profiler compare runs/BASE runs/NEW --fail-above 10 --launch-sd 2

    Exit codes: 0 done; 1 --fail-above does not hold; 2 wrong usage, or runs that
    cannot be compared; 3 unusable input.
    """  # noqa: D301 (click needs the character itself)
    for name, value in (("--fail-above", fail_above), ("--launch-sd", launch_sd)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} {value:g} is no share of 0 or more.", "It is in per cent.")
    if launch_sd == 0:
        raise UsageError(
            "--launch-sd 0: no two launches are equal.", "Give what launches differ by, as 2."
        )
    sides = _sides(runs, bases, news)
    # Here, so that --help does not load what reading a run needs.
    import msgspec

    from ddp_profiler.analysis.comparability import Kind, examine
    from ddp_profiler.analysis.compare import compare
    from ddp_profiler.load import load_launch
    from ddp_profiler.report import comparison as report
    from ddp_profiler.report.text import for_encoding

    base, new = ([load_launch(folder) for folder in _launches(side)] for side in sides)
    for name, side in (("BASE", base), ("NEW", new)):
        ids = [one.summary.run.run_id for one in side]
        twice = next((one for one in side if ids.count(one.summary.run.run_id) > 1), None)
        if twice is not None:
            raise UsageError(
                f"The run {twice.summary.run.run_id} is given twice in {name}.",
                "Give each launch once: a copy is no repetition.",
            )
    one_a_side = len(base) == len(new) == 1
    if launch_sd is not None and not one_a_side:
        raise UsageError(
            "--launch-sd is for one launch a side; these launches show what they differ by.",
            "Leave it out.",
        )
    if fail_above is not None and one_a_side and launch_sd is None:
        raise UsageError(
            "--fail-above needs several launches a side: launches of the same code differ.",
            "Launch each 5 times, in turns; or state what they differ by, as --launch-sd 2.",
        )
    common = examine(base, new)
    obstacles = list(common.obstacles)
    if fail_above is not None:
        obstacles += [
            f"--fail-above judges the code, and the machines differ: {one.name} {one.base} in "
            f"BASE, {one.new} in NEW."
            for one in common.differ(Kind.MACHINE)
        ]
        # A launch on both sides pulls them together: a check would hold for no good reason.
        both = {one.summary.run.run_id for one in base} & {one.summary.run.run_id for one in new}
        if both:
            obstacles.append(
                f"--fail-above judges a change, and the run {min(both)} is on both sides."
            )
    if obstacles and not anyway:
        left = len(obstacles) - _OBSTACLES_SHOWN
        more = f" (and {left} more)" if left > 0 else ""
        raise UsageError(
            f"BASE and NEW cannot be compared: {' '.join(obstacles[:_OBSTACLES_SHOWN])}{more}",
            "Measure both alike, or add --anyway to see the figures all the same.",
        )
    if not common.pairs:
        raise InputError(
            "BASE and NEW have no level in common, or one of them has no plain step.",
            "See what they hold with: ddp-profiler analyze RUN",
        )
    found = compare(
        base,
        new,
        common,
        launch_sd_fraction=None if launch_sd is None else launch_sd / 100,
        fail_above_pct=fail_above,
    )
    # None where stdout is closed, as write_out then says.
    encoding = getattr(sys.stdout, "encoding", None)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        write_out(ascii_json(text, encoding) + "\n")
    else:
        color = sys.stdout is not None and sys.stdout.isatty()
        write_out(for_encoding(report.render(found, obstacles, color=color), encoding))
    if found.check is not None and found.check.outcome == "fails":
        raise CheckFailed(
            f"Slower by more than {found.check.fail_above_pct:g} %: "
            f"{', '.join(found.check.levels)}.",
            "The comparison names the part, where one can be told.",
        )


def _sides(
    runs: Sequence[Path], bases: Sequence[Path], news: Sequence[Path]
) -> tuple[Sequence[Path], Sequence[Path]]:
    if bases or news:
        if runs:
            raise UsageError(
                f"{runs[0]} stands beside --base and --new: to which side does it belong?", _REMEDY
            )
        if not bases or not news:
            raise UsageError(f"{'--new' if bases else '--base'} is missing.", _REMEDY)
        return bases, news
    if len(runs) != 2:
        raise UsageError(f"Two sides are compared, and {len(runs)} runs are given.", _REMEDY)
    return runs[:1], runs[1:]


def _launches(folders: Sequence[Path]) -> list[Path]:
    """Returns run folders; a folder that holds run folders stands for all of them."""
    from ddp_profiler.record import paths

    found: list[Path] = []
    for folder in folders:
        inside = (
            sorted(path for path in folder.iterdir() if paths.run_file(path).is_file())
            if folder.is_dir() and not paths.holds_run(folder)
            else []
        )
        found += inside or [folder]
    return found

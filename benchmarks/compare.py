#!/usr/bin/env python3
"""Launches the same and planted code and says how often ``ddp-profiler compare`` is right."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit import head, kept_figures, launch

FORMAT_VERSION = 1
"""Of the JSON file. 1: first format."""

_HELP = """Say how often `ddp-profiler compare` is right, on launches of this machine.

Pools of real launches at dp 2, in turns: a model of a set step time without and with a delay of
10 % of its step in one part, and a model with real compute. From them 20 pairs of sides of 5
launches each are drawn, without replacement within a pair:

  planted   BASE from the timed model, NEW from it with a delay: slower, and the part named?
  same      both from the model with real compute: anything called a change?
"""
_EPILOG = """Figures are kept as they come: an interrupted run goes on where it was.

Examples:
  python benchmarks/compare.py --json figures.json          about 12 minutes
  python benchmarks/compare.py --json figures.json --minutes 5
  python benchmarks/compare.py --read figures.json          that table again, no run

Leave the machine alone meanwhile. Exit codes: 0 done, whatever was found; 2 wrong usage.
"""

PLANTED_MS = 12.0
"""A tenth of the timed model's step: 8 layers of 5 and 10 ms."""
PARTS = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
"""Where a delay is planted, and the part that has to be named."""
SIDE = 5
PAIRS = 20
DRAWS = 2000
_SEED = 20261202
_COMMON: tuple[str, ...] = ("--dp", "2", "--steps", "10", "--warmup", "2")
_COMMON += ("--allreduce-max-mb", "0", "--threads-per-rank", "1")


@dataclass(frozen=True)
class Pool:
    """Launches of one and the same thing.

    Attributes:
        name: What it is.
        options: Its options.
        launches: How many.
    """

    name: str
    options: tuple[str, ...]
    launches: int


POOLS = (
    Pool("real", ("--model", "gpt-tiny"), 20),
    Pool("timed", ("--model", "timed"), 10),
    *(
        Pool(f"timed {part}", ("--model", "timed", "--plant", f"part={part},ms={PLANTED_MS:g}"), 6)
        for part in PARTS
    ),
)


def order() -> Iterator[Pool]:
    """Yields the launches to make, those of all pools spread evenly over time."""
    places = [
        ((number + 0.5) / pool.launches, index, pool)
        for index, pool in enumerate(POOLS)
        for number in range(pool.launches)
    ]
    for _, _, pool in sorted(places, key=lambda one: one[:2]):
        yield pool


def measure(kept: dict[str, Any], file: Path | None, minutes: float) -> None:
    """Makes the launches that are not kept yet, as far as the time goes."""
    from ddp_profiler.analysis.comparability import figures
    from ddp_profiler.load import load_launch

    begin = time.monotonic()
    to_make = list(order())
    done: list[dict[str, Any]] = kept["launches"]
    for number, pool in enumerate(to_make[len(done) :], len(done) + 1):
        if time.monotonic() - begin > minutes * 60:
            print(f"{len(done)} of {len(to_make)} launches; out of time", file=sys.stderr)
            return
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "run"
            words = ["-m", "ddp_profiler.run", *_COMMON, *pool.options, "--out", str(out)]
            launch(2, words, quiet=True)
            found = load_launch(out)
        (level,) = found.summary.levels
        (figure,) = figures([found], {level.id: level.id})[level.id]
        done.append({"pool": pool.name, "load": os.getloadavg()[0], **asdict(figure)})
        if file is not None:
            file.write_text(json.dumps(kept) + "\n")
        print(
            f"{number}/{len(to_make)} {pool.name} {figure.step_ms:.1f} ms, "
            f"{time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def by_pool(kept: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the figures of the launches by pool, in order of time."""
    from ddp_profiler.analysis.comparison import LaunchFigures

    found: dict[str, list[Any]] = {pool.name: [] for pool in POOLS}
    for one in kept["launches"]:
        late = one["late"]
        found[one["pool"]].append(
            LaunchFigures(
                one["step_ms"], one["parts_ms"], late=None if late is None else tuple(late)
            )
        )
    return found


@dataclass(frozen=True)
class Tally:
    """How often something was so.

    Attributes:
        name: What was counted.
        count: How often.
        of: Of how many pairs.
    """

    name: str
    count: int
    of: int


def judge(pools: Mapping[str, Sequence[Any]], pairs: int, seed: int) -> list[Tally]:
    """Draws pairs of sides from the pools and counts what is said of them.

    Args:
        pools: Figures of launches by pool.
        pairs: Pairs to draw of each kind.
        seed: Of the draws.
    """
    from ddp_profiler.analysis.comparison import (
        FASTER,
        SLOWER,
        check,
        compare_levels,
    )

    generator = random.Random(seed)
    caught = named = failed = planted = flagged = same = 0
    parts = [part for part in PARTS if len(pools[f"timed {part}"]) >= SIDE]
    for number in range(pairs):
        if not parts or len(pools["timed"]) < SIDE:
            break
        part = parts[number % len(parts)]
        base = generator.sample(pools["timed"], SIDE)
        new = generator.sample(pools[f"timed {part}"], SIDE)
        (level,) = compare_levels({"dp2": base}, {"dp2": new})
        planted += 1
        caught += level.verdict == SLOWER
        named += level.causes == (PARTS[part],)
        failed += check([level], 5).outcome == "fails"
    for _ in range(pairs):
        if len(pools["real"]) < 2 * SIDE:
            break
        # In turns, as launches are to be made: neighbours in time go to different sides.
        drawn = sorted(generator.sample(range(len(pools["real"])), 2 * SIDE))
        sides: tuple[list[Any], list[Any]] = ([], [])
        for first, second in zip(drawn[::2], drawn[1::2], strict=True):
            swap = generator.random() < 0.5
            sides[swap].append(pools["real"][first])
            sides[not swap].append(pools["real"][second])
        (level,) = compare_levels({"dp2": sides[0]}, {"dp2": sides[1]})
        same += 1
        flagged += any(row.verdict in (SLOWER, FASTER) for row in (level.step, *level.parts))
    return [
        Tally("planted 10 %: called slower", caught, planted),
        Tally("planted 10 %: the part named, alone", named, planted),
        Tally("planted 10 %: --fail-above 5 fails", failed, planted),
        Tally("same code: anything called a change", flagged, same),
    ]


def render(kept: Mapping[str, Any]) -> str:
    """Returns the table."""
    import numpy as np

    pools = by_pool(kept)
    machine = kept["machine"]
    lines = [
        f"{len(kept['launches'])} launches, {machine['cores']} cores, torch {kept['torch']}, "
        f"load {max((one['load'] for one in kept['launches']), default=0):.1f} at most",
        "",
        f"{'pool':<18}{'launches':>9}{'step ms':>9}{'sd %':>7}",
    ]
    for name, figures in pools.items():
        if len(figures) > 1:
            steps = np.array([one.step_ms for one in figures])
            sd = steps.std(ddof=1) / steps.mean() * 100
            lines.append(f"{name:<18}{len(steps):>9}{steps.mean():>9.1f}{sd:>7.1f}")
        else:
            lines.append(f"{name:<18}{len(figures):>9}")
    lines += ["", f"{f'sides of {SIDE} launches, drawn from the pools':<48}pairs  in all draws"]
    for few, many in zip(judge(pools, PAIRS, _SEED), judge(pools, DRAWS, _SEED + 1), strict=True):
        share = f"{many.count / many.of:.1%}" if many.of else "-"
        lines.append(f"{few.name:<44}{few.count:>3} of {few.of:<3}{share:>11}")
    lines += ["", f"in all draws: of {DRAWS}; they share launches, so they are no {DRAWS} trials"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep figures; go on from them")
    parser.add_argument("--minutes", type=float, default=60.0, help="launch nothing after that")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a file of --json; no run")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    kept = kept_figures(parser, options, FORMAT_VERSION)
    if kept is None:
        from importlib.metadata import version

        kept = {**head(FORMAT_VERSION, os.getloadavg()[0]), "launches": []}
        kept["torch"] = version("torch")
    if options.read is None:
        measure(kept, options.json, options.minutes)
    print(render(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the benchmarks have in common: launching ranks, the machine, estimates, options."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]

_LAUNCH_TIMEOUT_S = 1800
_RESAMPLES = 10_000
_SEED = 20261201


@dataclass(frozen=True)
class Estimate:
    """A trimmed mean over rounds with its bootstrap intervals.

    Attributes:
        value: The estimate.
        ci95: 95 % interval, (low, high).
        ci90: 90 % interval; its ends are one-sided 95 % bounds.
    """

    value: float
    ci95: tuple[float, float]
    ci90: tuple[float, float]

    def scaled(self, factor: float) -> Estimate:
        """Returns the estimate in another unit; ``factor`` is above 0."""
        low, high = self.ci95
        lower, upper = self.ci90
        return Estimate(
            self.value * factor,
            (low * factor, high * factor),
            (lower * factor, upper * factor),
        )

    def cell(self, digits: int, width: int) -> str:
        """Returns value and interval in fewer than ``width`` characters.

        Args:
            digits: Decimal places; large numbers get fewer.
            width: Of the column, 18 or more.
        """
        low, high = self.ci95
        for places in range(digits, -1, -1):
            text = f"{self.value:.{places}f} [{low:.{places}f}, {high:.{places}f}]"
            if len(text) < width:
                return text
        return f"{self.value:.0f} [very wide]"


def estimate(values: Floats) -> Estimate:
    """Returns the trimmed mean over rounds with percentile bootstrap intervals over rounds.

    A fifth of the rounds is left out at each end: on a shared machine a few rounds are
    far off, and a plain mean would be theirs. Tails of the cost itself are cut as well.

    Args:
        values: One value for each round, shape [round].
    """
    random = np.random.default_rng(_SEED)
    picked = random.integers(0, len(values), size=(_RESAMPLES, len(values)))
    means = _trimmed_mean(values[picked])
    low, lower, upper, high = (float(x) for x in np.percentile(means, [2.5, 5, 95, 97.5]))
    return Estimate(float(_trimmed_mean(values)), (low, high), (lower, upper))


def _trimmed_mean(values: Floats) -> Floats:
    """Returns the mean over the last axis without its lowest and highest fifth."""
    cut = values.shape[-1] // 5
    kept = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    mean: Floats = np.asarray(kept.mean(axis=-1))
    return mean


def launch(ranks: int, words: Sequence[str | Path], *, quiet: bool = False) -> None:
    """Starts ranks on this machine's CPU with torchrun, on a free port, and waits for their end.

    Args:
        ranks: How many.
        words: What each runs: a script or ``-m module``, and its arguments.
        quiet: Whether what they print is shown only if they fail. Else it goes to stderr, since
            stdout is the table's.

    Raises:
        RuntimeError: The launch failed.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {key: value for key, value in os.environ.items() if key not in names}
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [environ.get("PYTHONPATH", "")])]
    )
    environ["CUDA_VISIBLE_DEVICES"] = ""
    environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", *map(str, words)]
    try:
        done = subprocess.run(
            command,
            env=environ,
            timeout=_LAUNCH_TIMEOUT_S,
            check=False,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.STDOUT if quiet else None,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"torchrun did not end within {_LAUNCH_TIMEOUT_S} s") from None
    if done.returncode:
        if quiet:
            sys.stderr.write(done.stdout.decode(errors="replace")[-3000:])
        raise RuntimeError(f"torchrun ended with {done.returncode}; see its messages above")


def end_rank() -> NoReturn:
    """Ends a rank without tearing Python down, which torch's own threads abort at times."""
    from ddp_profiler.measure.leave import leave

    leave(0)


def head(format_version: int, load_before: float) -> dict[str, Any]:
    """Returns what a file of figures begins with: format, date, machine."""
    return {
        "format_version": format_version,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
    }


def machine_line(raw: Mapping[str, Any]) -> str:
    """Returns the line that says where figures were measured."""
    machine = raw["machine"]
    return (
        f"{machine['cores']} cores, load {machine['load_before']:.1f} before, "
        f"torch {raw['torch']}, Python {machine['python']}"
    )


def at_least(least: int) -> Any:
    """Returns an argparse type: a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)

    return read


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` and ``--read``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw times")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a file of --json; no run")


def read_figures(
    parser: argparse.ArgumentParser, options: argparse.Namespace, format_version: int
) -> dict[str, Any] | None:
    """Checks ``--json`` and returns what ``--read`` names; None where it is not given."""
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: folder {options.json.parent} does not exist")
    if options.json is not None and options.json.is_dir():
        parser.error(f"--json: {options.json} is a folder; name a file")
    if options.read is None:
        return None
    try:
        raw = json.loads(options.read.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--read {options.read}: {error}")
    if not isinstance(raw, dict) or raw.get("format_version") != format_version:
        parser.error(f"--read {options.read}: no file of this benchmark, format {format_version}")
    return raw


def finite(value: Any) -> Any:
    """Returns the value with null for what JSON cannot hold: an open bound."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def kept_figures(
    parser: argparse.ArgumentParser, options: argparse.Namespace, format_version: int
) -> dict[str, Any] | None:
    """Returns what an earlier run kept, by ``--read`` or ``--json``; None where there is nothing.

    Ends the program with a line about what is wrong with the file.

    Args:
        parser: Of the command line.
        options: Its ``read`` and ``json``.
        format_version: That the file must have.
    """
    source: Path | None = options.read or options.json
    if source is None or not (options.read or source.exists()):
        return None
    try:
        kept = json.loads(source.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{source}: {error}")
    if not isinstance(kept, dict) or kept.get("format_version") != format_version:
        parser.error(f"{source}: no file of this benchmark, format {format_version}")
    return kept

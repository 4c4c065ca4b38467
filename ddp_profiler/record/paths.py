"""All file names of a run folder, and the rules for choosing and refusing one."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from ddp_profiler.errors import InputError, UsageError

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"
KINETO_FOLDER = "kineto"
DEFAULT_ROOT = "runs"

_RANK_PATTERN = re.compile(r"rank-(\d{5,})\.arrows")


def run_file(folder: Path) -> Path:
    """Returns the path of the file that describes the run."""
    return folder / RUN_FILE


def summary_file(folder: Path) -> Path:
    """Returns the path of the analysed figures."""
    return folder / SUMMARY_FILE


def report_file(folder: Path) -> Path:
    """Returns the path of the page of the run."""
    return folder / REPORT_FILE


def plots_folder(folder: Path) -> Path:
    """Returns the folder of the pictures."""
    return folder / PLOTS_FOLDER


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the path of one rank's spans."""
    return folder / f"rank-{rank:05d}.arrows"


def kineto_folder(folder: Path, level: str) -> Path:
    """Returns the folder of torch.profiler's traces of a level, one file a rank.

    Args:
        folder: The run folder.
        level: The level's id.
    """
    return folder / KINETO_FOLDER / level


def kineto_file(folder: Path, level: str, rank: int) -> Path:
    """Returns the path of torch.profiler's trace of one rank at one level."""
    return kineto_folder(folder, level) / f"rank-{rank:05d}.json.gz"


def kineto_files(folder: Path, level: str) -> tuple[Path, ...]:
    """Returns the traces of a level that are there, in the order of ranks."""
    found = kineto_folder(folder, level).glob("rank-*.json.gz")
    # A pipe would be waited for.
    return tuple(sorted(path for path in found if path.is_file()))


def partial_file(target: Path) -> Path:
    """Returns the name of a file that comes from elsewhere until it is whole."""
    return target.with_name(f".{target.name}.partial")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file as a whole or not at all; what is there by that name is replaced.

    A symbolic link is replaced itself: what a run folder from elsewhere holds cannot lead a
    writer out of it.

    Raises:
        OSError: It cannot be written.
    """
    partial = half_written(path, os.getpid())
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        # A disk that is full is not helped by what is half there.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def make_plots_folder(folder: Path) -> Path:
    """Makes the folder of the pictures, which must not be a link to elsewhere.

    Raises:
        OSError: It cannot be made.
    """
    plots = plots_folder(folder)
    if plots.is_symlink():
        raise OSError(f"{plots} is a link; remove it")
    plots.mkdir(exist_ok=True)
    return plots


def half_written(path: Path, pid: int) -> Path:
    """Returns the name under which a process writes a file before it is whole."""
    return path.with_name(f".{path.name}.{pid}.partial")


def remove_partials(folder: Path, pid: int) -> None:
    """Removes the files that a process, which is dead or about to end, has left half written."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f".*.{pid}.partial"):
            path.unlink(missing_ok=True)


def replay_file(folder: Path, rank: int) -> Path:
    """Returns the path of the micro-batches that a rank keeps until the script has ended."""
    return folder / f".replay-{rank:05d}.pt"


def rank_files(folder: Path) -> dict[int, Path]:
    """Returns the rank files that are there, by rank."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("rank-*.arrows")):
        match = _RANK_PATTERN.fullmatch(path.name)
        # With more zeros it would be another file of the same rank.
        if match and path.name == rank_file(folder, int(match.group(1))).name:
            found[int(match.group(1))] = path
    return found


class FolderTakenError(UsageError):
    """A folder already holds a run."""


def is_run(path: Path) -> bool:
    """Tells whether a path is a run folder of ours, and no folder of traces."""
    return run_file(path).is_file() and (bool(rank_files(path)) or (path / KINETO_FOLDER).is_dir())


def default_folder(name: str, now: datetime, number: int = 1) -> Path:
    """Returns ``runs/NAME-YYYYMMDD-HHMMSS`` for a run that was given no folder.

    Args:
        name: Name of what is measured.
        now: When the run began.
        number: Which of the runs that began in the same second; from the second on it is added.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    end = f"-{number}" if number > 1 else ""
    return Path(DEFAULT_ROOT) / f"{safe}-{now:%Y%m%d-%H%M%S}{end}"


def claim_default_folder(name: str, now: datetime, below: Path = Path()) -> Path:
    """Claims the first default folder that no other run has taken; returns it.

    Args:
        name: Name of what is measured.
        now: When the run began.
        below: Folder that ``runs/`` is in.

    Raises:
        UsageError: It cannot be created.
    """
    for number in itertools.count(1):
        folder = below / default_folder(name, now, number)
        with contextlib.suppress(FolderTakenError):
            claim_folder(folder)
            return folder
    raise AssertionError("numbers do not end")


def of_attempt(folder: Path, environ: Mapping[str, str]) -> Path:
    """Returns the folder for this attempt of a launch that torchrun may restart.

    >>> of_attempt(Path("/runs/a"), {"TORCHELASTIC_RESTART_COUNT": "1"}).as_posix()
    '/runs/a-attempt2'

    Args:
        folder: As the user named it; the first attempt has it.
        environ: Environment variables.
    """
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not count.isdecimal() or int(count) == 0:
        return folder
    return folder.with_name(f"{folder.name}-attempt{int(count) + 1}")


def holds_run(folder: Path) -> bool:
    """Tells whether a folder already holds (part of) a run."""
    return (
        run_file(folder).exists()
        or summary_file(folder).exists()
        or bool(rank_files(folder))
        or (folder / KINETO_FOLDER).exists()
    )


def tidy(folder: Path) -> Path:
    """Returns a folder without ``..`` in its path, for what is shown and kept of it.

    A path without stays as it was given. ``..`` after a symbolic link leads to the parent of
    what it points to, so the file system is asked.
    """
    return folder.resolve() if ".." in folder.parts else folder


def claim_folder(folder: Path) -> None:
    """Creates a run folder and takes it for this run.

    The claim is the exclusive creation of ``run.json``, so that of two runs that
    start in the same second only one gets the folder.

    Raises:
        FolderTakenError: The folder holds a run.
        UsageError: It cannot be created.
    """
    remedy = "Choose another folder with --out, or remove the old run."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if holds_run(folder):
            raise FolderTakenError(f"The output folder {folder} already holds a run.", remedy)
        run_file(folder).touch(exist_ok=False)
    except FileExistsError:
        if folder.is_dir():
            raise FolderTakenError(
                f"The output folder {folder} already holds a run.", remedy
            ) from None
        raise UsageError(f"The output folder {folder} is a file.", remedy) from None
    except OSError as error:
        raise UsageError(
            f"The output folder {folder} cannot be used: {error.strerror or error}.",
            "Choose a folder that can be written, with --out.",
        ) from None


def release_folder(folder: Path) -> None:
    """Gives back a claimed folder in which nothing was measured; other files in it stay."""
    run_file(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def require_run(folder: Path) -> None:
    """Checks that a folder holds a run.

    Raises:
        InputError: It does not.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder.", "Name the run folder that ddp_profiler.run printed."
        )
    if not run_file(folder).is_file():
        raise InputError(
            f"{folder} holds no run: {RUN_FILE} is missing.",
            "Name the run folder that ddp_profiler.run printed.",
        )

"""A folder with all that traces tell: JSON, the tables as text, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddp_profiler.errors import UsageError
from ddp_profiler.report import trace_plots
from ddp_profiler.trace.analysis import TraceAnalysis
from ddp_profiler.trace.gather import TraceSet

JSON_FILE = "trace.json"
TEXT_FILE = "trace.txt"
PLOTS_FOLDER = "plots"


def check_folder(folder: Path) -> None:
    """Checks that a folder can be written, before the long work begins.

    Raises:
        UsageError: It is a file, or something is in it.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UsageError(
            f"{folder} exists; nothing in it is overwritten.", "Name another folder with --out."
        )


def write_folder(
    folder: Path,
    json_text: str,
    table: str,
    pictures: Mapping[str, tuple[TraceSet, TraceAnalysis]],
) -> list[Path]:
    """Writes the folder and returns the paths of its files.

    Args:
        folder: The folder to create.
        json_text: What ``trace --json`` prints.
        table: What ``trace`` prints.
        pictures: Traces to draw, by the folder within ``plots/``; the empty name is itself.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / JSON_FILE, folder / TEXT_FILE]
        for path, text in zip(files, (json_text, table), strict=True):
            path.write_text(text, encoding="utf-8")
        for name, (found, analysis) in pictures.items():
            files += trace_plots.save_all(found, analysis, folder / PLOTS_FOLDER / name)
    except OSError as error:
        raise UsageError(
            f"The folder {folder} cannot be written: {error.strerror or error}.",
            "Choose another one with --out.",
        ) from None
    return files

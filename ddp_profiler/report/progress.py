"""Tells on stderr how a study goes: a bar on a terminal, a line per level elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ddp_profiler.schema import LevelSettings


class StudyProgress:
    """Progress of a study, shown by one rank.

    Nothing is drawn while a block runs: no thread of ours competes with the training.

    Args:
        total: Number of levels.
        stream: Where to write.
    """

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total = total
        self._stream = stream
        self._label = ""
        self._begin = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def level_begins(self, number: int, level: LevelSettings, blocks: int) -> None:
        """Shows that a level begins; ``number`` counts from 0."""
        self._label = f"[{number + 1}/{self._total}] {level.id}"
        self._begin = time.monotonic()
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task(self._label.replace("[", r"\["), total=blocks)
            self._bar.refresh()

    def block_ends(self) -> None:
        """Shows that a block has ended."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            self._bar.refresh()

    def level_ends(self) -> None:
        """Shows that the level has ended, and how long it took."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        seconds = time.monotonic() - self._begin
        print(f"{self._label}  {seconds:.1f} s", file=self._stream, flush=True)


class NoProgress:
    """Shows nothing, on the ranks that do not lead."""

    def level_begins(self, number: int, level: LevelSettings, blocks: int) -> None:
        """Shows nothing."""

    def block_ends(self) -> None:
        """Shows nothing."""

    def level_ends(self) -> None:
        """Shows nothing."""

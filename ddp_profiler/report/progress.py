"""Tells on stderr how a study or long reading goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ddp_profiler.schema import LevelSettings


class StudyProgress:
    """Progress of a study, shown by one rank.

    Nothing is drawn while a block runs: a thread that draws would compete with the training.
    Where there is no terminal, a line says that a level begins and another that it has ended.

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
        console = Console(file=self._stream)
        if not (self._stream.isatty() and console.is_terminal and not console.is_dumb_terminal):
            print(f"{self._label} ...", file=self._stream, flush=True)
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            # Neither a thread, nor what the training prints sent through the bar.
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=blocks)
        self._bar.start()
        # A run that dies must not leave a terminal without its cursor.
        console.show_cursor(True)
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


class ReadingProgress:
    """Progress of reading files; nothing is shown of what takes less than a second or two.

    Args:
        stream: Where to write.
    """

    _QUIET_S = 1.5
    _LINE_EVERY_S = 10.0

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._begin = time.monotonic()
        self._next_line = self._begin + self._LINE_EVERY_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Begins to count the time."""
        self._begin = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def tell(self, done: int, total: int) -> None:
        """Shows how many bytes have been read of how many."""
        now = time.monotonic()
        # None where the process was started with stderr closed.
        if self._stream is None or now - self._begin < self._QUIET_S:
            return
        console = Console(file=self._stream)
        if not (self._stream.isatty() and console.is_terminal and not console.is_dumb_terminal):
            if now >= self._next_line:
                self._next_line = now + self._LINE_EVERY_S
                share = f"{done / total:.0%} of " if total else ""
                print(f"reading: {share}{total / 1e6:.0f} MB", file=self._stream, flush=True)
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("reading"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("reading", total=total)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=done)
            self._bar.refresh()

"""Progress: a bar on a terminal, lines elsewhere, and never a thread."""

import io
import sys
import threading

import pytest

from ddp_profiler.report.progress import StudyProgress
from ddp_profiler.schema import LevelSettings


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def level(dp=1):
    return LevelSettings(f"dp{dp}", dp, 1, 1, "packed", tuple(range(dp)))


def drawn(stream: io.StringIO) -> str:
    """What was written since the last call."""
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


def test_bar_on_a_terminal():
    stream = Terminal()
    threads = set(threading.enumerate())
    streams = sys.stdout, sys.stderr
    progress = StudyProgress(2, stream)
    progress.level_begins(0, level(), 4)
    begun = drawn(stream)
    assert "[1/2] dp1" in begun
    assert "0 %" in begun
    assert begun.rindex("\x1b[?25h") > begun.rindex("\x1b[?25l")  # the cursor is shown again
    for percent in (25, 50, 75, 100):
        progress.block_ends()
        assert f"{percent} %" in drawn(stream)
        assert set(threading.enumerate()) == threads
        assert (sys.stdout, sys.stderr) == streams
    progress.level_ends()
    assert drawn(stream).splitlines()[-1].endswith(" s")
    progress.level_begins(1, level(2), 1)
    progress.block_ends()
    assert "[2/2] dp2" in drawn(stream)
    progress.level_ends()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "dumb"])
def test_lines_elsewhere(stream, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    threads = set(threading.enumerate())
    progress = StudyProgress(2, stream)
    progress.level_begins(0, level(), 4)
    assert drawn(stream) == "[1/2] dp1 ...\n"
    progress.block_ends()
    assert drawn(stream) == ""
    progress.level_ends()
    text = drawn(stream)
    assert text.startswith("[1/2] dp1  ")
    assert text.endswith(" s\n")
    assert set(threading.enumerate()) == threads

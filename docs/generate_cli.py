#!/usr/bin/env python3
"""Writes docs/cli.md from what each command says with --help.

python docs/generate_cli.py            writes the page
python docs/generate_cli.py --check    exit code 1 if the page is not what it would write
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"

_WORKER = ("torchrun -m ddp_profiler.run", "-m", "ddp_profiler.run")
_INTRODUCTION = """# Commands

What each command says with `--help`; `python docs/generate_cli.py` writes this page.

Measuring is `torchrun ... -m ddp_profiler.run`, in the launcher that you train with. All else reads
what it wrote: `ddp-profiler COMMAND RUN`. Exit codes: 0 done; 1 a check that you asked for does not
hold; 2 wrong usage or settings; 3 unusable input; of a profiled script its own. An error is one or
two lines on stderr; `--debug` shows the stack trace.
"""


def commands() -> list[tuple[str, list[str]]]:
    """Returns name and argument list of each command, in the order of use."""
    from ddp_profiler.cli import _COMMANDS

    python = sys.executable
    named = [(_WORKER[0], [python, *_WORKER[1:], "--help"])]
    for name in _COMMANDS:
        named.append((f"ddp-profiler {name}", [python, "-m", "ddp_profiler.cli", name, "--help"]))
    return [*named, ("launch/lab", [python, str(ROOT / "launch" / "lab.py"), "--help"])]


def page() -> str:
    """Returns the page's text."""
    environ = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    parts = [_INTRODUCTION]
    for name, words in commands():
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        said = "\n".join(f"    {line}".rstrip() for line in done.stdout.rstrip().splitlines())
        parts.append(f"## {name}\n\n{said}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != text)
    PAGE.write_text(text)

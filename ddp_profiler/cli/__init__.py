"""The command line ``ddp-profiler``: one file per command, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ddp_profiler import units
from ddp_profiler._version import __version__
from ddp_profiler.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    DdpProfilerError,
    InputError,
    UsageError,
)

NAME = "ddp-profiler"

_LONGEST_LINE = 1500
_UNSEEN = re.compile(
    "[\x7f-\x9f\xad\u0600-\u0605\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
"""Characters that steer a terminal or the direction of text; JSON has them as they are."""

_COMMANDS = {
    "analyze": "Show where the step time of a run went.",
    "report": "Write report.html and plots of a run.",
    "study": "Launch a training script at several dp and compare.",
    "predict": "Predict the step at other scales and settings.",
    "compare": "Tell whether the step changed between two sets of launches, and where.",
    "trace": "Show where the step time went, from traces of torch.profiler.",
    "plan": "Plan a run: its batch, epochs, steps and training time.",
    "doctor": "Look at this machine before a run: links, names, limits, settings.",
    "merge": "Join the folders that nodes without a shared file system kept.",
}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is called: --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"ddp_profiler.cli.{name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddp-profiler")
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def _group(debug: bool) -> None:
    """Analyse runs of ddp_profiler: where the time of a data-parallel step goes.

    \b
    Measure first, with the launcher that you train with:
        torchrun --nproc_per_node=2 -m ddp_profiler.run
        torchrun --nproc_per_node=2 -m ddp_profiler.run --help
    Then read the run folder that it names:
        ddp-profiler analyze runs/NAME

    Exit codes: 0 done; 1 a check that you asked for does not hold; 2 wrong usage or
    settings; 3 unusable input.
    """  # noqa: D301 (click needs the character itself)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = parse_click(_group, given or ["--help"], NAME)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except DdpProfilerError as error:
        if "--debug" in given:
            raise
        print(f"{NAME}: {error_text(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (MemoryError, RecursionError):
        if "--debug" in given:
            raise
        print(f"{NAME}: The input is too large or nested too deeply to be read.", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except OSError as error:
        # Such as help that stdout cannot take.
        if "--debug" in given:
            raise
        _discard_stdout()
        print(f"{NAME}: {units.printable(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except Exception as error:
        # Readers refuse what they cannot use; this is for what none of them has foreseen.
        if "--debug" in given:
            raise
        text = units.printable((str(error).splitlines() or [""])[0][:200])
        print(
            f"{NAME}: The input cannot be used: {type(error).__name__}: {text}\n"
            "If its files are sound, this is a mistake of ours: --debug shows the stack trace.",
            file=sys.stderr,
        )
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


def error_text(error: DdpProfilerError) -> str:
    """Returns an error's lines; what names of files and runs hold is made safe for a terminal."""
    lines = (error.message, error.remedy) if error.remedy else (error.message,)
    return "\n".join(_shortened(units.printable(line)) for line in lines)


def _shortened(line: str) -> str:
    """Leaves out the middle of a line that a name from a file has made too long to be read."""
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"


def write_out(text: str) -> None:
    """Writes a command's result on stdout, all of it or with an error.

    A reader that has seen enough, such as head, is no error.

    Args:
        text: The result. What stdout cannot encode is to be replaced by the caller.

    Raises:
        InputError: Stdout is closed, or cannot take the text.
    """
    # None where the process was started with stdout closed.
    if sys.stdout is None:
        raise InputError("Cannot write the result: stdout is closed.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        raise InputError(
            f"Cannot write the result to stdout: {error.strerror or error}."
        ) from error


def ascii_json(text: str, encoding: str | None) -> str:
    """Returns JSON that the encoding can hold, and that steers no terminal.

    Characters that are replaced stand in strings only.
    """
    text = _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text)
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


def _discard_stdout() -> None:
    """Lets what stdout still holds go nowhere, or the interpreter complains when it ends."""
    if sys.stdout is None:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def parse_click(
    command: click.Command, arguments: list[str], name: str, *, quiet: bool = False
) -> Any:
    """Runs a click command and returns what it returns; wrong usage becomes a UsageError.

    Args:
        command: The command.
        arguments: Its arguments.
        name: Name of the program in messages.
        quiet: Say nothing, as ranks other than the first do.

    Returns:
        The command's result; 0 where only --help or --version was asked for.

    Raises:
        UsageError: The arguments are wrong.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            return command.main(args=arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        # The command that was called, where there is one: its options are in its own help.
        context = getattr(error, "ctx", None)
        called = context.command_path if context is not None else name
        raise UsageError(error.format_message(), f"See {called} --help.") from None

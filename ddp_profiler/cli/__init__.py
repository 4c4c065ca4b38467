"""The command line ``ddp-profiler``: one file per command, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ddp_profiler._version import __version__
from ddp_profiler.errors import EXIT_DONE, DdpProfilerError, UsageError

NAME = "ddp-profiler"

_COMMANDS = {"analyze": "Show where the step time of a run went."}


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
    r"""Analyse runs of ddp_profiler: where the time of a data-parallel step goes.

    \b
    Measure first, with the launcher that you train with:
        torchrun --nproc_per_node=2 -m ddp_profiler.run
        torchrun --nproc_per_node=2 -m ddp_profiler.run --help
    Then read the run folder that it names:
        ddp-profiler analyze runs/NAME

    Exit codes: 0 done; 1 a check that you asked for does not hold; 2 wrong usage or
    settings; 3 unusable input.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = parse_click(_group, given, NAME)
    except DdpProfilerError as error:
        if "--debug" in given:
            raise
        print(f"{NAME}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader, such as head, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_DONE)
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


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
        raise UsageError(error.format_message(), f"See {name} --help.") from None

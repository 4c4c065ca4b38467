"""Errors that a user of the tool can meet, and the exit code of each.

Library code raises these; only the command line and the worker entry turn them
into one or two lines on stderr and an exit status.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_INTERRUPTED = 130
"""As a shell reports an end by Ctrl-C."""


class DdpProfilerError(Exception):
    """Base of all errors that are meant to be read by a user.

    Args:
        message: What is wrong and where, in one line.
        remedy: What to do about it, in one line; empty where there is nothing to advise.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class UsageError(DdpProfilerError):
    """Wrong usage or settings (exit code 2)."""

    exit_code = EXIT_USAGE


class InputError(DdpProfilerError):
    """An input that cannot be used: a file, a folder, a model factory (exit code 3)."""

    exit_code = EXIT_BAD_INPUT


class CheckFailed(DdpProfilerError):
    """A check that the user asked for does not hold (exit code 1)."""

    exit_code = EXIT_CHECK_FAILED

"""What a check says: a verdict, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "not applicable"]
"""``error`` is kept for what makes a run impossible; ``warning`` for what makes it slow or
risky."""


@dataclass(frozen=True)
class Verdict:
    """One line of the examination.

    Attributes:
        id: Name of the check, the same whatever it says.
        status: What it says.
        message: The fact, in one sentence.
        remedy: What to do; None where nothing has to be done.
        source: Where it is known from: an address; None for what is plain or measured here.
    """

    id: str
    status: Status
    message: str
    remedy: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Section:
    """The verdicts on one topic.

    Attributes:
        topic: Its name.
        verdicts: At least one.
    """

    topic: str
    verdicts: tuple[Verdict, ...]


def ok(id: str, message: str) -> Verdict:
    """Returns a verdict that nothing is wrong."""
    return Verdict(id, "ok", message)


def warning(id: str, message: str, remedy: str, source: str | None = None) -> Verdict:
    """Returns a verdict on what makes a run slow or risky."""
    return Verdict(id, "warning", message, remedy, source)


def error(id: str, message: str, remedy: str, source: str | None = None) -> Verdict:
    """Returns a verdict on what makes a run impossible."""
    return Verdict(id, "error", message, remedy, source)


def not_applicable(id: str, message: str) -> Verdict:
    """Returns a verdict that a check has nothing to look at here."""
    return Verdict(id, "not applicable", message)

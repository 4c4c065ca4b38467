"""Calls that end in time, though what they wait for may never answer.

An operation on a store whose host is gone, or behind a dead link, blocks for as long as TCP
tries again: many minutes, and no timeout of the store covers it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ddp_profiler.errors import InputError

Result = TypeVar("Result")

_AFTERWARDS_S = 1.0
"""An answer may have come while something else held the interpreter: one more look."""


class NoAnswerError(Exception):
    """A call did not end in time; its thread is left behind."""


def within(limit_s: float, call: Callable[[], Result]) -> Result:
    """Returns what a call returns, or gives it up.

    The call runs on a daemon thread, which outlives this function where it is given up.

    Args:
        limit_s: Seconds that the call may take.
        call: The call; its exceptions are passed on.

    Raises:
        NoAnswerError: It did not end in time.
    """
    outcome: list[Result] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work, daemon=True, name="ddp-profiler-bounded")
    try:
        thread.start()
    except RuntimeError:
        # At the interpreter's end there are no new threads: the call has its own limit, if any.
        return call()
    thread.join(max(0.0, limit_s))
    if thread.is_alive():
        thread.join(_AFTERWARDS_S)
    if problem:
        raise problem[0]
    if not outcome:
        raise NoAnswerError(f"no answer within {limit_s:g} s")
    return outcome[0]


class StoreLostError(InputError):
    """The store that ranks talk through cannot be reached any more."""


class BoundedStore:
    """A torch store whose operations end in time.

    Once an operation was given up the store counts as lost, and later ones fail at once: they
    would queue behind it.

    Args:
        store: A torch store.
        limit_s: Seconds that an operation may take.
        where: The store's address and whose it is, for messages.
    """

    def __init__(self, store: Any, limit_s: float, where: str) -> None:
        self.raw = store
        self.limit_s = limit_s
        self.where = where
        self.lost = False

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key. Torch only sends, and waits for nothing, so this needs no thread."""
        if self.lost:
            raise self._error("was given up before")
        try:
            self.raw.set(key, value)
        except Exception as error:
            raise self._error(_first_line(error)) from error

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is known to be there."""
        value: bytes = self._call(lambda: self.raw.get(key))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that are known to be there."""
        values: list[bytes] = self._call(lambda: self.raw.multi_get(list(keys)))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """Tells whether all keys are there."""
        return bool(self._call(lambda: self.raw.check(list(keys))))

    def together(self, call: Callable[[Any], Result]) -> Result:
        """Returns what a call makes of the torch store; its operations end in time together."""
        result: Result = self._call(lambda: call(self.raw))
        return result

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        return int(self._call(lambda: self.raw.add(key, amount)))

    def _call(self, call: Callable[[], Any]) -> Any:
        if self.lost:
            raise self._error("was given up before")
        try:
            return within(self.limit_s, call)
        except NoAnswerError:
            self.lost = True
            raise self._error(f"did not answer for {self.limit_s:g} s") from None
        except Exception as error:
            raise self._error(_first_line(error)) from error

    def _error(self, problem: str) -> StoreLostError:
        return StoreLostError(
            f"The store at {self.where} cannot be reached: {problem}.",
            "The node that holds it has died or a link is down; what was measured before is kept.",
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__

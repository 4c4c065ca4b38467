"""Reads facts from several places at the same moment, each within a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reader:
    """Where the facts of one topic come from.

    Attributes:
        read: Returns them. It may block, and may raise anything.
        limit_s: Seconds that it may take.
    """

    read: Callable[[], Any]
    limit_s: float


@dataclass(frozen=True)
class Unread:
    """Facts that are not known.

    Attributes:
        reason: Why, in words.
    """

    reason: str


def read_all(readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Returns what each reader returns, or :class:`Unread` where it failed or took too long.

    Readers run on daemon threads, so one that never answers (a name server, a file system
    whose server is gone, a driver) is left behind and does not keep the process alive.

    Args:
        readers: By topic.
    """
    answers: dict[str, Any] = {}

    def work(topic: str, reader: Reader) -> None:
        try:
            answers[topic] = reader.read()
        except Exception as problem:  # of any kind: a check must not end the examination
            lines = str(problem).strip().splitlines()
            answers[topic] = Unread(lines[0] if lines else type(problem).__name__)

    begun = time.monotonic()
    threads = {}
    for topic, reader in readers.items():
        thread = threading.Thread(target=work, args=(topic, reader), daemon=True)
        thread.start()
        threads[topic] = thread
    for topic, thread in threads.items():
        limit_s = readers[topic].limit_s
        thread.join(max(0.0, begun + limit_s - time.monotonic()))
    # One that answers after its limit must not change what is being judged.
    known = dict(answers)
    return {
        topic: known.get(topic, Unread(f"no answer within {reader.limit_s:g} s"))
        for topic, reader in readers.items()
    }

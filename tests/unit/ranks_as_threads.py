"""Ranks as threads of one process, with a store in memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ddp_profiler.errors import DdpProfilerError

WAIT_S = 10.0


class Store:
    """Values by key, shared by the threads."""

    def __init__(self) -> None:
        self.values = {}
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, wait_s):
        until = time.monotonic() + wait_s
        with self.changed:
            while key not in self.values:
                if not self.changed.wait(until - time.monotonic()):
                    raise DdpProfilerError(f"nobody published {key!r}")
            return self.values[key]


class Board:
    """One rank's view of the store; values are encoded as in a real one."""

    def __init__(self, store, rank, wait_s=WAIT_S):
        self.store, self.rank, self.wait_s = store, rank, wait_s

    def publish(self, key, value):
        self.store.set(key, msgspec.json.encode(value))

    def learn(self, key, kind=object, heartbeat=None, patience_s=0):
        return msgspec.json.decode(self.store.get(key, self.wait_s), type=kind)


def at_once(*functions):
    """Calls each function in a thread of its own; returns results, or what was raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]

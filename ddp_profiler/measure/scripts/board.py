"""What the ranks of a script tell each other: over the launcher's store, never over its groups.

A script's process groups are its own: no collective of ours runs in them, and none at all where
ranks may have parted. The store of torchrun's agent is there before the script and after it. A
program that observes itself has mostly started its process group already: then that group's own
store does, whatever launched the ranks.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import Any

import msgspec
import torch.distributed as dist

from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.measure import interfaces, kernel, meeting
from ddp_profiler.measure.bounded import BoundedStore
from ddp_profiler.measure.topology import Topology

_PAUSE_S = 0.02
_numbers = itertools.count()


class ScriptBoard:
    """Makes values known between the ranks of a script.

    Several in one process, one after the other, know nothing of each other: all ranks make
    equally many.

    Args:
        topology: This rank's place.
        timeout_s: Seconds after which waiting for another rank is given up.
        store: A store of torch that all ranks have; that of the launcher where None.

    Raises:
        UsageError: The other ranks cannot be reached.
    """

    def __init__(self, topology: Topology, timeout_s: float, store: Any = None) -> None:
        self.rank = topology.rank
        # A launcher that starts ranks anew may keep its store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"script/{attempt}/{next(_numbers)}"
        self._topology = topology
        self._timeout_s = timeout_s
        self._board: Any = None
        self._alone: dict[str, bytes] = {}
        if topology.world_size > 1 and store is not None:
            prefixed = dist.PrefixStore("ddp_profiler", store)  # type: ignore[attr-defined]
            self._board = BoundedStore(prefixed, timeout_s, "the process group's own address")
        elif topology.world_size > 1:
            own = meeting.Presence(
                topology.rank,
                socket.gethostname(),
                kernel.shared("net"),
                # The script chooses its backend and its interfaces itself.
                interfaces.Route((), (), "the script"),
            )
            self._board = meeting.meet(topology, own, timeout_s).board

    def publish(self, key: str, value: object) -> None:
        """Makes a value known to all ranks."""
        raw = msgspec.json.encode(value)
        if self._board is None:
            self._alone[key] = raw
        else:
            self._board.set(self._name(key), raw)

    def learn(self, key: str, kind: Any = Any) -> Any:
        """Waits for a value that a rank makes known and returns it as ``kind``.

        Raises:
            DdpProfilerError: Nobody made it known in time.
        """
        if self._board is None:
            return msgspec.json.decode(self._alone[key], type=kind)
        if not self._wait([key], self._timeout_s):
            raise DdpProfilerError(
                f"Rank {self.rank} waited {self._timeout_s:g} s for {key!r}.",
                "A rank has died or hangs; raise --timeout if it is only slow.",
            )
        return msgspec.json.decode(self._board.get(self._name(key)), type=kind)

    def find(self, key: str, kind: Any = Any) -> Any:
        """Returns a value as ``kind`` if a rank has made it known, else None; never waits."""
        if self._board is None:
            raw = self._alone.get(key)
        else:
            name = self._name(key)
            raw = self._board.get(name) if self._board.check([name]) else None
        return None if raw is None else msgspec.json.decode(raw, type=kind)

    def await_one(self, key: str, limit_s: float) -> bool:
        """Waits until somebody has made ``key`` known; tells whether it is."""
        return self._board is None or self._wait([key], limit_s)

    def await_all(self, key: str, limit_s: float) -> bool:
        """Waits until every rank has made ``key/RANK`` known; tells whether all did."""
        if self._board is None:
            return True
        return self._wait([f"{key}/{rank}" for rank in range(self._topology.world_size)], limit_s)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _wait(self, keys: list[str], limit_s: float) -> bool:
        names = [self._name(key) for key in keys]
        deadline = time.monotonic() + limit_s
        while not self._board.check(names):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

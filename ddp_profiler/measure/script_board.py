"""What the ranks of a script tell each other: over the launcher's store, never over its groups.

A script's process groups are its own: no collective of ours runs in them, and none at all where
ranks may have parted. The store of torchrun's agent is there before the script and after it.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.measure import interfaces, kernel, meeting
from ddp_profiler.measure.topology import Topology

_PAUSE_S = 0.02


class ScriptBoard:
    """Makes values known between the ranks of a script.

    Args:
        topology: This rank's place.
        timeout_s: Seconds after which waiting for another rank is given up.

    Raises:
        UsageError: The other ranks cannot be reached.
    """

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self.rank = topology.rank
        self._topology = topology
        self._timeout_s = timeout_s
        self._board: Any = None
        self._alone: dict[str, bytes] = {}
        if topology.world_size > 1:
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
            self._board.set(f"script/{key}", raw)

    def learn(self, key: str, kind: Any = Any) -> Any:
        """Waits for a value that a rank makes known and returns it as ``kind``.

        Raises:
            DdpProfilerError: Nobody made it known in time.
        """
        if self._board is None:
            return msgspec.json.decode(self._alone[key], type=kind)
        if not self._wait([f"script/{key}"], self._timeout_s):
            raise DdpProfilerError(
                f"Rank {self.rank} waited {self._timeout_s:g} s for {key!r}.",
                "A rank has died or hangs; raise --timeout if it is only slow.",
            )
        return msgspec.json.decode(self._board.get(f"script/{key}"), type=kind)

    def find(self, key: str, kind: Any = Any) -> Any:
        """Returns a value as ``kind`` if a rank has made it known, else None; never waits."""
        if self._board is None:
            raw = self._alone.get(key)
        else:
            raw = self._board.get(f"script/{key}") if self._board.check([f"script/{key}"]) else None
        return None if raw is None else msgspec.json.decode(raw, type=kind)

    def await_one(self, key: str, limit_s: float) -> bool:
        """Waits until somebody has made ``key`` known; tells whether it is."""
        return self._board is None or self._wait([f"script/{key}"], limit_s)

    def await_all(self, key: str, limit_s: float) -> bool:
        """Waits until every rank has made ``key/RANK`` known; tells whether all did."""
        if self._board is None:
            return True
        return self._wait(
            [f"script/{key}/{rank}" for rank in range(self._topology.world_size)], limit_s
        )

    def _wait(self, keys: list[str], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self._board.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

"""Tells whether the kernel has ended processes for lack of memory.

Whoever is killed so gets a plain SIGKILL, as from a batch system or from anybody else. The kernel
counts these kills, for each memory cgroup and for the whole host; the counts before and after a
death tell the one from the other.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddp_profiler.measure.cgroups import own_groups

LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
"""File of a memory cgroup's limit in bytes, by the version of the cgroup."""
_COUNTS = {1: "memory.oom_control", 2: "memory.events"}
_NO_LIMIT_BYTES = 1 << 62
"""Version 1 has a number near 2^63 where there is no limit."""


def limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the least limit on memory, in bytes, of this process's cgroups; None without one.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    found = []
    with contextlib.suppress(OSError):
        for folder, version in own_groups("memory", root):
            # Version 2 says "max" where there is none.
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / LIMITS[version]).read_text()))
    least = min(found, default=_NO_LIMIT_BYTES)
    return least if least < _NO_LIMIT_BYTES else None


class MemoryKills:
    """Kills for lack of memory from now on.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._in_group, self._on_host = self._counts()

    def words(self) -> str:
        """Returns what has been counted since, as half a sentence; empty where nothing was.

        It is evidence for a death, no proof: another process may be the one that was counted.
        """
        in_group, on_host = self._counts()
        if in_group > self._in_group:
            limit = limit_bytes(self._root)
            named = "" if limit is None else f" of {limit / 1e9:.1f} GB"
            return f"out of memory: the kernel has just enforced the limit{named} of its cgroup"
        if on_host > self._on_host:
            return "out of memory: the kernel has just ended a process of this host to get some"
        return ""

    def _counts(self) -> tuple[int, int]:
        """Returns the counts of this process's cgroups, and of the whole host."""
        in_group = 0
        with contextlib.suppress(OSError):
            # A cgroup's folder can come more than once, always the same ones.
            for folder, version in own_groups("memory", self._root):
                in_group += _count(folder / _COUNTS[version])
        return in_group, _count(self._root / "proc/vmstat")


def _count(file: Path) -> int:
    """Returns the value after ``oom_kill``; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0

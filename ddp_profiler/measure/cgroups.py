"""The cgroups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yields the folders of this process's cgroup and of those around it, with their version.

    Version 2 (``0::/path``) and version 1 (``4:cpu,cpuacct:/path``) are read. In a container
    the path may be the host's and not exist inside: its own cgroup is then the mounted root. So
    a folder need not exist.

    Args:
        controller: ``cpu`` or ``memory``.
        root: Where ``proc`` and ``sys`` are.

    Raises:
        OSError: The system does not say in which groups this process is.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text(errors="replace").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if not controllers:
            version, trees = 2, [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            version, trees = 1, [mounts / controllers, mounts / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for tree in trees:
            for depth in range(len(parts), -1, -1):
                yield tree.joinpath(*parts[:depth]), version

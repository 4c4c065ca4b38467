"""Which ranks a process group has, as kernels' arguments or the file's metadata say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def configured_ranks(distributed_info: bytes | None) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of each process group that the metadata lists, by its name.

    Args:
        distributed_info: The JSON of ``distributedInfo``.
    """
    given = _decoded(distributed_info)
    config = given.get("pg_config") if isinstance(given, dict) else None
    found: dict[str, tuple[int, ...]] = {}
    for one in config if isinstance(config, list) else []:
        if isinstance(one, dict) and isinstance(one.get("pg_name"), str):
            ranks = _ranks(one.get("ranks"))
            if ranks:
                found[one["pg_name"]] = ranks
    return found


def group_ranks(
    text: bytes, size: int, config: Mapping[str, tuple[int, ...]], name: str
) -> tuple[int, ...] | None:
    """Returns the ranks of a group; None where nothing says all of them.

    >>> group_ranks(b'"[0, 2]"', 2, {}, "1"), group_ranks(b'"[0, 1, ...]"', 64, {}, "1")
    ((0, 2), None)

    Args:
        text: The JSON of ``Process Group Ranks``; long lists are cut by PyTorch.
        size: Number of its ranks; below 0 where not said.
        config: The groups of the metadata.
        name: Name of the group.
    """
    given = _decoded(text)
    ranks = _ranks(_decoded(given.encode()) if isinstance(given, str) else given)
    for found in (ranks, config.get(name)):
        if found and (size < 0 or len(found) == size):
            return found
    return None


def _decoded(text: bytes | None) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _ranks(given: Any) -> tuple[int, ...] | None:
    """Returns different ranks in order; None for anything else."""
    if isinstance(given, list) and all(type(rank) is int and rank >= 0 for rank in given):
        return tuple(sorted(set(given)))
    return None

"""What a process group that the training has started already tells of this process's place."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_profiler.errors import UsageError
from ddp_profiler.measure.topology import Topology, read_topology


def find_place() -> tuple[Topology, Any]:
    """Returns this process's place among the ranks that train, and a store that they have.

    The process group is asked where there is one: ranks need not come from a launcher that
    sets variables (``mp.spawn``). Else the variables are, and without them this process is
    alone. The store is the one through which the group's ranks found each other; None where
    there is no group yet, or only one rank.

    Raises:
        UsageError: The variables contradict each other, or the group has no store.
    """
    if not dist.is_available() or not dist.is_initialized():
        return read_topology(os.environ), None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    topology = _as_launched(rank, world_size) or Topology(rank, rank, world_size, world_size, False)
    return topology, _store() if world_size > 1 else None


def _as_launched(rank: int, world_size: int) -> Topology | None:
    """Returns what a launcher's variables say, where they are about this group."""
    if os.environ.get("RANK") != str(rank) or os.environ.get("WORLD_SIZE") != str(world_size):
        return None
    return read_topology(os.environ) if "LOCAL_WORLD_SIZE" in os.environ else None


def _store() -> Any:
    store = distributed_c10d._get_default_store()
    if store is None:
        raise UsageError(
            "The ranks of this process group have no store to talk through, as under MPI.",
            "Start them with torchrun, or with an init_method of init_process_group.",
        )
    return store

"""One rank's part in a launch: its process group, the store that ranks talk through, levels."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ddp_profiler.errors import DdpProfilerError, InputError, UsageError
from ddp_profiler.measure import environment
from ddp_profiler.measure.topology import Topology
from ddp_profiler.schema import LevelSettings, RankPlace

_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25
"""Between asking the store: idle ranks notice the end of a level this late, at little cost."""


@dataclass(frozen=True)
class Device:
    """Where a rank computes and what it communicates with.

    Attributes:
        device: Torch device of the rank.
        backend: ``nccl`` or ``gloo``.
        threads: Threads of the rank, the same at every dp.
    """

    device: torch.device
    backend: str
    threads: int


def choose_device(topology: Topology, backend: str, threads: int | None) -> Device:
    """Chooses GPU and NCCL where each rank of the node has a GPU of its own, else CPU and gloo.

    Raises:
        UsageError: NCCL was asked for and cannot be had, or ranks outnumber GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = topology.local_world_size
    if backend == "nccl" and not (gpus and dist.is_nccl_available()):
        raise UsageError(
            f"--backend nccl needs NVIDIA GPUs; torch {torch.__version__} sees none here.",
            "Use --backend gloo, or install a CUDA build of torch on a GPU machine.",
        )
    if gpus and ranks > gpus and backend != "gloo":
        raise UsageError(
            f"{ranks} ranks on this node but {gpus} GPU{'s' if gpus > 1 else ''}: "
            "two ranks would share a GPU.",
            f"Start at most {gpus} (torchrun --nproc_per_node {gpus}), or use --backend gloo.",
        )
    chosen = backend if backend != "auto" else "nccl" if gpus else "gloo"
    device = torch.device("cuda", topology.local_rank % gpus) if gpus else torch.device("cpu")
    share = max(1, environment.available_cores() // ranks)
    return Device(device=device, backend=chosen, threads=threads or share)


class Session:
    """One rank's part in a launch.

    Args:
        topology: This rank's place.
        device: Device and backend.
        timeout_s: Seconds after which waiting for another rank is given up.

    Raises:
        UsageError: The port is in use, or the other ranks cannot be reached.
    """

    def __init__(self, topology: Topology, device: Device, timeout_s: float) -> None:
        self.topology = topology
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        torch.set_num_threads(device.threads)
        if device.device.type == "cuda":
            torch.cuda.set_device(device.device)
        try:
            if topology.world_size == 1:
                # Alone: no port is opened.
                dist.init_process_group(
                    device.backend,
                    store=dist.HashStore(),  # type: ignore[attr-defined]
                    rank=0,
                    world_size=1,
                    timeout=self.timeout,
                )
            else:
                dist.init_process_group(device.backend, timeout=self.timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise _explain_start(error, timeout_s) from error
        store = dist.distributed_c10d._get_default_store()
        self.store: Any = dist.PrefixStore("ddp_profiler", store)  # type: ignore[attr-defined]
        self.places: tuple[RankPlace, ...] = ()
        """Where each rank runs; empty before :meth:`gather_places`."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.topology.rank

    def publish(self, key: str, value: object) -> None:
        """Makes a value known to all ranks."""
        self.store.set(key, msgspec.json.encode(value))

    def learn(
        self,
        key: str,
        kind: Any = Any,
        heartbeat: str | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """Waits for a value that a rank makes known and returns it as ``kind``.

        Waiting costs no processor time worth naming. It ends after the timeout, or, with a
        ``heartbeat`` counter, once that has not moved for the timeout; ``limit_s`` stands in
        for the timeout where it is given. It asks now and then,
        since the store's own waiting cannot be interrupted and warns when it ends.

        Raises:
            DdpProfilerError: Nobody made the value known in time.
        """
        beats, moved = 0, time.monotonic()
        limit = self.timeout.total_seconds() if limit_s is None else limit_s
        pause = _SHORTEST_PAUSE_S
        while not self.store.check([key]):
            now = self.store.add(heartbeat, 0) if heartbeat else beats
            if now != beats:
                beats, moved = now, time.monotonic()
            elif time.monotonic() - moved >= limit:
                raise DdpProfilerError(
                    f"Rank {self.rank} waited {limit:g} s for {key!r} and nothing moved.",
                    "A rank has died or hangs; raise --timeout if it is only slow.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return msgspec.json.decode(self.store.get(key), type=kind)

    def beat(self, heartbeat: str) -> None:
        """Tells ranks that wait with :meth:`learn` that things move."""
        self.store.add(heartbeat, 1)

    def gather_places(self, clock_domain: str) -> tuple[RankPlace, ...]:
        """Tells every rank where each rank runs, and keeps it in ``places``.

        Args:
            clock_domain: Equal for ranks that read the same monotonic clock.
        """
        topology = self.topology
        own = {
            "rank": topology.rank,
            "local_rank": topology.local_rank,
            "host": socket.gethostname(),
            "agent": os.environ.get("GROUP_RANK", ""),
            "clock": clock_domain,
            "device": str(self.device.device),
            "pid": os.getpid(),
        }
        self.publish(f"place/{topology.rank}", own)
        entries = [self.learn(f"place/{rank}") for rank in range(topology.world_size)]
        nodes: dict[tuple[str, str], int] = {}
        self.places = tuple(
            RankPlace(
                rank=entry["rank"],
                local_rank=entry["local_rank"],
                node=nodes.setdefault((entry["host"], entry["agent"]), len(nodes)),
                hostname=entry["host"],
                clock_domain=entry["clock"],
                device=entry["device"],
                pid=entry["pid"],
            )
            for entry in entries
        )
        return self.places

    def make_groups(self, levels: tuple[LevelSettings, ...]) -> dict[tuple[int, ...], Any]:
        """Makes a process group for each set of ranks; all ranks must call it alike."""
        groups: dict[tuple[int, ...], Any] = {}
        for level in levels:
            if level.ranks not in groups:
                groups[level.ranks] = dist.new_group(list(level.ranks), timeout=self.timeout)
        return groups

    def check_reducible(self, dtypes: set[torch.dtype]) -> None:
        """Reduces one element of each dtype, since backends differ in what they can sum.

        Raises:
            UsageError: The backend cannot sum a dtype.
        """
        for dtype in sorted(dtypes, key=str):
            probe = torch.ones(2, dtype=dtype, device=self.device.device)
            try:
                dist.all_reduce(probe)
                wrong = not math.isclose(float(probe[0].real), dist.get_world_size())
            except (RuntimeError, TypeError, ValueError):
                wrong = True
            if wrong:
                name = str(dtype).removeprefix("torch.")
                raise UsageError(
                    f"The {self.device.backend} backend cannot sum gradients of type {name}.",
                    "Use a model with float32 parameters, or another --backend.",
                )

    def close(
        self,
        before: Callable[[], None] = lambda: None,
        heartbeat: str | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Waits until every rank is here and leaves the process group.

        Args:
            before: Called first.
            heartbeat: Counter that moves while rank 0 is still busy.
            limit_s: How long rank 0 waits for another rank; the timeout where None.

        Raises:
            DdpProfilerError: A rank did not come in time.
        """
        before()
        self.publish(f"closed/{self.rank}", True)
        if self.rank == 0:
            try:
                for rank in range(self.topology.world_size):
                    self.learn(f"closed/{rank}", limit_s=limit_s)
            finally:
                # Those that came need not wait for those that do not.
                self.publish("all closed", True)
        else:
            self.learn("all closed", heartbeat=heartbeat)
        dist.destroy_process_group()


def _explain_start(error: Exception, timeout_s: float) -> DdpProfilerError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return UsageError(
            f"Port {os.environ.get('MASTER_PORT')} is in use by another process.",
            "Choose another --master-port, or start torchrun with --standalone.",
        )
    if isinstance(error, dist.DistStoreError) or "timed out" in text.lower():
        return UsageError(
            f"Not all {os.environ.get('WORLD_SIZE')} ranks met at {address} within "
            f"{timeout_s:g} s.",
            "Check that every node was started and that the address can be reached.",
        )
    return InputError(f"The process group could not be started at {address}: {text}", "")

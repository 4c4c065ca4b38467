"""One rank's part in a launch: its process group, the store that ranks talk through, levels."""

from __future__ import annotations

import contextlib
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

from ddp_profiler.errors import DdpProfilerError, UsageError
from ddp_profiler.measure import environment, interfaces, kernel, meeting
from ddp_profiler.measure.awaited import in_words
from ddp_profiler.measure.bounded import BoundedStore, NoAnswerError
from ddp_profiler.measure.failures import FailureBoard, phase_key
from ddp_profiler.measure.topology import Topology
from ddp_profiler.measure.watch import Watch
from ddp_profiler.schema import LevelSettings, RankPlace

_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25
"""Between asking the store: idle ranks notice the end of a level this late, at little cost."""
_GRACE_S = 5.0
"""Beyond the timeout, before a rank is ended that the store does not answer."""
_FAREWELL_S = 10.0
"""What a rank may take to end by itself once another one has failed."""
CLOSING_S = 15.0
"""So long rank 0 waits for the others to close, once a collection has shown that some are gone."""
PATIENCE_S = CLOSING_S + 10.0
"""A rank that waits for rank 0, while that waits for a rank that is gone, waits this much longer
than the timeout: what rank 0 says at the end of its own wait must still find it."""
_REPORT_S = 3.0
"""What the store may take to answer a rank that has failed."""


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
        join: Start the process group at once, without a watch that is set up before.

    Raises:
        UsageError: Ranks are missing or cannot be reached, or the port is in use.
    """

    def __init__(
        self, topology: Topology, device: Device, timeout_s: float, *, join: bool = True
    ) -> None:
        self.topology = topology
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        """Name of each rank's node, by rank."""
        self.side_problem = ""
        """Why gloo cannot connect the nodes beside another backend; empty if it may."""
        self._meeting: meeting.Meeting | None = None
        self._watch: Watch | None = None
        torch.set_num_threads(device.threads)
        if device.device.type == "cuda":
            torch.cuda.set_device(device.device)
        store: Any
        if topology.world_size == 1:
            # Alone: no port is opened.
            store = dist.HashStore()  # type: ignore[attr-defined]
            self.store = BoundedStore(
                dist.PrefixStore("ddp_profiler", store),  # type: ignore[attr-defined]
                timeout_s,
                "this process",
            )
        else:
            own = meeting.Presence(
                topology.rank,
                socket.gethostname(),
                kernel.shared("net"),
                interfaces.find_route(device.backend),
                interfaces.reachable_interfaces()[:4],
                interfaces.find_route("gloo")
                if device.backend != "gloo" and topology.local_world_size < topology.world_size
                else None,
            )
            self._meeting = meeting.meet(topology, own, timeout_s)
            self.hosts = tuple(member.host for member in self._meeting.members)
            self.side_problem = meeting.side_problem(self._meeting.members)
            self.store = self._meeting.board
            store = self._meeting.store
        self._raw_store = store
        self.places: tuple[RankPlace, ...] = ()
        """Where each rank runs; empty before :meth:`gather_places`."""
        if join:
            self.join()

    def join(self) -> None:
        """Starts the process group; all ranks are here.

        Raises:
            InputError: Torch could not start it.
        """
        try:
            dist.init_process_group(
                self.device.backend,
                # As torch's own start does, for its keys and those of others.
                store=dist.PrefixStore("default_pg", self._raw_store),  # type: ignore[attr-defined]
                rank=self.topology.rank,
                world_size=self.topology.world_size,
                timeout=self.timeout,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            where = "this process" if self._meeting is None else self._meeting.address
            raise meeting.explain_start(error, where) from error

    def tell_phase(self, name: str) -> None:
        """Makes known what this rank does, for the report of a failure; never fails."""
        with contextlib.suppress(DdpProfilerError):
            self.store.set(phase_key(self.rank), name)

    def watch(
        self,
        on_failure: Callable[[], None],
        on_lost: Callable[[str], None],
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to watch whether the run is lost, unless this rank is alone.

        Args:
            on_failure: Told once, on a thread, when any rank has noted a failure.
            on_lost: Told once, on a thread, when this rank has to be ended, and why.
            tell: Called on a thread about once a second, to make known what this rank does.
        """
        if self._meeting is None:
            return
        limit_s = self.timeout.total_seconds() + _GRACE_S
        self._watch = Watch(
            self._connection(limit_s, limit_s),
            self.rank,
            self.topology.world_size,
            limit_s=limit_s,
            farewell_s=_FAREWELL_S,
            on_failure=on_failure,
            on_lost=on_lost,
            tell=tell,
        )
        self._watch.start()

    def stop_watching(self) -> None:
        """Ends the watch: what happens to other ranks from here on is no failure of this one."""
        if self._watch is not None:
            self._watch.stop()

    def failure_board(self) -> FailureBoard:
        """Returns failures of all ranks, over a connection of its own that nothing holds up."""
        store = self.store if self._meeting is None else None
        with contextlib.suppress(DdpProfilerError, NoAnswerError, dist.DistError):
            store = store or self._connection(_REPORT_S, _REPORT_S)
        return FailureBoard(store, self.rank, self.hosts)

    @property
    def watch_interval_s(self) -> float:
        """Seconds between two signs of life of a rank; 0 where nothing watches."""
        return self._watch.interval_s if self._watch else 0.0

    def _connection(self, open_s: float, answer_s: float) -> BoundedStore:
        assert self._meeting is not None
        return BoundedStore(self._meeting.second_store(open_s), answer_s, self.store.where)

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
        patience_s: float = 0.0,
    ) -> Any:
        """Waits for a value that a rank makes known and returns it as ``kind``.

        Waiting costs no processor time worth naming. It ends after the timeout, or, with a
        ``heartbeat`` counter, once that has not moved for the timeout; ``limit_s`` stands in
        for the timeout where it is given, and ``patience_s`` is added to it. It asks now and
        then, since the store's own waiting cannot be interrupted and warns when it ends.

        Raises:
            DdpProfilerError: Nobody made the value known in time.
        """
        beats, moved = 0, time.monotonic()
        limit = (self.timeout.total_seconds() if limit_s is None else limit_s) + patience_s
        pause = _SHORTEST_PAUSE_S
        while not self.store.check([key]):
            if self._watch is not None and self._watch.failed:
                raise DdpProfilerError(
                    f"Stopped waiting for {in_words(key)}: another rank has failed."
                )
            now = self.store.add(heartbeat, 0) if heartbeat else beats
            if now != beats:
                beats, moved = now, time.monotonic()
            elif time.monotonic() - moved >= limit:
                raise DdpProfilerError(
                    f"Waited {limit:g} s for {in_words(key)}, and nothing moved.",
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
        heartbeat: str | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Waits until every rank is here and leaves the process group.

        Args:
            heartbeat: Counter that moves while rank 0 is still busy; moves here as well.
            limit_s: How long rank 0 waits for another rank; the timeout where None.

        Raises:
            DdpProfilerError: A rank did not come in time.
        """
        # A rank that leaves may take the store with it.
        self.stop_watching()
        self.publish(f"closed/{self.rank}", True)
        if self.rank == 0:
            try:
                for rank in range(self.topology.world_size):
                    if heartbeat is not None:
                        self.beat(heartbeat)
                    self.learn(f"closed/{rank}", limit_s=limit_s)
            finally:
                # Those that came need not wait for those that do not.
                self.publish("all closed", True)
        else:
            self.learn("all closed", heartbeat=heartbeat, patience_s=PATIENCE_S)
        dist.destroy_process_group()

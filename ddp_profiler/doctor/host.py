"""Processor, clock, disk and limits of this node."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_profiler import units
from ddp_profiler.doctor.verdict import Verdict, error, not_applicable, ok, warning
from ddp_profiler.measure.cgroups import own_groups
from ddp_profiler.measure.machine import compact

CLOCK_DOCS = "https://docs.kernel.org/timers/timekeeping.html"
SHM_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
FILES_DOCS = "https://docs.pytorch.org/docs/stable/multiprocessing.html"

_QUICK_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page", "timebase")
_LITTLE_DISK_BYTES = 1_000_000_000
_LITTLE_SHM_BYTES = 1_000_000_000
_FEW_FILES = 1024
_WORKERS = 4
_UNSYNCHRONISED = 0x40


@dataclass(frozen=True)
class CoreFacts:
    """Cores that this process may use.

    Attributes:
        logical: Of the node, as the kernel counts them.
        physical: Of the node, without those that share one; None where not known.
        allowed: Numbers of those that this process may run on.
        quota: Cores' worth of time that its cgroups give it; None without a limit.
        numa_nodes: NUMA nodes of the node.
        threads: ``OMP_NUM_THREADS``; None where not set.
    """

    logical: int
    physical: int | None
    allowed: tuple[int, ...]
    quota: float | None
    numa_nodes: int
    threads: str | None

    @property
    def usable(self) -> float:
        """Cores that it can keep busy."""
        return min(len(self.allowed), self.quota or len(self.allowed))


@dataclass(frozen=True)
class ClockFacts:
    """The clocks that times are taken from.

    Attributes:
        source: What the kernel reads time from; None where not known.
        available: What it could.
        resolution_ns: What the system states for the monotonic clock.
        reading_ns: What one reading costs, the median of many.
        synchronised: Whether something keeps the real-time clock right; None where not known.
        error_ms: How wrong the kernel thinks it may be, in ms.
    """

    source: str | None
    available: tuple[str, ...]
    resolution_ns: float
    reading_ns: float
    synchronised: bool | None
    error_ms: float | None = None


@dataclass(frozen=True)
class DiskFacts:
    """Where run folders would be written.

    Attributes:
        wanted: The folder.
        folder: It, or the nearest folder above it that there is.
        writable: Whether this process may write there.
        free_bytes: What it may still write.
        free_files: How many files; None where the file system does not limit them.
        kind: File system, such as ``ext4``.
    """

    wanted: str
    folder: str
    writable: bool
    free_bytes: int
    free_files: int | None
    kind: str | None


@dataclass(frozen=True)
class LimitFacts:
    """Limits of this process; None where there is none.

    Attributes:
        memlock_bytes: Memory that it may lock.
        open_files: Files that it may have open.
        open_files_most: What it may raise that to.
        shm_bytes: Size of ``/dev/shm``; None where it is not there.
        shm_free_bytes: Free of it.
        linux: Whether this system shares memory there.
    """

    memlock_bytes: int | None
    open_files: int | None
    open_files_most: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    linux: bool = True


def read_cores(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> CoreFacts:
    """Reads cores, affinity and the limits of cgroups."""
    logical = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(logical)
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return CoreFacts(
        logical=logical,
        physical=psutil.cpu_count(logical=False),
        allowed=tuple(sorted(allowed)),
        quota=read_quota(root),
        numa_nodes=max(1, len(nodes)),
        threads=environ.get("OMP_NUM_THREADS") or None,
    )


def read_quota(root: Path = Path("/")) -> float | None:
    """Returns the cores' worth of time that cgroups give; None without a limit.

    Version 2 has ``cpu.max`` ("200000 100000" or "max 100000"), version 1 ``cpu.cfs_quota_us``
    (-1 for none) and ``cpu.cfs_period_us``. A limit of a group around this one holds too.
    """
    try:
        quotas = [_quota_of(folder) for folder, _ in own_groups("cpu", root)]
    except OSError:
        return None
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def read_clock(root: Path = Path("/")) -> ClockFacts:
    """Reads what time comes from, what reading it costs, and whether it is kept right."""
    folder = root / "sys/devices/system/clocksource/clocksource0"
    try:
        source: str | None = (folder / "current_clocksource").read_text().strip()
        available = tuple((folder / "available_clocksource").read_text().split())
    except OSError:
        source, available = None, ()
    costs = []
    for _ in range(200):
        begun = time.monotonic_ns()
        for _ in range(8):
            time.monotonic_ns()
        costs.append((time.monotonic_ns() - begun) / 9)
    synchronised, error_ms = _kernel_clock()
    return ClockFacts(
        source,
        available,
        time.get_clock_info("monotonic").resolution * 1e9,
        sorted(costs)[len(costs) // 2],
        synchronised,
        error_ms,
    )


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``; what follows is not read."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def _kernel_clock() -> tuple[bool | None, float | None]:
    """Asks the kernel whether its clock is synchronised; without modes it changes nothing."""
    try:
        state = _Timex()
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
            return None, None
    except (OSError, AttributeError):  # another system; a container that forbids it
        return None, None
    return not state.status & _UNSYNCHRONISED, state.maxerror / 1e3


def read_disk(wanted: Path, root: Path = Path("/")) -> DiskFacts:
    """Reads what is free where run folders would be written; may block on a dead server."""
    folder = wanted.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = os.statvfs(folder)
    return DiskFacts(
        wanted=str(wanted),
        folder=str(folder),
        writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        free_bytes=usage.f_bavail * usage.f_frsize,
        free_files=usage.f_favail if usage.f_files else None,
        kind=_file_system(folder, root),
    )


def _file_system(folder: Path, root: Path) -> str | None:
    """Returns the kind of the file system that is mounted nearest above a folder."""
    best: tuple[int, str | None] = (-1, None)
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        # The kernel writes a blank in a path as \040.
        mount = Path(fields[4].replace("\\040", " "))
        if folder.is_relative_to(mount):
            best = max(best, (len(mount.parts), after.split()[0]), key=lambda pair: pair[0])
    return best[1]


def read_limits(shm: Path = Path("/dev/shm")) -> LimitFacts:
    """Reads the limits of this process and the size of shared memory."""

    def limit(kind: int, which: int) -> int | None:
        value = resource.getrlimit(kind)[which]
        return None if value == resource.RLIM_INFINITY else value

    size: int | None
    free: int | None
    try:
        usage = os.statvfs(shm)
        size, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    except OSError:
        size, free = None, None
    return LimitFacts(
        memlock_bytes=limit(resource.RLIMIT_MEMLOCK, 0),
        open_files=limit(resource.RLIMIT_NOFILE, 0),
        open_files_most=limit(resource.RLIMIT_NOFILE, 1),
        shm_bytes=size,
        shm_free_bytes=free,
        linux=sys.platform == "linux",
    )


def judge_cores(facts: CoreFacts, ranks: int, *, gpus: bool) -> list[Verdict]:
    """Judges the cores for a number of ranks, and the threads of each.

    Args:
        facts: Of this node.
        ranks: That would be started on it.
        gpus: Whether they compute on GPUs: then threads matter less.
    """
    usable = facts.usable
    cores = f"{len(facts.allowed)} of {facts.logical} cores ({compact(facts.allowed)})"
    shared = (
        f", {facts.physical} of them physical"
        if facts.physical and facts.physical < facts.logical == len(facts.allowed)
        else ""
    )
    verdicts = []
    if facts.quota is not None and facts.quota < len(facts.allowed):
        verdicts.append(
            warning(
                "cores",
                f"{cores} are allowed, and the cgroup gives the time of {facts.quota:g}: programs "
                "start threads for all of them and are then held up.",
                f"Raise the limit (docker --cpus, Kubernetes limits.cpu), or give each rank "
                f"OMP_NUM_THREADS={max(1, int(facts.quota) // ranks)}.",
            )
        )
    elif usable < ranks:
        verdicts.append(
            warning(
                "cores",
                f"{cores} for {ranks} ranks: they compete, and steps are slower than they "
                "could be.",
                "Start fewer ranks, or widen the affinity (taskset, --cpus-per-task).",
            )
        )
    else:
        numa = f", {facts.numa_nodes} NUMA nodes" if facts.numa_nodes > 1 else ""
        verdicts.append(ok("cores", f"{cores}{shared}{numa} for {ranks} rank{_s(ranks)}."))
    return [*verdicts, _judge_threads(facts, ranks, gpus=gpus)]


def _judge_threads(facts: CoreFacts, ranks: int, *, gpus: bool) -> Verdict:
    id = "threads"
    fair = max(1, int(facts.usable) // ranks)
    if facts.threads is None:
        unset = "OMP_NUM_THREADS is not set: "
        if ranks == 1:
            return ok(id, f"{unset}the rank takes all cores.")
        unset += f"torchrun sets 1 for {ranks} ranks"
        if gpus or fair == 1:
            return ok(id, f"{unset}.")
        return warning(
            id,
            f"{unset}, and there are cores for {fair} each.",
            f"export OMP_NUM_THREADS={fair} (a study also takes --threads-per-rank {fair}).",
        )
    # A list, as OpenMP allows for nested loops: the first is what counts.
    first = facts.threads.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return warning(
            id,
            f"OMP_NUM_THREADS={facts.threads} is no number of threads, and libraries ignore it.",
            f"export OMP_NUM_THREADS={fair}",
        )
    threads = int(first)
    if threads * ranks > facts.usable and threads > 1:
        return warning(
            id,
            f"OMP_NUM_THREADS={threads} for {ranks} ranks makes {threads * ranks} threads on "
            f"{facts.usable:g} cores.",
            f"export OMP_NUM_THREADS={fair}",
        )
    return ok(
        id, f"OMP_NUM_THREADS={threads}: {threads * ranks} threads on {facts.usable:g} cores."
    )


def judge_clock(facts: ClockFacts, nodes: int | None) -> list[Verdict]:
    """Judges the time source: quick, fine, and kept right.

    Args:
        facts: Of this node.
        nodes: Nodes of the run; None where not known.
    """
    verdicts = []
    cost = f"one reading takes {facts.reading_ns:.0f} ns"
    if facts.source is None:
        verdicts.append(not_applicable("clock-source", f"Clock source: not known here; {cost}."))
    elif facts.source in _QUICK_CLOCKS:
        verdicts.append(ok("clock-source", f"Clock source {facts.source}; {cost}."))
    else:
        better = next((name for name in _QUICK_CLOCKS if name in facts.available), None)
        verdicts.append(
            warning(
                "clock-source",
                f"Clock source {facts.source}; {cost}: each reading is a system call.",
                f"echo {better} > /sys/devices/system/clocksource/clocksource0/current_clocksource"
                if better
                else "See why the kernel does not trust the tsc: dmesg | grep -i tsc",
                CLOCK_DOCS,
            )
        )
    resolution = f"{facts.resolution_ns:g} ns"
    if facts.resolution_ns > 1000:
        verdicts.append(
            warning(
                "clock-resolution",
                f"The monotonic clock has a resolution of {resolution}: short parts of a step are "
                "not told apart.",
                "Use a kernel with high-resolution timers.",
            )
        )
    else:
        verdicts.append(ok("clock-resolution", f"Monotonic clock: resolution {resolution}."))
    if facts.synchronised is None:
        verdicts.append(not_applicable("clock-sync", "Whether real time is kept right: not known."))
    elif facts.synchronised:
        within = f", within {facts.error_ms:g} ms" if facts.error_ms is not None else ""
        verdicts.append(ok("clock-sync", f"Real time is kept right{within}."))
    elif nodes == 1:
        verdicts.append(
            not_applicable("clock-sync", "Nothing keeps real time right; one node does without.")
        )
    else:
        verdicts.append(
            warning(
                "clock-sync",
                "Nothing keeps real time right. ddp_profiler compares clocks itself; logs and "
                "traces of several nodes will not fit together.",
                "Start chrony or systemd-timesyncd."
                + (" A single node needs nothing." if nodes is None else ""),
            )
        )
    return verdicts


def judge_disk(facts: DiskFacts) -> list[Verdict]:
    """Judges the place of run folders."""
    kind = f" ({facts.kind})" if facts.kind else ""
    free = units.nbytes(facts.free_bytes)
    where = facts.folder if facts.folder.endswith(facts.wanted) else f"{facts.folder} (for "
    if where.endswith("(for "):
        where += f"{facts.wanted})"
    if not facts.writable:
        return [
            error(
                "disk",
                f"{where}: run folders cannot be written there.",
                "Give --out DIR a folder that you may write, or start elsewhere.",
            )
        ]
    if facts.free_bytes == 0 or facts.free_files == 0:
        what = "no space" if facts.free_bytes == 0 else "no room for another file"
        return [error("disk", f"{where}{kind}: {what} is left.", "Make room, or give --out DIR.")]
    if facts.free_bytes < _LITTLE_DISK_BYTES:
        return [
            warning(
                "disk",
                f"{where}{kind}: {free} are free.",
                "Make room: what a full disk cuts short is lost.",
            )
        ]
    return [ok("disk", f"{where}{kind}: {free} free.")]


def judge_limits(facts: LimitFacts, ranks: int, *, rdma: bool) -> list[Verdict]:
    """Judges limits: memory that RDMA locks, open files and shared memory of workers.

    Args:
        facts: Of this process.
        ranks: That would be started on this node.
        rdma: Whether there is an adapter of InfiniBand or RoCE.
    """
    return [
        _judge_memlock(facts, rdma=rdma),
        _judge_files(facts),
        _judge_shm(facts, ranks),
    ]


def _judge_memlock(facts: LimitFacts, *, rdma: bool) -> Verdict:
    if facts.memlock_bytes is None:
        return ok("memlock", "Locked memory: no limit.")
    size = units.nbytes(facts.memlock_bytes)
    if not rdma:
        return not_applicable("memlock", f"Locked memory: {size}, and no RDMA adapter needs it.")
    return warning(
        "memlock",
        f"Locked memory is limited to {size}: NCCL over InfiniBand or RoCE cannot register its "
        "buffers.",
        "ulimit -l unlimited; in a container --ulimit memlock=-1, in Slurm LimitMEMLOCK of slurmd.",
        SHM_DOCS,
    )


def _judge_files(facts: LimitFacts) -> Verdict:
    if facts.open_files is None:
        return ok("open-files", "Open files: no limit.")
    if facts.open_files < _FEW_FILES:
        hard = facts.open_files_most
        return warning(
            "open-files",
            f"Open files are limited to {facts.open_files}: workers of a DataLoader pass each "
            "tensor as an open file.",
            f"ulimit -n {65536 if hard is None else min(hard, 65536)}",
            FILES_DOCS,
        )
    most = "without limit" if facts.open_files_most is None else f"up to {facts.open_files_most}"
    return ok("open-files", f"Open files: {facts.open_files}, may be raised {most}.")


def _judge_shm(facts: LimitFacts, ranks: int) -> Verdict:
    id = "shm"
    enlarge = "Enlarge it: docker --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium "
    enlarge += "Memory on /dev/shm."
    if not facts.linux:
        return not_applicable(id, "/dev/shm: this system shares memory in another way.")
    if facts.shm_bytes is None or facts.shm_free_bytes is None:
        return warning(
            id,
            "/dev/shm is not there: workers of a DataLoader and NCCL within a node need it.",
            "Mount a tmpfs there.",
            SHM_DOCS,
        )
    # Each worker keeps two batches ahead by default (prefetch_factor).
    batch = facts.shm_free_bytes / (ranks * _WORKERS * 2)
    room = (
        f"with {_WORKERS} workers on each of {ranks} rank{_s(ranks)} a batch has "
        f"{units.nbytes(batch)}"
    )
    size = f"/dev/shm: {units.nbytes(facts.shm_free_bytes)} of {units.nbytes(facts.shm_bytes)} free"
    if facts.shm_free_bytes < _LITTLE_SHM_BYTES:
        return warning(id, f"{size}; {room}.", enlarge, SHM_DOCS)
    return ok(id, f"{size}; {room}.")


def _s(count: int) -> str:
    return "" if count == 1 else "s"

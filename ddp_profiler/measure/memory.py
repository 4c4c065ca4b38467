"""How much memory a rank may use, how much it has used, and how it is held to that.

On a GPU torch's own allocator counts and refuses. On a CPU the kernel counts what is resident,
and would end some process where memory is used up; so a limit well below that is set here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from ddp_profiler.measure.cgroups import own_groups

_SHARE_OF_AVAILABLE = 0.7
"""Of the memory that a host has to spare: others need some, and peaks are read afterwards."""
_ALLOCATOR_SLACK_BYTES = 128 * 2**20
"""Stacks and pools are allocated and hardly touched; the kernel's limit counts them."""
_SAMPLING_S = 0.002
_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "_ALLOC_FAILED",
)
"""Of the allocators of torch on GPU and CPU, of C++, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that memory could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        message.lower() in text.lower() for message in _MESSAGES
    )


class MemoryMeter(Protocol):
    """Reads the most memory that this process has in use from ``begin`` on."""

    source: str
    """What the figure is, in words."""

    def begin(self) -> None:
        """Frees what is cached and begins anew."""
        ...

    def peak_bytes(self) -> int:
        """Returns the peak since ``begin``, in bytes."""
        ...


class CudaMemory:
    """Peak of what torch has allocated on a GPU.

    Args:
        device: The GPU.
    """

    source = "torch.cuda.max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Frees what is cached and begins anew."""
        release(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Returns the peak since ``begin``, in bytes."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))


class HostMemory:
    """Peak of the resident memory of this process, less what it was when this was made.

    The kernel keeps the peak (VmHWM) and forgets it on request, through ``clear_refs``.

    Args:
        folder: The process's folder in ``/proc``.

    Raises:
        OSError: The kernel does not keep it, or forgets nothing.
    """

    source = "growth of the peak resident memory (VmHWM)"

    def __init__(self, folder: Path = Path("/proc/self")) -> None:
        self._status, self._clear = folder / "status", folder / "clear_refs"
        release()
        self._before = read_status(self._status, "VmRSS")
        self._clear.write_text("5")
        read_status(self._status, "VmHWM")

    def begin(self) -> None:
        """Frees what is cached and begins anew."""
        release()
        self._clear.write_text("5")

    def peak_bytes(self) -> int:
        """Returns the peak since ``begin``, in bytes."""
        return max(0, read_status(self._status, "VmHWM") - self._before)


class SampledMemory:
    """Peak of the resident memory, looked at every 2 ms, where the kernel keeps no peak."""

    source = "growth of the resident memory, sampled every 2 ms"

    def __init__(self) -> None:
        self._process = psutil.Process()
        release()
        self._before = int(self._process.memory_info().rss)
        self._peak = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Frees what is cached and begins anew."""
        self.peak_bytes()
        release()
        self._peak = 0
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memory")
        self._thread.start()

    def peak_bytes(self) -> int:
        """Returns the peak since ``begin``, in bytes, and stops looking."""
        if self._thread is not None:
            self._look()
            self._stop.set()
            self._thread.join()
            self._thread = None
        return max(0, self._peak - self._before)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLING_S):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, int(self._process.memory_info().rss))


def open_meter(device: torch.device) -> MemoryMeter:
    """Returns what reads the peak memory on a device."""
    if device.type == "cuda":
        return CudaMemory(device)
    try:
        return HostMemory()
    except (OSError, ValueError):
        return SampledMemory()


@dataclass(frozen=True)
class Allowance:
    """Memory that a rank may use.

    Attributes:
        nbytes: In bytes.
        source: Where the figure comes from.
        soft: Whether going beyond it raises no error by itself, as on a CPU.
    """

    nbytes: int
    source: str
    soft: bool


def allowance(device: torch.device, local_ranks: int, stated_gb: float | None) -> Allowance:
    """Returns what this rank may use: what the user says, else what the machine has to spare.

    Args:
        device: The rank's device.
        local_ranks: Ranks that share the host's memory.
        stated_gb: The user's limit for a rank, in GB; None without.
    """
    on_cpu = device.type != "cuda"
    if stated_gb is not None:
        return Allowance(int(stated_gb * 1e9), "--memory-limit-gb", soft=on_cpu)
    if on_cpu:
        share = int(_SHARE_OF_AVAILABLE * available_bytes() / max(1, local_ranks))
        among = f", shared by {local_ranks} ranks" if local_ranks > 1 else ""
        return Allowance(
            share, f"{_SHARE_OF_AVAILABLE * 100:.0f} % of the memory available{among}", soft=True
        )
    free, _ = torch.cuda.mem_get_info(device)
    return Allowance(free + torch.cuda.memory_reserved(device), "memory of the GPU", soft=False)


_LIMIT_AND_USED = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Files of a cgroup, by its version."""


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that can still be used on this host, in bytes.

    What the system calls available, or what a cgroup leaves where that is less; memory of
    cached files that the kernel can take back counts as free.
    """
    found = [int(psutil.virtual_memory().available)]
    with contextlib.suppress(OSError):
        for folder, version in own_groups("memory", root):
            left = _left_in(folder, *_LIMIT_AND_USED[version])
            found += [] if left is None else [left]
    return max(0, min(found))


def _left_in(folder: Path, limit: str, used: str) -> int | None:
    """Returns what a cgroup leaves; None where it has no limit."""
    try:
        total = int((folder / limit).read_text())
        taken = int((folder / used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    cached = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    return total - max(0, taken - int(cached))


@contextlib.contextmanager
def held_to(limit: Allowance, device: torch.device) -> Iterator[None]:
    """Lets allocations beyond a limit fail while the block runs, where that can be set.

    On a GPU only a limit that the user states is set; its memory ends by itself. On Linux the
    limit of the process's data is set; it is some 100 MB wider than what may be touched, since it
    counts what is only reserved as well.
    """
    if device.type == "cuda":
        if limit.source != "--memory-limit-gb":
            yield
            return
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit.nbytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    before = _limit_data(limit.nbytes + _ALLOCATOR_SLACK_BYTES)
    try:
        yield
    finally:
        if before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _limit_data(more_bytes: int) -> tuple[int, int] | None:
    """Lets the process's data grow by so much; returns the limits before, None where not set."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        data = read_status(Path("/proc/self/status"), "VmData")
        before = resource.getrlimit(resource.RLIMIT_DATA)
        soft = data + more_bytes
        for other in before:
            soft = soft if other == resource.RLIM_INFINITY else min(soft, other)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    except (OSError, ValueError):
        return None
    return before


def read_status(path: Path, name: str) -> int:
    """Returns a size in bytes from a ``status`` file of ``/proc``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It does not name that size.
    """
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{path} has no {name}")


def release(device: torch.device | None = None) -> None:
    """Gives freed memory back, that of a GPU too, or it would count for what comes next."""
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    with contextlib.suppress(Exception):
        library: Any = ctypes.CDLL(None)
        library.malloc_trim(0)

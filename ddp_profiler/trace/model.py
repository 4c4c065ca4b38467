"""What is kept of one rank's trace: compact columns, times in ns as the file has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_profiler.trace.columns import Packed, Sums
from ddp_profiler.trace.notices import TraceWarning

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Narrow = npt.NDArray[np.signedinteger[Any]]
"""Whole numbers in a type that is no wider than they need."""

MOST_ELEMENTS = 1 << 40
"""Elements of a collective beyond which the number must be wrong: no GPU holds so many."""

NO_KIND = 255
"""In a column of kinds: no collective."""


@dataclass(frozen=True)
class GpuWork:
    """Kernels, copies and sets of one rank's GPUs, in order of their begin.

    What only collectives have is kept for these only, in the same order: [collective].

    Attributes:
        begin_ns: Begin, [work]. Add the trace's base time for time since 1970.
        duration_ns: How long it lasts, [work].
        work: ``kernels.Work``, [work].
        kind: Number of the collective in ``kernels.KINDS``, ``NO_KIND`` for other work, [work].
        device: Number of the device; -1 where the trace does not say, [work].
        stream: Number of the stream; -1 where the trace does not say, [work].
        correlation: Ties work to the call that launched it; -1 where there is none, [work].
        name: Place of the kernel's name in ``RankTrace.names``, [work].
        elements_in: Elements that go into it on this rank; -1 where not said, [collective].
        elements_out: Elements that come out; -1 where not said, [collective].
        group: Place of the process group in ``RankTrace.groups``; -1 where not said, [collective].
        dtype: Place of the elements' type in ``RankTrace.dtypes``; -1 likewise, [collective].
    """

    begin_ns: Packed
    duration_ns: Packed
    work: Bytes
    kind: Bytes
    device: Narrow
    stream: Narrow
    correlation: Packed
    name: Narrow
    elements_in: Ints
    elements_out: Ints
    group: npt.NDArray[np.int32]
    dtype: npt.NDArray[np.int32]

    @property
    def end_ns(self) -> Sums:
        """End, [work]."""
        return Sums(self.begin_ns, self.duration_ns)

    def __len__(self) -> int:
        return self.begin_ns.size


@dataclass(frozen=True)
class HostCollectives:
    """Collectives that run on the CPU (gloo, MPI, UCC), in order of their begin.

    Attributes:
        begin_ns: Begin, [collective].
        end_ns: End, [collective].
        kind: Number of the kind in ``kernels.KINDS``, [collective].
        thread: The thread that ran it, [collective].
        elements: Elements on this rank; -1 where not said, [collective].
        dtype: Place of their type in ``RankTrace.dtypes``; -1 where not said, [collective].
    """

    begin_ns: Ints
    end_ns: Ints
    kind: Bytes
    thread: Ints
    elements: Ints
    dtype: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.begin_ns.size)


@dataclass(frozen=True)
class Launches:
    """Calls that hand work to the GPU, in order of their correlation, then of their begin.

    Attributes:
        begin_ns: When the CPU made the call, [launch].
        correlation: Ties it to the work, [launch].
        is_kernel: Whether it is for kernels, and not for copies and sets, [launch].
    """

    begin_ns: Packed
    correlation: Narrow
    is_kernel: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Mark:
    """An annotation that tells of steps.

    Attributes:
        name: The annotation.
        number: N of ``ProfilerStep#N``; None for a call of an optimizer's step.
        begin_ns: Begin.
        end_ns: End.
        on_gpu: Whether it spans the GPU's timeline and not the CPU's.
    """

    name: str
    number: int | None
    begin_ns: int
    end_ns: int
    on_gpu: bool


@dataclass(frozen=True)
class Group:
    """A process group as kernels name it.

    Attributes:
        name: Its name, such as ``0``.
        description: Its description, such as ``default_pg``; empty where there is none.
        size: Number of its ranks; None where not said.
        ranks: Its ranks; None where not said, or not all of them.
    """

    name: str
    description: str
    size: int | None
    ranks: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """Name for people: the description where it says something."""
        if self.description in ("", "undefined", self.name):
            return self.name
        return f"{self.name} ({self.description})"


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace.

    Attributes:
        path: The file.
        rank: The rank; None where the file's metadata has none.
        world_size: Number of ranks of the job; None where not said.
        backend: The backend of torch.distributed; None where not said.
        base_time_ns: What times are relative to, in ns since 1970; None where they are absolute.
        gpu: Work of the GPUs.
        host_collectives: Collectives that ran on the CPU.
        launches: Calls that handed work to the GPU.
        marks: Annotations of steps, in order of their begin.
        names: Names of kernels.
        groups: Process groups.
        dtypes: Types of elements.
        distributed_calls: How many collectives the CPU handed over, as far as it tells.
        num_events: Events in the file that were looked at.
        cut: Whether the file ends within the trace.
        warnings: What was left out or repaired.
    """

    path: Path
    rank: int | None
    world_size: int | None
    backend: str | None
    base_time_ns: int | None
    gpu: GpuWork
    host_collectives: HostCollectives
    launches: Launches
    marks: tuple[Mark, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    dtypes: tuple[str, ...]
    distributed_calls: int
    num_events: int
    cut: bool
    warnings: tuple[TraceWarning, ...]

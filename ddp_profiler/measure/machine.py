"""What the machine gives this rank: processor time, cores, clocks, limits.

A rank that is late does more work, or its machine gives it less. Here the second is read,
between blocks of steps and never inside one, from what Linux counts and from NVIDIA's
management library. Evidence must not cost a run: what cannot be read is None, and nothing
here raises.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ddp_profiler.measure.cgroups import own_groups
from ddp_profiler.measure.nvidia import NvidiaGpu
from ddp_profiler.schema import MachineUse

_Value = TypeVar("_Value")
_Arguments = ParamSpec("_Arguments")

_MOST_CORES_READ = 16
"""Clocks are read of at most so many cores: reading one may wake that core."""


class MachineWatch:
    """Adds up what the machine gives this rank over a level's instrumented blocks.

    Args:
        rank: Global rank.
        threads: Threads that torch computes an operation with.
        gpu: This rank's GPU, if it is NVIDIA's and can be asked.
        root: Where ``proc`` and ``sys`` are; another place in tests.
        clock: Monotonic time in ns.
    """

    def __init__(
        self,
        rank: int,
        threads: int | None,
        gpu: NvidiaGpu | None = None,
        *,
        root: Path = Path("/"),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._rank = rank
        self._threads = threads
        self._gpu = gpu
        self._root = root
        self._clock = clock
        self._cores = _attempt(_own_cores)
        self._limits = _attempt(_limit_files, root) or ()
        self._begun: _Counters | None = None
        self._blocks: list[_Block] = []
        self._cpu_mhz: list[float] = []
        self._readings: list[Mapping[str, Any]] = []

    def begin(self) -> None:
        """Begins a block."""
        self._begun = self._counters()

    def end(self) -> None:
        """Ends the block that was begun, while the GPU may still be at work on it."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        # First what falls off as soon as the work is done.
        gpu = self._gpu
        if gpu is not None:
            reading = _attempt(gpu.read)
            self._readings += [] if reading is None else [reading]
        self._blocks.append(_block(begun, self._counters()))
        mhz = _attempt(self._read_cpu_mhz)
        self._cpu_mhz += [] if mhz is None else [mhz]

    def use(self) -> MachineUse:
        """Returns what the machine gave, over all blocks so far."""
        blocks, cores, gpu = self._blocks, self._cores, self._gpu

        def total(of: Callable[[_Block], float | None]) -> float | None:
            known = [of(block) for block in blocks]
            values = [value for value in known if value is not None]
            return sum(values) if values and len(values) == len(known) else None

        total_ticks = total(lambda b: b.total_ticks)
        periods = total(lambda b: b.periods)
        return MachineUse(
            rank=self._rank,
            wall_ms=_ms(total(lambda b: b.wall_ns)) or 0.0,
            user_ms=_ms(total(lambda b: b.user_ns)),
            system_ms=_ms(total(lambda b: b.system_ns)),
            run_delay_ms=_ms(total(lambda b: b.run_delay_ns)),
            preemptions=_whole(total(lambda b: b.preemptions)),
            major_faults=_whole(total(lambda b: b.major_faults)),
            steal_fraction=_share(total(lambda b: b.steal_ticks), total_ticks),
            busy_fraction=_share(total(lambda b: b.busy_ticks), total_ticks),
            throttled_ms=_ms(total(lambda b: b.throttled_ns)),
            throttled_fraction=_share(total(lambda b: b.throttled_periods), periods),
            cpu_mhz=round(sum(self._cpu_mhz) / len(self._cpu_mhz)) if self._cpu_mhz else None,
            cores=len(cores) if cores else None,
            affinity=compact(cores) if cores else None,
            threads=self._threads,
            gpu=_attempt(gpu.condense, self._readings)
            if gpu is not None and self._readings
            else None,
        )

    def _counters(self) -> _Counters:
        cores = self._cores
        # In the same order at the begin and at the end, so that all cover the same length.
        ticks = _attempt(_read_ticks, self._root, cores) if cores else None
        limits = tuple(_attempt(_read_limit, path) for path in self._limits)
        run_delay_ns = _attempt(_read_run_delay, self._root)
        usage = _attempt(resource.getrusage, resource.RUSAGE_SELF)
        return _Counters(self._clock(), usage, run_delay_ns, ticks, limits)

    def _read_cpu_mhz(self) -> float | None:
        cores = sorted(self._cores or ())
        cores = cores[:: -(-len(cores) // _MOST_CORES_READ)] if cores else []
        folder = self._root / "sys/devices/system/cpu"
        found = [
            _attempt(_read_number, folder / f"cpu{core}/cpufreq/scaling_cur_freq") for core in cores
        ]
        khz = [value for value in found if value]
        if khz:
            return sum(khz) / len(khz) / 1e3
        # Long on machines with many cores, and constant on those that come here (virtual
        # machines): once is enough.
        return None if self._cpu_mhz else _read_cpuinfo_mhz(self._root, set(cores))


@dataclass(frozen=True)
class _Ticks:
    """Time of the cores that this rank may use, in clock ticks since boot."""

    steal: int
    busy: int
    total: int


@dataclass(frozen=True)
class _Limit:
    """A cgroup's limit on processor time since it was made."""

    periods: int
    throttled_periods: int
    throttled_ns: int


@dataclass(frozen=True)
class _Counters:
    """All counters at one moment."""

    at_ns: int
    usage: resource.struct_rusage | None
    run_delay_ns: Mapping[str, int] | None
    ticks: _Ticks | None
    limits: tuple[_Limit | None, ...]


@dataclass(frozen=True)
class _Block:
    """By how much the counters grew in a block."""

    wall_ns: int
    user_ns: float | None = None
    system_ns: float | None = None
    preemptions: int | None = None
    major_faults: int | None = None
    run_delay_ns: int | None = None
    steal_ticks: int | None = None
    busy_ticks: int | None = None
    total_ticks: int | None = None
    throttled_ns: int | None = None
    throttled_periods: int | None = None
    periods: int | None = None


@dataclass
class _Growth:
    """Fields of a block; a counter that falls (a fresh thread or cgroup) grew by nothing."""

    known: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, before: float, after: float) -> None:
        self.known[name] = max(0, after - before)


def _block(before: _Counters, after: _Counters) -> _Block:
    growth = _Growth()
    if before.usage is not None and after.usage is not None:
        a, b = before.usage, after.usage
        growth.add("user_ns", a.ru_utime * 1e9, b.ru_utime * 1e9)
        growth.add("system_ns", a.ru_stime * 1e9, b.ru_stime * 1e9)
        growth.add("preemptions", a.ru_nivcsw, b.ru_nivcsw)
        growth.add("major_faults", a.ru_majflt, b.ru_majflt)
    if before.run_delay_ns is not None and after.run_delay_ns is not None:
        # A thread that began in between counts from its birth; what one waited that ended
        # in between is lost.
        growth.known["run_delay_ns"] = sum(
            max(0, now - before.run_delay_ns.get(thread, 0))
            for thread, now in after.run_delay_ns.items()
        )
    if before.ticks is not None and after.ticks is not None:
        for name in ("steal", "busy", "total"):
            growth.add(f"{name}_ticks", getattr(before.ticks, name), getattr(after.ticks, name))
    grown = [
        _Limit(
            b.periods - a.periods,
            b.throttled_periods - a.throttled_periods,
            b.throttled_ns - a.throttled_ns,
        )
        for a, b in zip(before.limits, after.limits, strict=True)
        if a is not None and b is not None
    ]
    if grown:
        # Limits hold at every level of the tree: the tightest one is what threads feel.
        tightest = max(grown, key=lambda limit: (limit.throttled_ns, limit.periods))
        growth.add("throttled_ns", 0, tightest.throttled_ns)
        growth.add("throttled_periods", 0, tightest.throttled_periods)
        growth.add("periods", 0, tightest.periods)
    return _Block(wall_ns=max(0, after.at_ns - before.at_ns), **growth.known)


def _read(path: Path | str) -> str:
    """Returns a small file's text; quicker than pathlib where hundreds are read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _read_number(path: Path) -> int:
    return int(_read(path))


def _own_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _read_run_delay(root: Path) -> dict[str, int] | None:
    """Returns for each thread how long it was ready and had no core, in ns since its birth."""
    folder = str(root / "proc/self/task")
    delays, slices = {}, 0
    for thread in os.listdir(folder):  # noqa: PTH208 - names only
        found = _attempt(_read, f"{folder}/{thread}/schedstat")
        if found is None or len(found.split()) < 3:
            continue  # it has ended meanwhile
        _, waited, times = found.split()[:3]
        delays[thread] = int(waited)
        slices += int(times)
    # A kernel that does not count says 0 for all; a thread that reads this has run.
    return delays if slices else None


def _read_ticks(root: Path, cores: frozenset[int]) -> _Ticks | None:
    """Returns the time of some cores from ``/proc/stat``; None if it knows none of them."""
    steal = busy = total = known = 0
    with (root / "proc/stat").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if not line.startswith("cpu"):
                break  # the interrupts that follow are long
            name, *texts = line.split()
            number = name.removeprefix("cpu")
            if not number.isdecimal() or int(number) not in cores:
                continue
            # user nice system idle iowait irq softirq steal; guest is part of user.
            ticks = [int(text) for text in texts[:8]]
            if len(ticks) < 8:
                continue
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4] - ticks[7]
            steal += ticks[7]
            known += 1
    return _Ticks(steal, busy, total) if known else None


def _limit_files(root: Path) -> tuple[Path, ...]:
    """Returns ``cpu.stat`` of this process's cgroup and of those around it, where they limit."""
    files = (folder / "cpu.stat" for folder, _ in own_groups("cpu", root))
    # Trees of version 1 may be mounted under two names.
    return tuple(dict.fromkeys(f for f in files if _attempt(_read_limit, f) is not None))


def _read_limit(path: Path) -> _Limit | None:
    """Returns a cgroup's throttling; None where it has no such limit (the root of version 2)."""
    values = dict(line.split(maxsplit=1) for line in _read(path).splitlines())
    if "nr_periods" not in values:
        return None
    throttled_ns = (
        int(values["throttled_usec"]) * 1000
        if "throttled_usec" in values
        else int(values["throttled_time"])
    )
    return _Limit(int(values["nr_periods"]), int(values["nr_throttled"]), throttled_ns)


def _read_cpuinfo_mhz(root: Path, cores: set[int]) -> float | None:
    """Returns the mean "cpu MHz" of some cores in ``/proc/cpuinfo``."""
    found, core = [], -1
    for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            core = int(value)
        elif name.strip() == "cpu MHz" and core in cores:
            found.append(float(value))
    known = [value for value in found if 0 < value < float("inf")]
    return sum(known) / len(known) if known else None


def compact(numbers: Iterable[int]) -> str:
    """Returns whole numbers as text with ranges, as the kernel writes lists of cores.

    >>> compact([0, 1, 2, 3, 8, 10, 11]), compact([5])
    ('0-3,8,10-11', '5')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _attempt(
    read: Callable[_Arguments, _Value], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Value | None:
    """Returns what a function returns, or None where it fails in any way.

    The files are the kernel's, a container's or a driver's: they may be missing, forbidden,
    or say what nobody foresaw. None of that is worth a user's run.
    """
    try:
        return read(*args, **kwargs)
    except Exception:
        return None


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 1)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)

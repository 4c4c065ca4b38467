"""Why a rank is late, or why all are slow, from what the machine gave them.

It is evidence for a cause that times have shown, and no detector of stragglers: a rank may
stand out here and be in time. All rates are per second of the covered time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddp_profiler import units
from ddp_profiler.analysis.results import Finding, LevelResult
from ddp_profiler.schema import GpuUse, MachineUse

STANDS_OUT_FACTOR = 2.0
"""A rate stands out from this multiple of the other ranks' median on: equal ranks of a busy
machine differ by less (1.1 to 1.95 times was seen)."""

RUN_DELAY_MS_PER_S = 50.0
"""Less time without a core cannot make a step later than by 5 %."""

STEAL_FRACTION = 0.05
"""Above it a virtual machine's steps are longer by more than most changes under test."""

STEAL_MS = 50.0
"""Stolen time comes in ticks of 10 ms: fewer than five are noise."""

THROTTLED_FRACTION = 0.05
"""A limit that is reached in fewer of its periods (usually 100 ms) costs a burst now and then."""

MAJOR_FAULTS_PER_S = 10.0
"""A fault that reads storage takes 0.1 to 10 ms: at ten a second it begins to be felt."""

PREEMPTIONS_PER_S = 100.0
"""Used where time without a core is unknown; a time slice is a few ms."""

CLOCK_SHORTFALL = 0.1
"""A clock lower by less than a tenth is how clocks of equal processors differ by themselves."""

SHORT_OF_CORES_MS_PER_S = 100.0
SHORT_OF_CORES_SHARE = 0.1
"""For all ranks: time without a core, also as a share of the time in which there was work."""

FOREIGN_FRACTION = 0.25
"""Other processes are named from this share of a rank's cores on."""

GPU_CLOCK_FRACTION = 0.85
"""All GPUs are called slow below this share of their highest clock, with a reason: at full
load some of it is given up to the power limit on most of them."""

_SET_ON_PURPOSE = ("clocks set by the user", "display clocks", "sync boost")


def explain(rank: int, uses: Sequence[MachineUse]) -> tuple[str, ...]:
    """Returns what sets a rank's machine apart for the worse, as short phrases.

    Each is compared with the median of the other ranks of the level. Nothing is returned
    where nothing stands out, or where there is nobody to compare with.

    Args:
        rank: Global rank.
        uses: What the machine gave each rank of a level, in any order.
    """
    own = next((use for use in uses if use.rank == rank), None)
    others = [use for use in uses if use.rank != rank]
    if own is None or not others:
        return ()
    pair = _Pair(own, others)
    return tuple(
        phrase
        for finder in (
            _throttling,
            _steal,
            _run_delay,
            _affinity,
            _threads,
            _cpu_clock,
            _faults,
            _gpu_clock,
            _link,
        )
        for phrase in finder(pair)
    )


@dataclass(frozen=True)
class _Pair:
    """A rank and the others of its level."""

    own: MachineUse
    others: Sequence[MachineUse]

    def compare(self, figure: Callable[[MachineUse], float | None]) -> tuple[float, float] | None:
        """Returns a figure of the rank and its median over the others; None if unknown."""
        mine, theirs = figure(self.own), _median(figure, self.others)
        return None if mine is None or theirs is None else (mine, theirs)


def _median(
    figure: Callable[[MachineUse], float | None], uses: Sequence[MachineUse]
) -> float | None:
    known = [value for use in uses if (value := figure(use)) is not None]
    return statistics.median(known) if known else None


def _per_s(value: float | None, use: MachineUse) -> float | None:
    return value / use.wall_ms * 1e3 if value is not None and use.wall_ms > 0 else None


def run_delay_ms_per_s(use: MachineUse) -> float | None:
    """Returns for how long a rank's threads had work and no core, in ms a second."""
    return _per_s(use.run_delay_ms, use)


def _cpu_ms(use: MachineUse) -> float | None:
    if use.user_ms is None or use.system_ms is None:
        return None
    return use.user_ms + use.system_ms


def waiting_share(use: MachineUse) -> float | None:
    """Returns the share of the time in which threads had work that they had no core for it.

    = run_delay_ms / (run_delay_ms + user_ms + system_ms)
    """
    cpu_ms = _cpu_ms(use)
    if use.run_delay_ms is None or cpu_ms is None or use.run_delay_ms + cpu_ms <= 0:
        return None
    return use.run_delay_ms / (use.run_delay_ms + cpu_ms)


def foreign_fraction(use: MachineUse) -> float | None:
    """Returns the share of a rank's cores that other processes used, other ranks among them.

    = busy_fraction - (user_ms + system_ms) / (wall_ms x cores)
    """
    cpu_ms = _cpu_ms(use)
    if use.busy_fraction is None or cpu_ms is None or not use.cores or use.wall_ms <= 0:
        return None
    return max(0.0, use.busy_fraction - cpu_ms / (use.wall_ms * use.cores))


def _stolen_enough(use: MachineUse) -> bool:
    stolen_ms = (use.steal_fraction or 0.0) * (use.cores or 1) * use.wall_ms
    return (use.steal_fraction or 0.0) >= STEAL_FRACTION and stolen_ms >= STEAL_MS


def _throttled(use: MachineUse) -> bool:
    return (use.throttled_fraction or 0.0) >= THROTTLED_FRACTION and bool(use.throttled_ms)


def _throttling(pair: _Pair) -> Iterator[str]:
    # Without a limit there are no periods: that is none reached.
    figures = pair.compare(lambda use: use.throttled_fraction or 0.0)
    if figures is None or not _throttled(pair.own) or figures[0] < STANDS_OUT_FACTOR * figures[1]:
        return
    yield (
        f"cgroup throttled in {units.percent(figures[0], 0)} of its periods "
        f"(others {units.percent(figures[1], 0)})"
    )


def _steal(pair: _Pair) -> Iterator[str]:
    figures = pair.compare(lambda use: use.steal_fraction)
    if figures is None or not _stolen_enough(pair.own):
        return
    if figures[0] - figures[1] >= STEAL_FRACTION:
        yield f"CPU steal {units.percent(figures[0], 0)} (others {units.percent(figures[1])})"


def _run_delay(pair: _Pair) -> Iterator[str]:
    figures = pair.compare(run_delay_ms_per_s)
    if figures is None:
        yield from _preemptions(pair)
        return
    mine, theirs = figures
    if mine - theirs < RUN_DELAY_MS_PER_S or mine < STANDS_OUT_FACTOR * theirs:
        return
    foreign = foreign_fraction(pair.own)
    competitors = (
        f", other processes used {units.percent(foreign, 0)} of its cores"
        if foreign is not None and foreign >= FOREIGN_FRACTION
        else ""
    )
    yield f"stood {mine:.0f} ms/s without a core (others {theirs:.0f}){competitors}"


def _standing_out(
    pair: _Pair, count: Callable[[MachineUse], int | None], least_per_s: float
) -> Iterator[tuple[float, float]]:
    """Yields the rank's rate and the others' where it is higher by both measures."""
    figures = pair.compare(lambda use: _per_s(count(use), use))
    if figures is None:
        return
    mine, theirs = figures
    if mine - theirs >= least_per_s and mine >= STANDS_OUT_FACTOR * theirs:
        yield mine, theirs


def _preemptions(pair: _Pair) -> Iterator[str]:
    for mine, theirs in _standing_out(pair, lambda use: use.preemptions, PREEMPTIONS_PER_S):
        yield f"lost its core {mine:.0f} times/s (others {theirs:.0f})"


def _affinity(pair: _Pair) -> Iterator[str]:
    figures = pair.compare(lambda use: use.cores)
    if figures is not None and figures[0] < figures[1]:
        number = f"{figures[0]:.0f} core{'s' if figures[0] > 1 else ''}"
        yield f"may use {number}: {pair.own.affinity} (others {figures[1]:.0f})"


def _threads(pair: _Pair) -> Iterator[str]:
    figures = pair.compare(lambda use: use.threads)
    if figures is not None and figures[0] < figures[1]:
        yield f"{figures[0]:.0f} thread{'s' if figures[0] > 1 else ''} (others {figures[1]:.0f})"


def _cpu_clock(pair: _Pair) -> Iterator[str]:
    figures = pair.compare(lambda use: use.cpu_mhz)
    if figures is not None and figures[0] < (1 - CLOCK_SHORTFALL) * figures[1]:
        yield f"CPU clock {figures[0]:.0f} MHz (others {figures[1]:.0f})"


def _faults(pair: _Pair) -> Iterator[str]:
    for mine, theirs in _standing_out(pair, lambda use: use.major_faults, MAJOR_FAULTS_PER_S):
        yield f"read memory from storage {mine:.0f} times/s (others {theirs:.0f})"


def _gpu_figure(
    figure: Callable[[GpuUse], float | None],
) -> Callable[[MachineUse], float | None]:
    return lambda use: None if use.gpu is None else figure(use.gpu)


def _gpu_clock(pair: _Pair) -> Iterator[str]:
    gpu, figures = pair.own.gpu, pair.compare(_gpu_figure(lambda g: g.sm_mhz))
    if gpu is None or figures is None or figures[0] >= (1 - CLOCK_SHORTFALL) * figures[1]:
        return
    most = f" of {gpu.sm_mhz_max:.0f}" if gpu.sm_mhz_max else ""
    yield f"SM clock {figures[0]:.0f}{most} MHz{_reasons(gpu)} (others {figures[1]:.0f})"


def _reasons(gpu: GpuUse) -> str:
    """Returns what held a clock down, the most frequent first, with the figure behind it."""
    words = sorted(gpu.clock_reasons, key=lambda word: -gpu.clock_reasons[word])
    details = []
    for word in words:
        if "power" in word and gpu.power_w is not None and gpu.power_limit_w is not None:
            word = f"{word} ({gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W)"
        elif "thermal" in word and gpu.temperature_c is not None:
            word = f"{word} ({gpu.temperature_c:.0f} °C)"
        details.append(word)
    return f": {', '.join(details)}" if details else ""


def _link(pair: _Pair) -> Iterator[str]:
    gpu = pair.own.gpu
    if gpu is None:
        return
    width = pair.compare(_gpu_figure(lambda g: g.pcie_width))
    if width is not None and width[0] < width[1]:
        most = f" of x{gpu.pcie_width_max}" if gpu.pcie_width_max else ""
        yield f"PCIe x{width[0]:.0f}{most} (others x{width[1]:.0f})"
    generation = pair.compare(_gpu_figure(lambda g: g.pcie_generation))
    if generation is not None and generation[0] < generation[1]:
        most = f" of {gpu.pcie_generation_max}" if gpu.pcie_generation_max else ""
        yield f"PCIe generation {generation[0]:.0f}{most} (others {generation[1]:.0f})"


def find_machine(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Yields what makes most ranks of a level slow, once for all levels.

    What at most half of the ranks suffer is left to :func:`explain`: the median of the others
    that it compares with is then one that does not.
    """
    for find, identity, severity, text in _LEVEL_WIDE:
        found = [
            (level, evidence)
            for level in levels
            if (evidence := find([r.machine for r in level.ranks if r.machine is not None]))
        ]
        if not found:
            continue
        names = [level.id for level, _ in found]
        yield Finding(
            id=identity,
            severity=severity,
            message=f"{_listed(names)}: {text}",
            evidence=found[0][1]
            if len(found) == 1
            else "; ".join(f"{level.id}: {evidence}" for level, evidence in found[-3:])
            + (f"; {len(found) - 3} more before" if len(found) > 3 else ""),
        )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _suffering(
    uses: Sequence[MachineUse], suffers: Callable[[MachineUse], bool]
) -> list[MachineUse]:
    """Returns the ranks that suffer if they are more than half of all, else none."""
    found = [use for use in uses if suffers(use)]
    return found if 2 * len(found) > len(uses) else []


def _span(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    low, high = text(min(known)), text(max(known))
    return low if low == high else f"{low} to {high}"


def _percent(value: float) -> str:
    return units.percent(value, 0)


def _all_throttled(uses: Sequence[MachineUse]) -> str:
    found = _suffering(uses, _throttled)
    if not found:
        return ""
    return (
        f"limit reached in {_span([u.throttled_fraction for u in found], _percent)} of its "
        f"periods, {len(found)} of {len(uses)} ranks"
    )


def _all_stolen(uses: Sequence[MachineUse]) -> str:
    found = _suffering(uses, _stolen_enough)
    if not found:
        return ""
    return (
        f"{_span([u.steal_fraction for u in found], _percent)} stolen, "
        f"{len(found)} of {len(uses)} ranks"
    )


def _short_of_cores(use: MachineUse) -> bool:
    return (run_delay_ms_per_s(use) or 0.0) >= SHORT_OF_CORES_MS_PER_S and (
        waiting_share(use) or 0.0
    ) >= SHORT_OF_CORES_SHARE


def _all_short_of_cores(uses: Sequence[MachineUse]) -> str:
    found = _suffering(uses, _short_of_cores)
    if not found:
        return ""
    return (
        f"{_span([run_delay_ms_per_s(u) for u in found], lambda v: f'{v:.0f}')} ms/s without a "
        f"core, {_span([waiting_share(u) for u in found], _percent)} of the time with work, "
        f"{len(found)} of {len(uses)} ranks"
    )


def _slow_gpu(use: MachineUse) -> bool:
    gpu = use.gpu
    if gpu is None or gpu.sm_mhz is None or not gpu.sm_mhz_max:
        return False
    held = [word for word in gpu.clock_reasons if word not in _SET_ON_PURPOSE]
    return bool(held) and gpu.sm_mhz < GPU_CLOCK_FRACTION * gpu.sm_mhz_max


def _all_gpus_slow(uses: Sequence[MachineUse]) -> str:
    found = _suffering(uses, _slow_gpu)
    if not found:
        return ""
    gpus = [use.gpu for use in found if use.gpu is not None]
    shares: dict[str, float] = {}
    for gpu in gpus:
        for word, share in gpu.clock_reasons.items():
            shares[word] = shares.get(word, 0.0) + share
    reasons = ", ".join(sorted(shares, key=lambda word: -shares[word]))
    return (
        f"{_span([gpu.sm_mhz for gpu in gpus], lambda v: f'{v:.0f}')} of "
        f"{_span([gpu.sm_mhz_max for gpu in gpus], lambda v: f'{v:.0f}')} MHz: {reasons}, "
        f"{len(found)} of {len(uses)} ranks"
    )


_LEVEL_WIDE = (
    (
        _all_throttled,
        "cpu-throttled",
        "warning",
        "ranks reach their cgroup's limit on processor time and are held back; raise the limit "
        "(quota) of the container or job.",
    ),
    (
        _all_stolen,
        "cpu-steal",
        "warning",
        "the hypervisor gives this machine's cores to others (CPU steal); steps are slower than "
        "on a machine of its own.",
    ),
    (
        _all_short_of_cores,
        "cores-shared",
        "warning",
        "ranks have work and no core for it: they compete with each other, with their own "
        "threads or with other processes, and steps are slower than they could be.",
    ),
    (
        _all_gpus_slow,
        "gpu-clocks",
        "info",
        "GPUs run well below their highest clock.",
    ),
)
"""What is looked for at all ranks of a level: evidence, id and severity of the finding, text."""

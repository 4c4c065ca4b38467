"""Which step GPU work belongs to: the one that launched it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ddp_profiler.trace.columns import Ints, median
from ddp_profiler.trace.kernels import Work
from ddp_profiler.trace.model import Launches, Mark, Narrow, RankTrace
from ddp_profiler.trace.notices import Notices

OUTSIDE = -1
"""Stands for work of no step."""

_BLOCK = 1 << 13
_SHORT = 0.5
_FEW = 0.9
_ALIKE = 0.95
_LEAST_WORK_OF_A_STEP = 4
_MOST_TIMES_A_STEP = 16
_PERIODS_TRIED = 64
_PER_OCCURRENCE = 1 << 40


class StepSource(StrEnum):
    """What told the steps apart."""

    PROFILER_STEP = "profiler_step"
    GPU_ANNOTATION = "gpu_annotation"
    OPTIMIZER_STEP = "optimizer_step"
    GPU_PATTERN = "gpu_pattern"
    NONE = "none"


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        number: N of ``ProfilerStep#N``; else its place in the recording, from 0.
        begin_ns: Begin of the annotation, or of the first work where there is none.
        end_ns: End likewise.
        incomplete: Why it is not recorded in full; empty where it is, as far as it shows.
        occurrence: Which of the steps of this number it is, from 1: a recording may count anew.
    """

    number: int
    begin_ns: int
    end_ns: int
    incomplete: str = ""
    occurrence: int = 1

    @property
    def label(self) -> str:
        """Name for people.

        >>> Step(7, 0, 1).label, Step(7, 0, 1, occurrence=2).label
        ('7', '7 #2')
        """
        return label_of(self.key)

    @property
    def key(self) -> int:
        """What tells it from all others of its rank, the same on all ranks that count alike."""
        return (self.occurrence - 1) * _PER_OCCURRENCE + self.number


def label_of(key: int) -> str:
    """Returns the name for people of the step with a ``Step.key``."""
    again, number = divmod(key, _PER_OCCURRENCE)
    return f"{number} #{again + 1}" if again else str(number)


@dataclass(frozen=True)
class Steps:
    """The steps of one rank, and which of them each piece of GPU work belongs to.

    Attributes:
        source: What told the steps apart.
        steps: In order of their begin.
        of_work: Place of the step in ``steps``, ``OUTSIDE`` for none, [work].
        of_host: The same for collectives on the CPU, [collective].
    """

    source: StepSource
    steps: tuple[Step, ...]
    of_work: Narrow
    of_host: npt.NDArray[np.int32]


def find_steps(trace: RankTrace, notices: Notices) -> Steps:
    """Tells the steps of a trace apart and gives each piece of GPU work to one.

    The CPU runs ahead of the GPU, so work belongs to the step in which the CPU launched it,
    not to the one in whose time it runs. Steps are, in order of preference: the annotations
    ``ProfilerStep#N`` of the CPU; those of the GPU's timeline; the time between calls of the
    optimizer; the period with which the GPU's kernels repeat.
    """
    cpu = [mark for mark in trace.marks if not mark.on_gpu]
    gpu = [mark for mark in trace.marks if mark.on_gpu]
    numbered = _annotated([mark for mark in cpu if mark.number is not None])
    if numbered:
        return _by_launch(trace, StepSource.PROFILER_STEP, numbered, notices)
    notices.add("steps_not_annotated", 1)
    on_gpu = _annotated([mark for mark in gpu if mark.number is not None])
    if on_gpu:
        return _by_time(trace, StepSource.GPU_ANNOTATION, on_gpu, notices)
    between = _between_optimizers(trace, [mark for mark in cpu if mark.number is None])
    if between:
        return _by_launch(trace, StepSource.OPTIMIZER_STEP, between, notices)
    repeated = _repeated(trace)
    if repeated:
        return _by_time(trace, StepSource.GPU_PATTERN, repeated, notices)
    notices.add("no_steps", 1)
    return Steps(StepSource.NONE, (), _none(len(trace.gpu)), _none(len(trace.host_collectives)))


def _none(size: int) -> npt.NDArray[np.int32]:
    return np.full(size, OUTSIDE, np.int32)


# ----------------------------------------------------------------------------------------------
# Which steps there are


def _annotated(marks: Sequence[Mark]) -> list[Step]:
    """Returns steps from annotations of the CPU, or from those of the GPU.

    Those of one number that overlap are one step, as where several threads have it. Those that
    lie apart are steps of their own: one from the first begin to the last end would take in all
    between them. On the GPU each stream has its own, and may begin a step when another is done
    with it: there, a whole other step must lie between.
    """
    numbered = sorted(
        (mark.begin_ns, mark.end_ns, mark.number, mark.on_gpu)
        for mark in marks
        if mark.number is not None
    )
    begins, ends = (
        np.array([mark[place] for mark in numbered], np.int64).reshape(-1) for place in (0, 1)
    )
    latest: dict[int, Step] = {}
    steps = []
    for begin, end, number, on_gpu in numbered:
        before = latest.get(number)
        if before is None:
            latest[number] = Step(number, begin, end)
        elif begin < before.end_ns or (
            on_gpu and not ((begins >= before.end_ns) & (ends <= begin)).any()
        ):
            latest[number] = replace(before, end_ns=max(before.end_ns, end))
        else:
            steps.append(before)
            latest[number] = Step(number, begin, end, occurrence=before.occurrence + 1)
    return sorted([*steps, *latest.values()], key=lambda one: (one.begin_ns, one.end_ns))


def _between_optimizers(trace: RankTrace, marks: Sequence[Mark]) -> list[Step]:
    """Returns steps that end where the last optimizer of each has been called."""
    if len(marks) < 2:
        return []
    ends = [mark.end_ns for mark in marks if mark.name == marks[-1].name]
    if len(ends) < 2:
        return []
    begins = np.concatenate((trace.launches.begin_ns, trace.gpu.begin_ns))
    first = min(int(begins.min()), ends[0]) if begins.size else ends[0]
    last = max(int(begins.max()) + 1, ends[-1]) if begins.size else ends[-1]
    steps = [Step(0, first, ends[0], "the recording begins within it")]
    steps += [Step(place + 1, *span) for place, span in enumerate(pairwise(ends))]
    if last > ends[-1]:
        steps.append(Step(len(ends), ends[-1], last, "the recording ends within it"))
    return steps


def _repeated(trace: RankTrace) -> list[Step]:
    """Returns steps from the period with which kernels repeat; none where they do not.

    A kernel that runs once a step, or a few times, comes again the same number of kernels later
    in the next one. The period is believed if nearly all kernels repeat with it.
    """
    places = np.flatnonzero(trace.gpu.work == Work.COMPUTE)
    names = trace.gpu.name[places]
    if names.size < 2 * _LEAST_WORK_OF_A_STEP:
        return []
    counts = np.bincount(names)
    tried: set[int] = set()
    # Rare names first: those of an optimizer or a loss run once a step.
    for name in np.argsort(counts, kind="stable").tolist():
        if counts[name] < 2:
            continue
        at = np.flatnonzero(names == name)
        for times_a_step in range(1, min(_MOST_TIMES_A_STEP, at.size - 1) + 1):
            period = int(median(at[times_a_step:] - at[:-times_a_step]))
            if period < _LEAST_WORK_OF_A_STEP or period in tried:
                continue
            tried.add(period)
            if (names[period:] == names[:-period]).mean() >= _ALIKE:
                return _periods(trace, places, period)
            if len(tried) >= _PERIODS_TRIED:
                return []
    return []


def _periods(trace: RankTrace, places: Ints, period: int) -> list[Step]:
    """Returns steps of a number of kernels each, cut where the GPU is idle longest."""
    begin, end = trace.gpu.begin_ns[places], np.maximum.accumulate(trace.gpu.end_ns[places])
    gaps = np.concatenate(([0], begin[1:] - end[:-1]))
    whole = gaps.size // period * period
    typical = np.median(gaps[:whole].reshape(-1, period), axis=0)
    phase = int(typical.argmax())
    cuts = list(range(phase, begin.size, period))
    edges = sorted({0, *cuts, begin.size})
    steps = []
    for number, (first, last) in enumerate(pairwise(edges)):
        reason = "" if last - first == period else "fewer kernels than the others"
        until = int(begin[last]) if last < begin.size else int(trace.gpu.end_ns.max())
        since = int(begin[first]) if first else int(trace.gpu.begin_ns.min())
        steps.append(Step(number, since, until, reason))
    return steps


# ----------------------------------------------------------------------------------------------
# Which work belongs to them


def _by_time(
    trace: RankTrace, source: StepSource, steps: Sequence[Step], notices: Notices
) -> Steps:
    of_work = _at(steps, trace.gpu.begin_ns[:])
    notices.add("outside_steps", int((of_work == OUTSIDE).sum()))
    of_host = _at(steps, trace.host_collectives.begin_ns)
    notices.add("outside_steps", int((of_host == OUTSIDE).sum()))
    return _marked(trace, source, steps, (of_work, of_host), _none(0), notices)


def _by_launch(
    trace: RankTrace, source: StepSource, steps: Sequence[Step], notices: Notices
) -> Steps:
    gpu, launches = trace.gpu, trace.launches
    # They count upwards: a smaller one than all that were recorded was launched before.
    positive = np.searchsorted(launches.correlation, 0, "right")
    least = int(launches.correlation[positive]) if positive < launches.correlation.size else 0
    of_work: Narrow = np.full(len(gpu), OUTSIDE, np.int16 if len(steps) < 1 << 15 else np.int32)
    has_work = np.zeros(launches.begin_ns.size, bool)
    for first in range(0, len(gpu), _BLOCK):
        block = slice(first, first + _BLOCK)
        begin_ns, wanted = gpu.begin_ns[block], gpu.correlation[block]
        places, known = _launched(launches, begin_ns, wanted)
        has_work[places[known]] = True
        found = _none(begin_ns.size)
        found[known] = _at(steps, launches.begin_ns[places[known]])
        notices.add("outside_steps", int((known & (found == OUTSIDE)).sum()))
        before = ~known & (wanted > 0) & (wanted < least)
        notices.add("launched_before_recording", int(before.sum()))
        unknown = ~known & ~before
        found[unknown] = _at(steps, begin_ns[unknown])
        notices.add("assigned_by_time", int(unknown.sum()))
        of_work[block] = found
    of_host = _at(steps, trace.host_collectives.begin_ns)
    notices.add("outside_steps", int((of_host == OUTSIDE).sum()))
    lost = launches.is_kernel & (launches.correlation > 0) & ~has_work
    lost_of = _at(steps, launches.begin_ns[lost]) if len(gpu) else _none(0)
    return _marked(trace, source, steps, (of_work, of_host), lost_of, notices)


def _counts(of: Narrow, number: int) -> Ints:
    """Returns how many are of each step; numpy would count a copy that is twice as wide."""
    result = np.zeros(number + 1, np.int64)
    for first in range(0, of.size, _BLOCK):
        result += np.bincount(of[first : first + _BLOCK].astype(np.int64) + 1, minlength=number + 1)
    return result[1:]


def _at(steps: Sequence[Step], times_ns: Ints) -> npt.NDArray[np.int32]:
    """Returns the place of the step in which each time lies, ``OUTSIDE`` for none."""
    begins = np.array([step.begin_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    places = np.searchsorted(begins, times_ns, "right") - 1
    inside = (places >= 0) & (times_ns < ends[np.maximum(places, 0)])
    return np.where(inside, places, OUTSIDE).astype(np.int32)


def _launched(
    launches: Launches, begin_ns: Ints, wanted: Ints
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Returns the place of each piece of work's launch, and whether it is there."""
    if not launches.correlation.size:
        return np.zeros(wanted.size, np.int64), np.zeros(wanted.size, bool)
    # Of one type, or numpy would convert all of them for each block.
    kind = launches.correlation.dtype
    fits = wanted <= np.iinfo(kind).max
    sought = np.where(fits, wanted, 0).astype(kind)
    places = np.searchsorted(launches.correlation, sought, "right") - 1
    known = fits & (places >= 0) & (wanted > 0)
    known &= launches.correlation[np.maximum(places, 0)] == sought
    places = np.where(known, places, 0)
    # Numbers may repeat in a long recording: the last launch before the work is its own.
    while True:
        late = known & (launches.begin_ns[places] > begin_ns) & (places > 0)
        late &= launches.correlation[np.maximum(places - 1, 0)] == sought
        if not late.any():
            return places, known
        places = places - late


# ----------------------------------------------------------------------------------------------
# Which steps are complete


def _marked(
    trace: RankTrace,
    source: StepSource,
    steps: Sequence[Step],
    of: tuple[Narrow, npt.NDArray[np.int32]],
    lost_of: npt.NDArray[np.int32],
    notices: Notices,
) -> Steps:
    """Marks the first and last step where they are not recorded in full.

    Args:
        trace: What was read.
        source: What told the steps apart.
        steps: The steps.
        of: Place of the step, [work] and [collective on the CPU].
        lost_of: Place of the step, [launch of kernels that the trace does not have].
        notices: Counts what is found.
    """
    marked = list(steps)
    of_work, of_host = of
    missing = _counts(lost_of, len(steps)).tolist()
    counts = _counts(of_work, len(steps))
    lengths = np.array([step.end_ns - step.begin_ns for step in steps], np.float64)
    for place in sorted({0, len(steps) - 1}):
        if marked[place].incomplete:
            continue
        others = [other for other in range(1, len(steps) - 1) if other != place]
        others = others or [other for other in range(len(steps)) if other != place]
        reason = ""
        if trace.cut and place == len(steps) - 1:
            reason = "the file is cut"
        elif missing[place] > max((missing[other] for other in others), default=0):
            reason = f"{missing[place]} kernels were launched in it that the trace does not have"
        elif len(others) >= 2:
            usual = median(lengths[others])
            work = median(counts[others])
            if counts[place] < _FEW * work:
                reason = f"it has {counts[place]} pieces of GPU work, the others {work:.0f}"
            elif lengths[place] < _SHORT * usual:
                reason = (
                    f"its annotation lasts {lengths[place] / 1e6:.1f} ms, the others' "
                    f"{usual / 1e6:.1f}"
                )
        if reason:
            marked[place] = replace(marked[place], incomplete=reason)
    bad = [step for step in marked if step.incomplete]
    if bad:
        detail = "; ".join(f"Step {step.label}: {step.incomplete}" for step in bad)
        notices.add("incomplete_step", len(bad), f"{detail}.")
    return Steps(source, tuple(marked), of_work, of_host)

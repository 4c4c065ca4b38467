"""What traces show that costs time, in plain words, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddp_profiler import units
from ddp_profiler.naming import name_ranks
from ddp_profiler.trace.across import AcrossRanks, Lateness
from ddp_profiler.trace.chance import FEW_STEPS
from ddp_profiler.trace.split import RankSplit
from ddp_profiler.trace.volume import Reductions, of_gradients, volumes

_SEVERITIES = ("error", "warning", "info")

_MUCH_EXPOSED = 0.10
_MUCH_IDLE = 0.20
_LATE = 0.02
_VERY_LATE = 0.05
_LATE_SHOWN = 3
_MOSTLY = 0.5
_NEARLY_ALL = 0.8
_ENOUGH_RANKS = 3
_GROUPS_SHOWN = 8
_PAIR = 2


@dataclass(frozen=True)
class Finding:
    """Something a user should know, with its evidence.

    Attributes:
        id: Stable name for programs.
        severity: error, warning or info.
        message: What is so, and what helps.
        evidence: The figures that show it.
        expected_gain_ms: Always None here: what a change would bring is not known.
        expected_gain_pct: Likewise.
    """

    id: str
    severity: str
    message: str
    evidence: str
    expected_gain_ms: float | None = None
    expected_gain_pct: float | None = None


def find(
    ranks: Sequence[RankSplit],
    missing: Sequence[int],
    across: AcrossRanks,
    reduced: Sequence[Reductions],
    launched_late: Mapping[int, float],
) -> tuple[Finding, ...]:
    """Returns what a user should know, the most severe first.

    Args:
        ranks: All ranks that were given.
        missing: Ranks of the job that were not given.
        across: What the ranks tell together.
        reduced: What they reduce.
        launched_late: Of each rank, the share of its idle time in which nothing was launched.
    """
    found = [
        *_about_late_ranks(ranks, across),
        *_about_late_together(ranks, across),
        *_about_exposed(ranks, across),
        *_about_idle(ranks, launched_late),
        *_about_repeats(reduced),
        *_about_untold(ranks),
        *_about_missing(ranks, missing),
    ]
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _window_ns(ranks: Sequence[RankSplit]) -> float:
    """Returns the median window of what was recorded: one broken time does not move it."""
    return float(median(split.total.window_ns for split in ranks))


def _exposed_waits(across: AcrossRanks) -> list[int]:
    """Returns exposed wait of each rank of which it is known, in ns."""
    return [
        one.exposed_wait_ns
        for one in across.waiting_total.values()
        if one.exposed_wait_ns is not None
    ]


def _about_late_ranks(ranks: Sequence[RankSplit], across: AcrossRanks) -> Iterator[Finding]:
    window_ns = _window_ns(ranks)
    if window_ns <= 0:
        return
    shown = 0
    for one in across.lateness:
        few = one.steps < FEW_STEPS
        if one.clearly and one.excess_ns >= _LATE * window_ns:
            ns, how_often = one.excess_ns, _how_often(one)
            more, than = "more ", " than for another on average"
            severity = "warning" if ns >= _VERY_LATE * window_ns and not few else "info"
        elif one.outlier_ns >= _LATE * window_ns:
            ns, how_often, severity = one.outlier_ns, _now_and_then(one), "info"
            more, than = "", ""
        else:
            continue
        shown += 1
        if shown > _LATE_SHOWN:
            break
        yield Finding(
            id="late-rank",
            severity=severity,
            message=f"Rank {one.rank} comes late{how_often}: the others waited "
            f"{units.ms(ns / 1e6)} ms {more}for it alone{than}, "
            f"{units.percent(ns / window_ns)} of what was recorded. Faster links do not help; look "
            "at what this rank does before it joins.",
            evidence=f"last in {one.last} of {one.joined} collectives, "
            f"{units.ms((one.lag_ns or 0) / 1e6)} ms (median) after the second to last; "
            f"{units.ms(one.caused_ns / 1e6)} ms in all; {_of_whom(ranks, across)}"
            + ("; too few steps to tell whether it is late in each" if few else ""),
        )


def _of_whom(ranks: Sequence[RankSplit], across: AcrossRanks) -> str:
    compared = sorted(one.rank for one in across.lateness)
    if len(compared) == len(ranks):
        return f"of the {len(ranks)} ranks given"
    return f"of {name_ranks(compared)}"


def _about_late_together(ranks: Sequence[RankSplit], across: AcrossRanks) -> Iterator[Finding]:
    """Tells of waiting that no rank alone causes, since several join late together."""
    window_ns = _window_ns(ranks)
    found = _exposed_waits(across)
    behind = {one.rank: one.behind_ns for one in across.lateness if one.behind_ns is not None}
    if not found or window_ns <= 0 or len(behind) < _ENOUGH_RANKS:
        return
    wait_ns = sum(found) / len(found)
    alone_ns = sum(one.caused_ns for one in across.lateness)
    if wait_ns <= _MUCH_EXPOSED * window_ns or alone_ns >= _MOSTLY * wait_ns:
        return
    most = max(behind.values())
    late = [rank for rank, ns in behind.items() if ns >= _MOSTLY * most]
    if len(late) < 2 or len(late) > _MOSTLY * len(behind):
        return
    if not all(one.later for one in across.lateness if one.rank in late):
        return
    others = [ns for rank, ns in behind.items() if rank not in late]
    words = name_ranks(late)
    yield Finding(
        id="late-ranks",
        severity="warning",
        message=f"{words[0].upper()}{words[1:]} come late together: none of them alone is to "
        f"blame for most of the waiting ({units.ms(wait_ns / 1e6)} ms a rank exposed). Look at "
        "what they share: a node, a switch, a stage of the model, the kind of batch.",
        evidence=f"on average they join {units.ms(most / 1e6)} ms (the latest) after the first, "
        f"the others {units.ms(sum(others) / 1e6 / len(others))} ms; {_of_whom(ranks, across)}",
    )


def _how_often(one: Lateness) -> str:
    if one.steps < FEW_STEPS or not one.steps_worst:
        return ""
    share = one.steps_worst / one.steps
    if share >= _NEARLY_ALL:
        return f" in nearly every step ({one.steps_worst} of {one.steps})"
    return f" in some steps (it cost most in {one.steps_worst} of {one.steps})"


def _now_and_then(one: Lateness) -> str:
    number = f"{one.outliers} collective{'' if one.outliers == 1 else 's'}"
    return f" now and then (in {number} by more than 5 times what others are late)"


def _about_exposed(ranks: Sequence[RankSplit], across: AcrossRanks) -> Iterator[Finding]:
    shares = {
        split.rank: split.total.exposed_comm_ns / split.total.window_ns
        for split in ranks
        if split.total.exposed_comm_ns is not None and split.total.window_ns > 0
    }
    if not shares or sum(shares.values()) / len(shares) <= _MUCH_EXPOSED:
        return
    totals = [split.total for split in ranks if split.rank in shares]
    comm = sum(total.comm_ns or 0 for total in totals)
    overlap = sum(total.overlap_ns or 0 for total in totals)
    exposed = sum(total.exposed_comm_ns or 0 for total in totals)
    why, split_up = _waits_or_transfer(across)
    worst = max(shares, key=lambda rank: shares[rank])
    most = ""
    if len(shares) > 1:
        most = f" a rank, most on rank {worst} ({units.percent(shares[worst])})"
    yield Finding(
        id="exposed-communication",
        severity="warning",
        message=f"Communication is exposed for {units.percent(sum(shares.values()) / len(shares))} "
        f"of the time. {why}",
        evidence=f"exposed {units.ms(exposed / 1e6 / len(totals))} ms{most}; "
        f"{units.percent(overlap / comm)} of communication is overlapped{split_up}",
    )


def _waits_or_transfer(across: AcrossRanks) -> tuple[str, str]:
    """Returns what most of the exposed communication is, in words, and the figures of it."""
    found = [one for one in across.waiting_total.values() if one.exposed_wait_ns is not None]
    if not found:
        return "How much of it is waiting for other ranks cannot be told from these traces.", ""
    wait = sum(one.exposed_wait_ns or 0 for one in found)
    transfer = sum(one.exposed_transfer_ns or 0 for one in found)
    untold = sum(one.exposed_untold_ns for one in found)
    parts = [("exposed wait", wait)]
    if any(one.exposed_transfer_ns is not None for one in found):
        parts.append(("exposed transfer", transfer))
    if untold:
        parts.append(("either of them", untold))
    each = ", ".join(f"{name} {units.ms(ns / 1e6 / len(found))} ms" for name, ns in parts)
    if wait > transfer + untold:
        why = (
            "Most of it is waiting for other ranks, so faster links or a better overlap would "
            "not help."
        )
    elif transfer >= wait + untold:
        why = "Most of it is transfer: fewer bytes, faster links or a better overlap help."
    elif not all(one.whole for one in across.meetings):
        why = (
            "Whether most of it is transfer or waiting for ranks whose traces are missing or left "
            "out cannot be told."
        )
    else:
        why = "Whether most of it is transfer or waiting for other ranks cannot be told."
    return why, f"; {each} a rank"


def _about_idle(
    ranks: Sequence[RankSplit], launched_late: Mapping[int, float]
) -> Iterator[Finding]:
    shares = {
        split.rank: split.total.idle_ns / split.total.window_ns
        for split in ranks
        if split.total.idle_ns is not None and split.total.window_ns > 0
    }
    if not shares:
        return
    mean = sum(shares.values()) / len(shares)
    if mean <= _MUCH_IDLE:
        return
    worst = max(shares, key=lambda rank: shares[rank])
    idle_ns = [split.total.idle_ns or 0 for split in ranks if split.rank in shares]
    evidence = f"idle {units.ms(sum(idle_ns) / len(idle_ns) / 1e6)} ms"
    if len(shares) > 1:
        evidence += f" a rank, most on rank {worst} ({units.percent(shares[worst])})"
    why = ""
    known = [launched_late[rank] for rank in shares if rank in launched_late]
    if known:
        late = sum(known) / len(known)
        evidence += (
            f"; in {units.percent(late, 0)} of the gaps' time the CPU had not launched what runs "
            "next"
        )
        if late >= _MOSTLY:
            why = (
                " They are launch bound, or wait for data: the CPU does not hand over work in "
                "time. Larger micro-batches, CUDA graphs, torch.compile or more loader workers "
                "may help."
            )
    # Collectives on the CPU are in exposed communication, so they are not in idling.
    on_cpu = any(not split.on_gpu for split in ranks if split.rank in shares)
    besides = ", and no collective runs on the CPU," if on_cpu else ""
    yield Finding(
        id="gpu-idle",
        severity="warning",
        message=f"GPUs do nothing{besides} for {units.percent(mean)} of the time.{why}",
        evidence=evidence,
    )


def _about_repeats(reduced: Sequence[Reductions]) -> Iterator[Finding]:
    """Tells of steps that reduce the same sequence of sizes several times."""
    found: dict[int, list[Reductions]] = {}
    for one in reduced:
        complete = [step for step in one.steps if step.complete and step.count]
        seen = {step.repeats for step in complete}
        if one.told_steps and len(seen) == 1 and min(seen) > 1 and one.kind == "AllReduce":
            found.setdefault(min(seen), []).append(one)
    for times, those in found.items():
        first = those[0]
        step = next(step for step in first.steps if step.complete and step.count)
        number = sum(1 for step in first.steps if step.complete and step.count)
        same = f"Each step reduces the same {step.count // times} sizes {times} times over"
        if times > _PAIR and (first.group is not None or first.size == _PAIR):
            severity = "warning"
            message = f"{same}, as it does where every one of {times} micro-steps is reduced."
        else:
            severity = "info"
            message = (
                f"{same}. It may be {times} models of one kind, each reduced once, or {times} "
                "micro-steps that are all reduced."
            )
        yield Finding(
            id="needless-reductions",
            severity=severity,
            message=f"{message} If they accumulate gradients, all but the last belong under "
            "no_sync.",
            evidence=f"{first.counted}: {step.count} in step {step.step}, in all {number} complete "
            f"steps of {name_ranks(one.rank for one in those)}"
            + (f"; {units.nbytes(step.bytes)} a step" if step.bytes is not None else ""),
        )


def _about_untold(ranks: Sequence[RankSplit]) -> Iterator[Finding]:
    """Says where nothing tells which of several groups reduces the gradients."""
    untold = [
        (split, found)
        for split in ranks
        if (found := volumes(split)) and of_gradients(split) is None
    ]
    if not untold:
        return
    first, found = untold[0]
    each = ", ".join(
        f"{one.kind.value} in {one.group or 'an unnamed group'}: {one.count:,}"
        + (f" of {one.elements:,} elements in all" if one.elements else "")
        for one in found[:_GROUPS_SHOWN]
    )
    more = len(found) - _GROUPS_SHOWN
    yield Finding(
        id="gradients-not-told",
        severity="info",
        message="Nothing tells which process group reduces the gradients, so they are not counted: "
        "activations are reduced as well where tensors are split. Names such as dp, tp or "
        "data_parallel tell groups apart.",
        evidence=f"on {name_ranks(split.rank for split, _ in untold)}; rank {first.rank}: {each}"
        + (f" and {more} more" if more > 0 else ""),
    )


def _about_missing(ranks: Sequence[RankSplit], missing: Sequence[int]) -> Iterator[Finding]:
    if missing:
        words = name_ranks(missing)
        yield Finding(
            id="ranks-missing",
            severity="warning",
            message=f"Traces of {words} are missing: what is said about who waits for whom holds "
            "among the ranks given only; they may all have waited for one that is missing.",
            evidence=f"{len(ranks)} of {len(ranks) + len(missing)} ranks given",
        )

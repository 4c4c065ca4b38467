"""Findings about what feeds a script's training: samples, windows, unequal ranks, waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddp_profiler import units
from ddp_profiler.analysis.feeding import Feeding
from ddp_profiler.analysis.left_out import list_incomplete
from ddp_profiler.analysis.results import Finding, LevelResult
from ddp_profiler.batch import by_value, unequal
from ddp_profiler.schema import LoaderFacts, RankFeed

_WAITING_SHARE = 0.1
_WAITING_MS = 1.0
_WAITING_STEPS = 8
"""An interval from fewer steps is too narrow: one that was held up is a large part of them."""
_WAITS_MORE = 2.0
"""A rank waits more than the others where it waits so many times as long as their mean."""
_WHOLE = ("sequential", "random")


def find_feeding(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Returns what is wrong with what feeds training; also of levels without a measured step."""
    for level in levels:
        if level.feeding is None:
            continue
        yield from _about_samples(level, level.feeding)
        yield from _about_unequal(level, level.feeding)
        yield from _about_windows(level, level.feeding)
        yield from _about_waiting(level, level.feeding)


def explains_mismatch(level: LevelResult) -> bool:
    """Tells whether unequal ranks are all that is wrong with a level's global batch."""
    check = level.batch_check
    return (
        level.feeding is not None
        and level.dp >= len(level.feeding.ranks)
        and bool(_unequal(level.feeding))
        and check.declared in (None, check.observed)
    )


# -- the same samples on several ranks ------------------------------------------------------------


def _about_samples(level: LevelResult, feeding: Feeding) -> Iterator[Finding]:
    feeds = feeding.loaders
    # With fewer replicas than ranks, some ranks have to train on the same samples.
    if level.dp < 2 or len(feeds) != level.dp or any(not feed.loaders for feed in feeds):
        return
    same, evidence = _same_share(feeds)
    if not same:
        same, evidence = _same_batches(feeds)
    if same:
        who = "all ranks" if len(same) == level.dp else units.ranks(same)
        yield Finding(
            id="same-samples",
            severity="error",
            message=f"{level.id}: {who} train on the same samples: the work of "
            f"{len(same) - 1} of {len(same)} ranks is for nothing. {_remedy(feeds)}",
            evidence=evidence,
        )
        return
    first = [feed.loaders[0] for feed in feeds]
    # Ranks that shuffle alone differ in their batches; in order they differ only if the data do.
    random = all(loader.sampling == "random" for loader in first)
    alike = {(v.dataset, v.dataset_size, v.dataset_digest) for v in first}
    unseen = not any(feed.digests for feed in feeds)
    if (
        all(loader.sampling in _WHOLE for loader in first)
        and (random or unseen)
        and len(alike) == 1
        and first[0].dataset_digest is not None
        and not any(loader.holds_more for loader in first)
    ):
        yield Finding(
            id="no-distributed-sampler",
            severity="warning",
            message=f"{level.id}: every rank draws from all samples of the same data set, so an "
            f"epoch trains {level.dp} times on each. {_remedy(feeds)}",
            evidence=f"{first[0].sampler} over {first[0].dataset_size} samples of "
            f"{units.printable(first[0].dataset)} on each of {level.dp} ranks, whose data sets "
            "hold the same",
        )


def _same_share(feeds: Sequence[RankFeed]) -> tuple[list[int], str]:
    """Returns ranks whose samplers take the same share, and how it was seen."""
    shares: dict[tuple[str, int | None, int | None], list[int]] = {}
    for feed in feeds:
        loader = feed.loaders[0]
        if loader.num_replicas is not None and loader.replica is not None:
            share = (loader.sampling, loader.num_replicas, loader.replica)
            shares.setdefault(share, []).append(feed.rank)
    for (_, replicas, replica), ranks in shares.items():
        if len(ranks) > 1:
            return ranks, f"their samplers take share {replica} of {replicas}"
    return [], ""


def _same_batches(feeds: Sequence[RankFeed]) -> tuple[list[int], str]:
    """Returns ranks whose first batches were equal, and how it was seen.

    Batches that are all alike, as of made-up data, say nothing.
    """
    count = min(len(feed.digests) for feed in feeds)
    equal: dict[tuple[int, ...], list[int]] = {}
    for feed in feeds:
        equal.setdefault(feed.digests[:count], []).append(feed.rank)
    for digests, ranks in equal.items():
        if len(ranks) > 1 and len(set(digests)) > 1:
            return ranks, f"their first {count} batches were equal, value by value"
    return [], ""


def _remedy(feeds: Sequence[RankFeed]) -> str:
    kinds = {feed.loaders[0].sampling for feed in feeds}
    if "iterable" in kinds:
        return "Have the iterable data set give each rank its own share."
    if "distributed" in kinds:
        return "Leave num_replicas and rank of DistributedSampler to it, or give each rank its own."
    return "Give the DataLoader sampler=DistributedSampler(dataset)."


# -- unequal ranks --------------------------------------------------------------------------------


def _unequal(feeding: Feeding) -> list[tuple[str, Mapping[int, int]]]:
    """Returns what ranks have unequal numbers of in a step."""
    counts = (
        ("samples a micro-step", {r.rank: r.micro_batch for r in feeding.ranks}),
        ("micro-steps a step", {r.rank: r.micro_steps for r in feeding.ranks}),
    )
    return [(what, known) for what, numbers in counts if (known := unequal(numbers))]


def _epoch_lengths(feeding: Feeding) -> Mapping[int, int]:
    """Returns micro-batches of an epoch by rank where they are unequal; else nothing."""
    if any(feed.joins or not feed.loaders for feed in feeding.loaders):
        return {}
    return unequal({feed.rank: feed.loaders[0].batches for feed in feeding.loaders})


def _about_unequal(level: LevelResult, feeding: Feeding) -> Iterator[Finding]:
    if level.dp < len(feeding.ranks):
        # Several groups train: which ranks belong together is not known.
        return
    different, lengths = _unequal(feeding), _epoch_lengths(feeding)
    if not different and not lengths:
        return
    numbers = [*different, *([("micro-batches an epoch", lengths)] if lengths else [])]
    text = f"{level.id}: ranks have unequal numbers of {_joined([what for what, _ in numbers])}."
    evidence = "; ".join(f"{what}: {by_value(known)}" for what, known in numbers)
    each = {
        rank.rank: rank.micro_batch * rank.micro_steps
        for rank in feeding.ranks
        if rank.micro_batch is not None and rank.micro_steps is not None
    }
    weighed = bool(different) and len(set(each.values())) > 1
    if weighed:
        small, large = min(each, key=lambda r: each[r]), max(each, key=lambda r: each[r])
        text += (
            " DDP averages gradients over ranks as if they were equal: where the loss is a mean, "
            f"a sample of rank {small} weighs {each[large] / each[small]:.3g} times one of rank "
            f"{large}. Give all ranks the same, or weigh each rank's loss by its samples."
        )
    if lengths:
        few = [rank for rank, length in lengths.items() if length < max(lengths.values())]
        text += (
            f" {units.ranks(few).capitalize()} end{'s' if len(few) == 1 else ''} an epoch early, "
            "and the others then wait without end, unless a number of steps ends it before. Share "
            "samples out evenly (DistributedSampler), or train under ddp.join()."
        )
    yield Finding(
        id="unequal-ranks",
        severity="error" if weighed else "warning",
        message=text,
        evidence=evidence,
    )


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# -- incomplete windows ---------------------------------------------------------------------------


def _about_windows(level: LevelResult, feeding: Feeding) -> Iterator[Finding]:
    short = [
        window
        for window in feeding.incomplete
        if any(a < b for a, b in zip(window.micro_steps, window.usual, strict=True))
    ]
    if not short:
        return
    window = min(short, key=lambda one: min(one.micro_steps))
    place = min(range(len(window.usual)), key=lambda i: window.micro_steps[i] / window.usual[i])
    has, usual = window.micro_steps[place], window.usual[place]
    weighs = (
        f"If the loss is divided by {usual} there too, the gradient of a step of {has} is "
        f"{has}/{usual} of the mean over its samples; if it is divided by what the step has, each "
        f"of its samples weighs {usual / has:.3g} times one of a full window."
        if has
        else "Its gradient is 0 on a rank without any."
    )
    yield Finding(
        id="incomplete-windows",
        severity="warning",
        message=f"{level.id}: {len(short)} of the steps that were seen "
        f"{'has' if len(short) == 1 else 'have'} fewer than {usual} micro-steps. {weighs} Drop "
        "what fills no window at the end of an epoch, or carry it over into the next.",
        evidence=list_incomplete(short),
    )


# -- waiting for data -----------------------------------------------------------------------------


def _about_waiting(level: LevelResult, feeding: Feeding) -> Iterator[Finding]:
    step = level.instrumented_step_ms
    waits = {rank.rank: rank.data_ms for rank in feeding.ranks if rank.data_ms is not None}
    if step is None or not waits or not feeding.loaders:
        return
    if min((rank.steps for rank in level.ranks), default=0) < _WAITING_STEPS:
        return
    slowest = max(waits, key=lambda rank: waits[rank])
    longest = waits[slowest]
    interval = next(rank.data_ci95_ms for rank in feeding.ranks if rank.rank == slowest)
    # What is certain: a few fetches that a busy machine has held up are nobody's fault.
    least = interval[0] if interval is not None else 0.0
    if least <= _WAITING_MS or least <= _WAITING_SHARE * step.mean:
        return
    others = [wait for rank, wait in waits.items() if rank != slowest]
    alone = bool(others) and longest > _WAITS_MORE * sum(others) / len(others)
    share = longest / step.mean
    if alone:
        who = f"rank {slowest} waits"
        evidence = (
            f"rank {slowest} {units.ms(longest)} ms a step, {units.percent(share, 0)} of it; "
            f"the others {units.ms(sum(others) / len(others))} ms"
        )
    else:
        who = "training waits"
        ranks = ", ".join(f"rank {rank} {units.ms(wait)}" for rank, wait in list(waits.items())[:8])
        evidence = f"{units.percent(share, 0)} of the step; ms a step: {ranks}"
    loaders = next((f.loaders for f in feeding.loaders if f.rank == slowest), ())
    yield Finding(
        id="data-waiting",
        severity="warning",
        message=f"{level.id}: {who} for data. {_loader_remedy(loaders)}",
        evidence=evidence,
        expected_gain_ms=longest,
        expected_gain_pct=100 * share,
    )


def _loader_remedy(loaders: Sequence[LoaderFacts]) -> str:
    """Says what to change, by what the loader does already."""
    if not loaders or loaders[0].workers is None:
        return "Load it in the background, or make a sample cheaper."
    loader = loaders[0]
    if loader.workers == 0:
        return (
            "The DataLoader loads in the training process (num_workers=0): give it workers, and "
            "persistent_workers=True."
        )
    advice = [f"Give the DataLoader more than {loader.workers} workers, or make a sample cheaper"]
    if loader.persistent_workers is False:
        advice.append(
            "where an epoch's start is what takes long, keep workers (persistent_workers=True)"
        )
    return f"{'; '.join(advice)}."

"""What entered a script's training: micro-batches, tokens, incomplete windows, loaders, epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_profiler.analysis import statistics
from ddp_profiler.analysis.left_out import IncompleteStep, LeftOut
from ddp_profiler.analysis.parts import NULL, Columns, Floats, Ints, step_keys
from ddp_profiler.batch import SHORT, Batch, Epoch, dealt_epoch, epoch
from ddp_profiler.schema import LevelFacts, LevelSettings, RankFeed, SpanKind, Variant

_KINDS = (SpanKind.STEP, SpanKind.FORWARD, SpanKind.DATA)
_COLUMNS = (
    *("repetition", "variant", "step", "kind", "index"),
    *("begin_ns", "end_ns", "samples", "value"),
)
"""What is looked at, of all ranks at once."""

_VARIES = 0.01
"""Tokens vary where the most and the least of a rank's steps are apart by this share."""


@dataclass(frozen=True)
class RankTokens:
    """Tokens that entered one rank in a step."""

    rank: int
    step_min: int
    step_median: float
    step_max: int


@dataclass(frozen=True)
class Tokens:
    """Tokens that entered forward in a step, summed over ranks.

    Attributes:
        step_min: The least.
        step_median: The median.
        step_max: The most.
        step_mean: Mean of the plain steps; the others have marks.
        imbalance: Mean over steps of most / mean over ranks, padding included, since that is
            computed too; 1 where all ranks have the same.
        padding_fraction: Share of the places that hold padding; None where no mask says so.
        ranks: The same of each rank.
    """

    step_min: int
    step_median: float
    step_max: int
    step_mean: float | None
    imbalance: float
    padding_fraction: float | None
    ranks: tuple[RankTokens, ...]


@dataclass(frozen=True)
class RankBatch:
    """What one rank trains on in most of its steps; None where no number is that of most.

    Attributes:
        rank: Global rank.
        micro_batch: Samples of a micro-step.
        micro_steps: Micro-steps of a step.
        data_ms: Waiting for its DataLoader in a step, mean; None without recorded steps.
        data_ci95_ms: 95 % interval of that mean, from a block bootstrap over steps.
    """

    rank: int
    micro_batch: int | None
    micro_steps: int | None
    data_ms: float | None = None
    data_ci95_ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Feeding:
    """What entered a script's training.

    Attributes:
        ranks: Micro-batch and micro-steps of each rank.
        tokens: Tokens; None where there are none.
        incomplete: Incomplete steps.
        epoch: What becomes of an epoch's samples; None where the loaders do not tell.
        loaders: What fed each rank.
        notes: What a reader has to know.
    """

    ranks: tuple[RankBatch, ...]
    tokens: Tokens | None
    incomplete: tuple[IncompleteStep, ...]
    epoch: Epoch | None
    loaders: tuple[RankFeed, ...]
    notes: tuple[str, ...]


def observe(
    columns_by_rank: Mapping[int, Columns],
    index: int,
    level: LevelSettings,
    facts: LevelFacts | None,
    out: LeftOut,
) -> Feeding | None:
    """Puts together what entered a script's training; None for a level of a study.

    Args:
        columns_by_rank: Spans by column of the level's ranks.
        index: Index of the level.
        level: Its settings.
        facts: What the worker found out.
        out: Steps that figures leave out.
    """
    spans = {
        rank: _kept(columns, index, out.keys, (Variant.PLAIN, Variant.INSTRUMENTED))
        for rank, columns in columns_by_rank.items()
    }
    feeds = facts.feeds if facts else ()
    if not feeds and not any(_steps(rank)["step"].size for rank in spans.values()):
        return None
    waits = {rank: _waits_ms(values) for rank, values in spans.items()}
    intervals = _intervals(waits)
    ranks = tuple(
        _rank_batch(rank, values, waits[rank], intervals[rank]) for rank, values in spans.items()
    )
    tokens = _tokens(spans)
    found_epoch = _epoch(level, feeds, out.incomplete)
    notes = []
    if tokens is not None:
        notes += _token_notes(ranks, tokens, level.dp)
    if found_epoch is not None and found_epoch.rounding:
        where = f"on {level.dp} ranks" if level.dp > 1 else "on 1 rank"
        rounding = "; ".join(found_epoch.rounding)
        notes.append(f"An epoch of {found_epoch.samples} samples {where}: {rounding}.")
    return Feeding(ranks, tokens, out.incomplete, found_epoch, feeds, tuple(notes))


def _kept(columns: Columns, index: int, out: Ints, variants: Sequence[Variant]) -> dict[str, Ints]:
    chosen = (columns["level"] == index) & np.isin(columns["variant"], variants)
    chosen &= np.isin(columns["kind"], _KINDS)
    chosen &= ~np.isin(step_keys(columns["repetition"], columns["step"]), out)
    return {name: columns[name][chosen].astype(np.int64) for name in _COLUMNS}


def _intervals(waits: Mapping[int, Floats]) -> dict[int, tuple[float, float] | None]:
    """Returns the interval of each rank's mean, in ms; ranks of as many steps together."""
    found: dict[int, tuple[float, float] | None] = dict.fromkeys(waits)
    for count in {len(values) for values in waits.values()}:
        ranks = [rank for rank, values in waits.items() if len(values) == count]
        both = statistics.mean_bootstrap(np.stack([waits[rank] for rank in ranks], axis=1))
        if both is not None:
            low, high = both.tolist()
            found |= dict(zip(ranks, zip(low, high, strict=True), strict=True))
    return found


def _steps(spans: Mapping[str, Ints]) -> dict[str, Ints]:
    # Only scripts count micro-steps in the span of a step.
    chosen = (spans["kind"] == SpanKind.STEP) & (spans["index"] >= 0)
    return {name: values[chosen] for name, values in spans.items()}


def _rank_batch(
    rank: int,
    spans: Mapping[str, Ints],
    waits: Floats,
    interval: tuple[float, float] | None,
) -> RankBatch:
    samples = spans["samples"][spans["kind"] == SpanKind.FORWARD]
    return RankBatch(
        rank=rank,
        micro_batch=_usual(samples[samples != NULL]),
        micro_steps=_usual(_steps(spans)["index"]),
        data_ms=float(waits.mean()) if len(waits) else None,
        data_ci95_ms=interval,
    )


def _waits_ms(spans: Mapping[str, Ints]) -> Floats:
    """Returns the waiting for data of each recorded step in ms, in order."""
    steps = _steps(spans)
    recorded = steps["variant"] == int(Variant.INSTRUMENTED)
    keys = np.unique(step_keys(steps["repetition"], steps["step"])[recorded])
    key = step_keys(spans["repetition"], spans["step"])
    data = (spans["kind"] == SpanKind.DATA) & np.isin(key, keys)
    length = (spans["end_ns"] - spans["begin_ns"])[data] / 1e6
    row = np.searchsorted(keys, key[data])
    return np.bincount(row, weights=length, minlength=len(keys)).astype(np.float64)


def _usual(values: Ints) -> int | None:
    """Returns the value of more than half; None without one."""
    if not len(values):
        return None
    found, times = np.unique(values, return_counts=True)
    most = times.argmax()
    return int(found[most]) if 2 * times[most] > len(values) else None


def _tokens(spans: Mapping[int, Mapping[str, Ints]]) -> Tokens | None:
    """Adds up tokens by step, where each rank has seen them in each step."""
    steps = {rank: _steps(values) for rank, values in spans.items()}
    keys = [step_keys(s["repetition"], s["step"]) for s in steps.values()]
    if not keys or any(NULL in s["value"] for s in steps.values()):
        return None
    shared = keys[0]
    for key in keys[1:]:
        shared = np.intersect1d(shared, key)
    if not len(shared):
        return None
    rows = [np.isin(key, shared) for key in keys]
    # Shape [rank, step]; a rank's steps are in order.
    counts = np.stack([s["value"][row] for s, row in zip(steps.values(), rows, strict=True)])
    first = next(iter(steps.values()))
    plain = first["variant"][rows[0]] == int(Variant.PLAIN)
    totals = counts.sum(axis=0)
    return Tokens(
        step_min=int(totals.min()),
        step_median=float(np.median(totals)),
        step_max=int(totals.max()),
        step_mean=float(totals[plain].mean()) if plain.any() else None,
        imbalance=_imbalance(spans, shared, counts),
        padding_fraction=_padding(spans),
        ranks=tuple(
            RankTokens(rank, int(c.min()), float(np.median(c)), int(c.max()))
            for rank, c in zip(steps, counts, strict=True)
        ),
    )


def _imbalance(spans: Mapping[int, Mapping[str, Ints]], keys: Ints, counts: Ints) -> float:
    """Returns the mean over steps of most / mean over ranks.

    Of the places where forward was recorded, since padding is computed too; else of tokens.
    """
    places: list[Floats] = []
    for values in spans.values():
        forward = (values["kind"] == SpanKind.FORWARD) & (values["value"] != NULL)
        key = step_keys(values["repetition"], values["step"])[forward]
        taken = np.where(values["index"] >= 0, values["index"], values["value"])[forward]
        row = np.searchsorted(keys, key)
        known = np.isin(key, keys)
        total = np.bincount(row[known], weights=taken[known], minlength=len(keys))
        places.append(total.astype(np.float64))
    table = np.stack(places)
    table = table[:, (table > 0).all(axis=0)]
    if not table.size:
        table = counts.astype(np.float64)
    means = table.mean(axis=0)
    known_means = means > 0
    if not known_means.any():
        return 1.0
    return float((table.max(axis=0)[known_means] / means[known_means]).mean())


def _padding(spans: Mapping[int, Mapping[str, Ints]]) -> float | None:
    tokens = places = 0
    for values in spans.values():
        forward = (values["kind"] == SpanKind.FORWARD) & (values["value"] != NULL)
        if (values["index"][forward] < 0).any():
            return None
        tokens += int(values["value"][forward].sum())
        places += int(values["index"][forward].sum())
    return 1 - tokens / places if places else None


def _token_notes(ranks: Sequence[RankBatch], tokens: Tokens, dp: int) -> list[str]:
    """Says that tokens vary where samples do not."""
    vary = any(r.step_max - r.step_min > _VARIES * r.step_max for r in tokens.ranks)
    vary |= tokens.imbalance > 1 + _VARIES
    if not vary or any(rank.micro_batch is None for rank in ranks):
        return []
    least, most = min(r.step_min for r in tokens.ranks), max(r.step_max for r in tokens.ranks)
    text = f"Samples are the same in every micro-step, tokens are not: {least} to {most} a step"
    text += " and rank" if dp > 1 else ""
    if tokens.padding_fraction is not None:
        text += f", beside {tokens.padding_fraction * 100:.1f} % padding"
    if tokens.imbalance > 1 + _VARIES:
        text += (
            f"; the rank with most has {tokens.imbalance:.2f} times the mean over ranks, and the "
            "others wait for it (batches of similar length would help)"
        )
    return [text + "."]


def _epoch(
    level: LevelSettings, feeds: Sequence[RankFeed], incomplete: Sequence[IncompleteStep]
) -> Epoch | None:
    """Computes an epoch where all ranks have one loader each, alike and of a known kind."""
    if len(feeds) != level.dp or any(len(feed.loaders) != 1 for feed in feeds):
        return None
    loaders = [feed.loaders[0] for feed in feeds]
    first = loaders[0]
    alike = {
        (v.sampling, v.dataset_size, v.num_replicas, v.batch_size, v.samples, v.batches)
        for v in loaders
    }
    if len(alike) > 1 or first.dataset_size is None or not first.batch_size:
        return None
    batch = Batch(first.batch_size, level.accumulation, level.dp)
    drops = bool(first.drop_last)
    shared = first.sampling == "distributed" and first.num_replicas == level.dp
    alone = first.sampling in ("sequential", "random") and level.dp == 1
    if shared or alone:
        found = epoch(
            first.dataset_size,
            batch,
            sampler_drops=bool(first.sampler_drop_last),
            loader_drops=drops,
            window=None,
        )
    elif first.sampling == "sharded" and first.num_replicas == level.dp:
        found = dealt_epoch(first.dataset_size, batch, drops=drops, window=None)
    else:
        return None
    if (found.samples_per_rank, found.micro_steps) != (first.samples, first.batches):
        # A sampler of the script's own, which does otherwise.
        return None
    if any(set(step.micro_steps) == {found.left_over} for step in incomplete):
        return replace(found, window=SHORT)
    return found

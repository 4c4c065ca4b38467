"""A cost model of AllReduce, fitted to AllReduces in isolation and chosen by held-out error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from ddp_profiler.predict.schedule import Cost

Floats = npt.NDArray[np.float64]

_LEAST_SAMPLES = 2
_RELEVANT = 4.0
"""Sizes within this factor of the buckets' decide."""
_LEAST_ERROR = 0.01
"""Relative standard error that no fit is believed to be below."""
_UNTESTED_ERROR = 0.1
"""Relative standard error of a fit of which nothing could be held out."""
_EQUALLY_GOOD = 1.5
"""A form whose held-out error is within this factor of the best one's is as good."""
_HALF = 0.5


@dataclass(frozen=True)
class Sample:
    """AllReduces of one size on one number of ranks, in isolation.

    Attributes:
        ranks: n.
        nbytes: Bytes reduced.
        time_ms: Median time.
    """

    ranks: int
    nbytes: int
    time_ms: float


@dataclass(frozen=True)
class Form:
    """How the time of an AllReduce depends on n.

    time = overhead + hops(n) x latency + passes(n) x bytes / bandwidth.

    Attributes:
        name: Its name.
        hops: Messages one after the other.
        passes: How often all bytes pass the narrowest place.
    """

    name: str
    hops: Callable[[int], float]
    passes: Callable[[int], float]


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("ring", lambda n: 2.0 * (n - 1), lambda n: 2 * (n - 1) / n),
        # NCCL's double binary tree: its own model gives it half of the bandwidth for algbw.
        Form("tree", lambda n: 2.0 * math.ceil(math.log2(n)), lambda n: 2.0),
        # A ring whose ranks share one medium, such as the cores and memory of one host.
        Form("shared", lambda n: 2.0 * (n - 1), lambda n: 2.0 * (n - 1)),
    )
}

_PLAUSIBLE = {
    ("gloo", True): ("ring",),
    ("gloo", False): ("ring", "shared"),
    ("nccl", True): ("ring", "tree"),
    ("nccl", False): ("ring", "tree"),
}
"""What a backend does, by whether the ranks are on several nodes."""


@dataclass(frozen=True)
class Curve:
    """One form with its fitted constants.

    Attributes:
        form: Name in :data:`FORMS`.
        overhead_ms: Per AllReduce.
        latency_ms: Per hop.
        ms_per_byte: Per byte and pass.
        correction: Measured over fitted time at some sizes, as (bytes, ratio) by rising size;
            between them it is interpolated on the logarithm of the size. Empty for none.
    """

    form: str
    overhead_ms: float
    latency_ms: float
    ms_per_byte: float
    correction: tuple[tuple[int, float], ...] = ()

    def cost(self, ranks: int, nbytes: float) -> Cost:
        """Returns what an AllReduce of ``nbytes`` takes on ``ranks`` ranks."""
        if ranks < 2:
            return Cost(0.0, 0.0)
        form = FORMS[self.form]
        ratio = self._ratio(nbytes)
        return Cost(
            latency_ms=ratio * (self.overhead_ms + form.hops(ranks) * self.latency_ms),
            wire_ms=ratio * form.passes(ranks) * nbytes * self.ms_per_byte,
        )

    def time_ms(self, ranks: int, nbytes: float) -> float:
        """Returns the time of one AllReduce that is alone."""
        cost = self.cost(ranks, nbytes)
        return cost.latency_ms + cost.wire_ms

    def _ratio(self, nbytes: float) -> float:
        if not self.correction:
            return 1.0
        sizes, ratios = zip(*self.correction, strict=True)
        return float(np.interp(math.log(max(nbytes, 1.0)), np.log(sizes), ratios))


@dataclass(frozen=True)
class HeldOut:
    """How well a form does on what it was not fitted to.

    Attributes:
        form: Its name, with `` by size`` where it has a correction.
        error: Root mean square of the relative error.
    """

    form: str
    error: float


@dataclass(frozen=True)
class NetworkModel:
    """What an AllReduce takes between the ranks of one kind of placement.

    Attributes:
        curve: The chosen form.
        rivals: Forms that the data cannot tell from it.
        error: Relative standard error, held out, of sizes like the buckets'.
        held_out: All forms tried, the best first.
        unit: What was held out: ``ranks`` (all sizes of one n) or ``sizes``.
        ranks: The n that it was fitted to.
        sizes: The least and the most bytes that it was fitted to.
        between_nodes: Whether the ranks are on several nodes.
        scaled: By how much the wire time was multiplied for another bandwidth; 1 as measured.
    """

    curve: Curve
    rivals: tuple[Curve, ...]
    error: float
    held_out: tuple[HeldOut, ...]
    unit: str
    ranks: tuple[int, ...]
    sizes: tuple[int, int]
    between_nodes: bool
    scaled: float = 1.0

    def cost(self, ranks: int, nbytes: float, curve: Curve | None = None) -> Cost:
        """Returns what an AllReduce takes, by the chosen form or by one of its rivals."""
        cost = (curve or self.curve).cost(ranks, nbytes)
        return Cost(cost.latency_ms, cost.wire_ms * self.scaled)

    def uncertainty(self, ranks: int) -> float:
        """Returns the relative standard error at ``ranks``, larger where n was not measured.

        Between measured n and up to the largest it is the held-out error; each doubling beyond
        adds as much again, in squares.
        """
        doublings = max(0.0, math.log2(ranks / max(self.ranks)))
        return self.error * math.sqrt(1.0 + doublings)

    def with_bandwidth(self, measured_gbps: float, wanted_gbps: float) -> NetworkModel:
        """Returns the model with links of another rate; latencies stay what they were."""
        return replace(self, scaled=self.scaled * measured_gbps / wanted_gbps)


def fit(
    samples: Sequence[Sample],
    backend: str,
    between_nodes: bool,
    typical_bytes: Sequence[int] = (),
) -> NetworkModel | None:
    """Fits the forms that a backend uses to the samples, and chooses one by held-out error.

    With two n or more, all samples of one n are held out in turn; with one n, sizes in turn,
    and all forms are kept as rivals, since one n cannot tell them apart. Nor can it tell what
    an AllReduce costs once from what each hop costs: half of it is taken for each, and both
    extremes are rivals. Constants are fitted to relative errors and are not negative (nnls).

    Args:
        samples: AllReduces in isolation.
        backend: ``gloo`` or ``nccl``.
        between_nodes: Whether the ranks are on several nodes.
        typical_bytes: Sizes of the buckets; sizes like theirs decide.

    Returns:
        The model; None with fewer than 2 samples.
    """
    samples = [s for s in samples if s.ranks >= 2 and s.nbytes > 0 and s.time_ms > 0]
    if len(samples) < _LEAST_SAMPLES:
        return None
    measured = sorted({sample.ranks for sample in samples})
    names = _PLAUSIBLE.get((backend, between_nodes), ("ring",))
    unit = "ranks" if len(measured) > 1 else "sizes"
    tried: list[_Tried] = []
    for name in names:
        for by_size in (False, True):
            errors = _held_out_errors(samples, name, by_size, unit, typical_bytes)
            if errors:
                rms = float(np.sqrt(np.mean(np.square(errors))))
                tried.append(_Tried(rms, name, by_size))
    tried.sort(key=lambda one: one.error)
    least = max(tried[0].error, _LEAST_ERROR) if tried else math.inf
    # Of those as good as the best, one without a correction by size if there is one.
    good = sorted(
        (one for one in tried if one.error <= _EQUALLY_GOOD * least),
        key=lambda one: (one.by_size, one.error),
    ) or [_Tried(_UNTESTED_ERROR, name, False) for name in names]
    chosen = good[0]
    rivals = [
        _fit(samples, one.name, one.by_size)
        for place, one in enumerate(good)
        if one.name != chosen.name and one.name not in {b.name for b in good[:place]}
    ]
    if len(measured) == 1:
        rivals += [_fit(samples, chosen.name, chosen.by_size, per_hop=share) for share in (0, 1)]
    return NetworkModel(
        curve=_fit(samples, chosen.name, chosen.by_size),
        rivals=tuple(rivals),
        error=max(chosen.error, _LEAST_ERROR),
        held_out=tuple(
            HeldOut(f"{one.name}{' by size' if one.by_size else ''}", one.error) for one in tried
        ),
        unit=unit,
        ranks=tuple(measured),
        sizes=(min(s.nbytes for s in samples), max(s.nbytes for s in samples)),
        between_nodes=between_nodes,
    )


@dataclass(frozen=True)
class _Tried:
    error: float
    name: str
    by_size: bool


def _held_out_errors(
    samples: Sequence[Sample], name: str, by_size: bool, unit: str, typical: Sequence[int]
) -> list[float]:
    """Returns the relative error of each sample when it was held out, of the sizes that matter."""
    keys = {s.ranks for s in samples} if unit == "ranks" else {s.nbytes for s in samples}
    smallest, largest = min(s.nbytes for s in samples), max(s.nbytes for s in samples)
    errors = []
    for key in sorted(keys):
        held = [s for s in samples if key == (s.ranks if unit == "ranks" else s.nbytes)]
        rest = [s for s in samples if s not in held]
        if unit == "sizes" and key in (smallest, largest):
            # Sizes beyond what was measured are another question.
            continue
        if len(rest) < _LEAST_SAMPLES:
            continue
        curve = _fit(rest, name, by_size)
        errors += [
            curve.time_ms(s.ranks, s.nbytes) / s.time_ms - 1
            for s in held
            if _is_typical(s.nbytes, typical, samples)
        ]
    return errors


def _is_typical(nbytes: int, typical: Sequence[int], samples: Sequence[Sample]) -> bool:
    if not typical:
        return True
    low, high = min(typical) / _RELEVANT, max(typical) * _RELEVANT
    # Where the buckets are larger than anything measured, the largest sizes stand for them.
    sizes = sorted({s.nbytes for s in samples})
    low = min(low, sizes[max(0, len(sizes) - 3)])
    high = max(high, sizes[min(2, len(sizes) - 1)])
    return low <= nbytes <= high


def _fit(samples: Sequence[Sample], name: str, by_size: bool, *, per_hop: float = _HALF) -> Curve:
    """Fits a form; ``per_hop`` is the share of latency in hops where one n cannot tell it."""
    form = FORMS[name]
    times = np.array([s.time_ms for s in samples])
    # In MB, so that the columns are of similar size.
    sizes = np.array([form.passes(s.ranks) * s.nbytes / 1e6 for s in samples])
    if len({s.ranks for s in samples}) == 1:
        table = np.stack((np.ones(len(samples)), sizes), axis=1)
        (latency, slope), _ = nnls(table / times[:, None], np.ones(len(samples)))
        overhead = (1 - per_hop) * latency
        hop = per_hop * latency / form.hops(samples[0].ranks)
    else:
        hops = np.array([form.hops(s.ranks) for s in samples])
        table = np.stack((np.ones(len(samples)), hops, sizes), axis=1)
        (overhead, hop, slope), _ = nnls(table / times[:, None], np.ones(len(samples)))
    curve = Curve(name, float(overhead), float(hop), float(slope) / 1e6)
    if not by_size:
        return curve
    ratios: dict[int, list[float]] = {}
    for s in samples:
        fitted = curve.time_ms(s.ranks, s.nbytes)
        if fitted > 0:
            ratios.setdefault(s.nbytes, []).append(s.time_ms / fitted)
    correction = tuple(
        (nbytes, float(np.exp(np.mean(np.log(values)))))
        for nbytes, values in sorted(ratios.items())
    )
    return replace(curve, correction=correction)

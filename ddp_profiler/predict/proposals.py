"""What a change of settings would gain, by replay: only what is beyond its own uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_profiler.predict.evidence import per_node
from ddp_profiler.predict.prediction import Predictor
from ddp_profiler.predict.request import Request

BUCKET_CAPS_MB = (1.0, 2.0, 4.0, 10.0, 25.0, 50.0, 100.0, 200.0)
_ACCUMULATIONS = (2, 4)
_GAIN_ERROR = 0.15
"""Relative standard error of a gain, beyond what both steps share."""
_STEP_ERROR = 0.004
"""Standard error of a gain as a share of the step."""
_LEAST_FRACTION = 0.02
_SEED = 20240502
_INTERVAL = (5, 95)


@dataclass(frozen=True)
class Proposal:
    """A change of settings that would make the same number of samples faster.

    Attributes:
        setting: What it changes: ``bucket_cap_mb``, ``reduce_once``, ``bucket_view``,
            ``gradient_dtype`` or ``accumulation``.
        level: The id of the level that it is about.
        text: What to do, in words.
        request: The changed setting.
        before_ms: The step as it is, replayed.
        after_ms: Time for the same number of samples with the change.
        gain_ms: before_ms - after_ms.
        gain_interval90: 90 % of what the gain may be.
        gain_pct: Gain over before_ms, in per cent.
        caveat: What else it changes; empty for nothing.
    """

    setting: str
    level: str
    text: str
    request: Request
    before_ms: float
    after_ms: float
    gain_ms: float
    gain_interval90: tuple[float, float]
    gain_pct: float
    caveat: str = ""

    @property
    def changes_training(self) -> bool:
        """Whether what is computed changes, and not only how fast."""
        return self.setting in ("accumulation", "gradient_dtype")

    @property
    def can_be_confirmed(self) -> bool:
        """Whether the worker can apply it: gradients of another type need a hook of the user's."""
        return self.setting != "gradient_dtype"


def best_to_confirm(proposals: Sequence[Proposal]) -> Proposal | None:
    """Returns the one that gains most of those that leave training as it is, else of all.

    Only those that the worker can apply; None where there is none.

    Args:
        proposals: The best first.
    """
    fit = [one for one in proposals if one.can_be_confirmed]
    same = [one for one in fit if not one.changes_training]
    return next(iter(same or fit), None)


def propose(predictor: Predictor) -> tuple[Proposal, ...]:
    """Returns what would gain at the largest level, the best first, one for each setting.

    A gain counts if it is at least 2 % of the step, and its 90 % interval lies above 0.
    """
    level = predictor.evidence.largest
    now = Request(level.dp, level.accumulation, ranks_per_node=per_node(level))
    before = predictor.draw(now)
    best: dict[str, Proposal] = {}
    random = np.random.default_rng(_SEED)
    own, floor = random.standard_normal((2, len(before.step_ms)))
    for setting, text, request, caveat in _changes(predictor, now):
        after = predictor.draw(request)
        if request == now or (
            setting == "bucket_cap_mb"
            and after.prediction.bucket_bytes == before.prediction.bucket_bytes
        ):
            continue
        # For as many samples as before.
        share = before.prediction.global_batch / after.prediction.global_batch
        middle = before.prediction.step_ms.median
        gain = middle - share * after.prediction.step_ms.median
        differences = before.step_ms - share * after.step_ms
        differences = differences + _GAIN_ERROR * gain * own + _STEP_ERROR * middle * floor
        low, high = np.percentile(differences, _INTERVAL)
        if low <= 0 or gain < _LEAST_FRACTION * middle:
            continue
        found = Proposal(
            setting=setting,
            level=level.id,
            text=text,
            request=request,
            before_ms=middle,
            after_ms=middle - gain,
            gain_ms=gain,
            gain_interval90=(min(float(low), gain), max(float(high), gain)),
            gain_pct=100 * gain / middle,
            caveat=caveat,
        )
        if setting not in best or best[setting].gain_ms < gain:
            best[setting] = found
    return tuple(sorted(best.values(), key=lambda proposal: -proposal.gain_ms))


def _changes(predictor: Predictor, now: Request) -> Iterator[tuple[str, str, Request, str]]:
    """Yields (setting, words, request, caveat) of what a user can change."""
    level = predictor.evidence.largest
    costs = level.costs_ms
    assert costs is not None
    if costs.syncs > 1:
        text = "reduce in the last micro-step only, with no_sync() around the others"
        yield "reduce_once", text, replace(now, reduce_once=True), ""
    cap = predictor.evidence.cap_mb
    if predictor.evidence.packs_as_measured:
        for size in BUCKET_CAPS_MB:
            if size != cap:
                text = f"set bucket_cap_mb={size:g}"
                text += f" instead of {cap:g}" if cap is not None else ""
                yield "bucket_cap_mb", text, replace(now, bucket_cap_mb=size), ""
    yield (
        "bucket_view",
        "set gradient_as_bucket_view=True",
        replace(now, bucket_view=True),
        "gradients then are views of the buckets: do not detach or replace them",
    )
    if predictor.evidence.element_bytes > 2:
        yield (
            "gradient_dtype",
            "send gradients as bf16, with torch's bf16_compress_hook",
            replace(now, gradient_dtype="bf16"),
            "sums are rounded to bf16, and converting is not included",
        )
    if costs.syncs <= 1:
        for times in _ACCUMULATIONS:
            more = level.accumulation * times
            yield (
                "accumulation",
                f"accumulate {more} micro-steps instead of {level.accumulation}",
                replace(now, accumulation=more),
                f"the global batch grows {times}-fold, which changes training; the gain is for "
                "the same number of samples",
            )

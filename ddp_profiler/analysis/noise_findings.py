"""What the gradient noise scale says about the global batch, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_profiler import units
from ddp_profiler.analysis.noise_scale import NoiseScale
from ddp_profiler.analysis.results import Finding, LevelResult


def find_noise(levels: Sequence[LevelResult]) -> Iterator[Finding]:
    """Says at the largest global batch whether a larger one pays; nothing where not known."""
    told = [level for level in levels if level.noise_scale and level.noise_scale.ci95]
    level = max(told, key=lambda one: one.noise_scale.large_batch or 0, default=None)  # type: ignore[union-attr]
    if level is None or level.noise_scale is None:
        return
    scale = level.noise_scale
    message = _message(scale)
    if message:
        yield Finding(
            id="noise-scale",
            severity="info",
            message=f"{level.id}: {message}",
            evidence=f"norms of gradients before and after their reduction in {scale.steps} "
            "steps; it holds for these, and usually rises during training",
        )


def _message(scale: NoiseScale) -> str:
    """Returns what the interval allows to say; empty if nothing."""
    batch, ci95 = scale.large_batch, scale.ci95
    if batch is None or ci95 is None or scale.doubling_gain_ci95 is None:
        return ""
    low, high = ci95
    least, most = scale.doubling_gain_ci95
    if high is None:
        if batch >= low:
            return ""
        return (
            f"global batch {batch} is below the gradient noise scale, which is at least "
            f"{units.about(low)} samples: a larger one, as by more ranks, still pays. A step of "
            f"twice the batch is worth at least {least:.2f} of these."
        )
    place = "below" if batch < low else "above" if batch > high else "about at"
    pays = {
        "below": "a larger one, as by more ranks, still pays",
        "about at": "a larger one, as by more ranks, pays partly",
        "above": "a larger one, as by more ranks, buys ever less",
    }[place]
    return (
        f"global batch {batch} is {place} the gradient noise scale of about "
        f"{units.about(scale.samples)} samples [{units.about(low)}, {units.about(high)}]: {pays}. "
        f"A step of twice the batch is worth {scale.doubling_gain:.2f} of these "
        f"[{least:.2f}, {most:.2f}]."
    )


def noise_notes(scale: NoiseScale) -> tuple[str, ...]:
    """Says why norms that were taken do not tell the noise scale."""
    if scale.ci95 is not None or not scale.steps:
        return ()
    return (f"The gradient noise scale is not known: {scale.reason}.",)

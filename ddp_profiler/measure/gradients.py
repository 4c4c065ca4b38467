"""Compares gradients: how far apart they are, by what factor, and whether bit for bit the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_profiler.schema import BatchProof, LevelSettings

_TOLERANCE = 1e-3
"""Relative: how near a factor lies to what it is named after, and what counts as rounding."""
_NOISE = 1e-5
"""Gradients below this share of the largest one are taken for rounding."""
_CHUNK = 1 << 16
"""Elements that a checksum takes at a time, so that they stay in the cache."""
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The odd numbers of SplitMix64 (Steele, Lea, Flood 2014) as signed integers."""

_UNEXPLAINED = (
    "The gradients differ by more than rounding and by more than a factor. So it is where the "
    "loss is not the mean over samples (a mean over unmasked tokens, for example), or where "
    "samples of a micro-batch influence each other."
)

Gradients = Mapping[str, Tensor | None]
"""Gradients by the parameter's name; None where it has none."""


def compare_gradients(
    gradients: Gradients,
    reference: Gradients,
    level: LevelSettings,
    *,
    must_be_equal: bool = True,
    rounding: float = 0.0,
) -> BatchProof:
    """Compares a level's gradients with those of one process.

    The error of a tensor is max|difference| / max|reference|; where the reference is 0
    throughout it is max|difference|. A tensor whose reference is below 1e-5 of the largest
    one holds rounding only, as a bias before a normalisation does, and is divided by that
    largest one. The factor is <gradient, reference> / <reference, reference> over all
    tensors in float64, and has a name only if what it does not explain is below 1e-3 (16
    roundings of the gradients' type, where that is more).

    Args:
        gradients: As reduced.
        reference: Of one process, with the same names.
        level: The settings that a factor may be a product of.
        must_be_equal: Whether a difference that is no factor needs an explanation.
        rounding: Relative rounding of what was computed with on the way, where it is more than
            that of the gradients' type. A factor within 4 of it is given as 1.

    Returns:
        A proof that says nothing of whether ranks agree.
    """
    pairs = [
        (name, *_both(gradients[name], reference[name]))
        for name in gradients
        if gradients[name] is not None or reference[name] is not None
    ]
    for name, gradient, expected in pairs:
        for values, whose in ((gradient, "The level's"), (expected, "The one process's")):
            if not bool(values.isfinite().all()):
                note = f"{whose} gradient of {name} is not finite."
                return BatchProof(None, None, name, None, None, (note,))
    notes: list[str] = []
    sizes = [_largest(expected) for _, _, expected in pairs]
    largest = max(sizes, default=0.0)
    # A tensor of rounding only would have an error of 1.
    scales = [size if size >= _NOISE * largest else largest for size in sizes]
    scales = [scale if size else 1.0 for scale, size in zip(scales, sizes, strict=True)]

    def worst(factor: float) -> tuple[float, str | None]:
        errors = [
            (_largest(gradient / factor - expected) / scale, name)
            for (name, gradient, expected), scale in zip(pairs, scales, strict=True)
        ]
        return max(errors, key=lambda error: error[0], default=(0.0, None))

    error, worst_tensor = worst(1.0)
    if largest == 0.0:
        notes.append("The gradients of the one process are all 0; the error is absolute.")
        return BatchProof(None, error, worst_tensor, None, None, tuple(notes))
    noisy = [
        name
        for (name, gradient, expected), size in zip(pairs, sizes, strict=True)
        if 0.0 < size < _NOISE * largest and _largest(gradient - expected) / size > error
    ]
    if noisy:
        notes.append(
            f"The gradient of {some(noisy)} is below {_NOISE:g} of the largest one, so rounding; "
            "its error is given as a share of the largest."
        )
    products = [
        (_dot(gradient, expected), _dot(expected, expected)) for _, gradient, expected in pairs
    ]
    factor = sum(p for p, _ in products) / sum(q for _, q in products)
    # Types with fewer digits round by more.
    eps = max((torch.finfo(g.dtype).eps for g in gradients.values() if g is not None), default=0.0)
    eps = max(eps, rounding)
    tolerance, rounding = max(_TOLERANCE, 4 * eps), max(_TOLERANCE, 16 * eps)
    if abs(factor - 1) <= tolerance:
        factor = 1.0 if tolerance > _TOLERANCE else factor
        unexplained = error > rounding and must_be_equal
        notes += [_UNEXPLAINED] if unexplained else []
        return BatchProof(
            None, error, worst_tensor, factor, None, tuple(notes), unexplained=unexplained
        )
    residual = worst(factor)[0] if factor else 1.0
    factor_name = None
    unexplained = residual > rounding and must_be_equal
    if residual > rounding:
        notes += [_UNEXPLAINED] if unexplained else []
    else:
        factor_name = name_factor(factor, level, tolerance)
        if factor_name is None:
            notes.append("The factor between the gradients is no product of the settings.")
        elif _is_near(factor, 1 / (level.dp * level.accumulation), tolerance):
            notes.append(
                "A loss that is the sum over the micro-batch's samples instead of the mean has "
                "this factor."
            )
    return BatchProof(
        None, error, worst_tensor, factor, factor_name, tuple(notes), unexplained=unexplained
    )


def name_factor(factor: float, level: LevelSettings, tolerance: float = _TOLERANCE) -> str | None:
    """Names a factor after the product of settings, or its reciprocal, that it equals.

    >>> level = LevelSettings("dp4-acc2", 4, 3, 2, "packed", (0, 1, 2, 3))
    >>> [name_factor(x, level) for x in (4.0, 8.0, 24.0, 1 / 8, 5.0)]
    ['dp', 'dp x accumulation', 'global batch', '1/(dp x accumulation)', None]

    Args:
        factor: What to name.
        level: The settings. Those that are 1 are left out: they change nothing.
        tolerance: Largest relative distance.

    Returns:
        The name; several joined by " or " where settings are equal; None if there is none.
    """
    settings = {
        name: value
        for name, value in (
            ("dp", level.dp),
            ("accumulation", level.accumulation),
            ("micro-batch", level.micro_batch),
        )
        if value > 1
    }
    names = []
    for count in range(1, len(settings) + 1):
        for chosen in itertools.combinations(settings, count):
            product = 1
            for name in chosen:
                product *= settings[name]
            whole = 1 < count == len(settings) and "micro-batch" in chosen
            name = "global batch" if whole else " x ".join(chosen)
            if _is_near(factor, product, tolerance):
                names.append(name)
            if _is_near(factor, 1 / product, tolerance):
                names.append(f"1/({name})" if " " in name else f"1/{name}")
    return " or ".join(names) or None


def checksum(values: Tensor | None) -> int:
    """Returns a number that differs where any one element differs in any bit.

    Each element's bits and place are mixed one-to-one into 64 bits, and these are summed
    modulo 2**64. Where several elements differ, two sums are equal by chance once in 2**64.
    """
    if values is None:
        return 0
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = values.detach().contiguous().flatten()
    bits = flat.view(kinds[flat.element_size()])
    total = 1
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64, copy=True)
        place = torch.arange(begin, begin + len(part), device=part.device)
        total += int(_mix_(_mix_(part).add_(place.mul_(_ODD[0]))).sum())
    return (total + 2**63) % 2**64 - 2**63


def some(names: Sequence[str]) -> str:
    """Names one, and counts the rest."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _mix_(x: Tensor) -> Tensor:
    """Maps 64-bit integers, in place and one-to-one, to ones that look random."""
    for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
        # Without sign: an arithmetic shift would not be one-to-one.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(odd)
    return x


def _both(gradient: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns two gradients as real numbers of 32 bits or more, zeros for None."""
    a, b = (None if g is None else _plain(g) for g in (gradient, expected))
    if a is None:
        assert b is not None
        return torch.zeros_like(b), b
    return a, torch.zeros_like(a) if b is None else b


def _plain(values: Tensor) -> Tensor:
    values = values.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _is_near(value: float, target: float, tolerance: float) -> bool:
    return abs(value - target) <= tolerance * abs(target)

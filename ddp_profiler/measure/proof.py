"""The batch proof: a level's gradients against one process that sees the whole global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_profiler.measure.backward import number_of_samples
from ddp_profiler.schema import BatchProof, LevelSettings
from ddp_profiler.workload import Workload

_TOLERANCE = 1e-3
"""Relative: how near a factor lies to what it is named after, and what counts as rounding."""
_NOISE = 1e-5
"""Gradients below this share of the largest one are taken for rounding."""
_CHUNK = 1 << 16
"""Elements that a checksum takes at a time, so that they stay in the cache."""
_BACKENDS: Any = torch.backends
_PRECISIONS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
)
"""What may compute fp32 in tf32 or bf16."""

_UNEXPLAINED = (
    "The gradients differ by more than rounding and by more than a factor. So it is where the "
    "loss is not the mean over samples (a mean over unmasked tokens, for example), or where "
    "samples of a micro-batch influence each other."
)

Gradients = Mapping[str, Tensor | None]
"""Gradients by the parameter's name; None where it has none."""


class BatchSource(Protocol):
    """Gives this rank's micro-batches, on its device."""

    def next(self) -> Any:
        """Returns the next micro-batch."""
        ...


def prove_batch(
    ddp: DDP,
    workload: Workload,
    batches: BatchSource,
    level: LevelSettings,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    scale_loss: Callable[[Tensor], Tensor],
    budget_s: float = 20.0,
    time_per_micro_step_s: float | None = None,
) -> BatchProof:
    """Compares the gradients of one step with those of one process that sees the global batch.

    All ranks of the level call it together. Each takes its next micro-batches and runs the
    forward and backward passes of one step as the measured loop does, in fp32 with tf32 off
    and without the optimizer. The level's first rank then computes the gradient of the
    workload's loss over all ranks' micro-batches at once, without DDP, without accumulation
    and without ``scale_loss``, so that it knows nothing of how the loop divides.

    Leaves parameters, buffers and torch's random numbers as they were; gradients are None
    afterwards, also those of modules outside DDP, which are not compared. What a model keeps
    in attributes of its own is not restored.

    Args:
        ddp: The wrapped model, after its measured blocks.
        workload: Gives inputs and loss.
        batches: Where this rank's micro-batches come from.
        level: The settings in force.
        group: The level's process group.
        device: Where the model lives.
        scale_loss: What the loop does to a micro-step's loss before backward.
        budget_s: Longest time in s for the one process; above it, that is left out.
        time_per_micro_step_s: What a micro-step took in s, to estimate that time by; the
            slowest rank's counts. No limit where it is None.

    Returns:
        The proof, the same on all ranks.
    """
    modules = _modules(ddp, workload)
    with _full_precision(device):
        with _random_kept(device):
            own = [batches.next() for _ in range(level.accumulation)]
        with state_kept(modules, device):
            samples = _step(ddp, workload, own, scale_loss)
            gradients = {name: parameter.grad for name, parameter in _reduced(ddp)}
        ranks_agree, notes = _compare_ranks(gradients, level, group, device)
        notes += _caveats(modules, level)
        alone_s = _slowest(time_per_micro_step_s or 0.0, level, group, device)
        alone_s *= level.accumulation * level.dp
        if alone_s > budget_s:
            notes.append(
                f"Not compared with one process: it would take about {alone_s:.0f} s for the "
                f"whole global batch, more than the {budget_s:.0f} s allowed."
            )
            return BatchProof(ranks_agree, None, None, None, None, tuple(notes))
        proof = _ask_first_rank(
            lambda shares: _against_one_process(ddp, workload, gradients, shares, level, device),
            _Share(to_device(own, torch.device("cpu")), samples),
            level,
            group,
        )
    return dataclasses.replace(
        proof, ranks_agree=ranks_agree, notes=tuple(dict.fromkeys((*notes, *proof.notes)))
    )


@contextlib.contextmanager
def state_kept(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Restores buffers and random numbers at the end, and removes gradients before and after."""
    modules = tuple(modules)
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for top in modules
        for module in top.modules()
        for name, buffer in module._buffers.items()
    ]
    _remove_gradients(modules)
    try:
        with _random_kept(device):
            yield
    finally:
        _remove_gradients(modules)
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                # Forward may have put another tensor in its place.
                module._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)


@contextlib.contextmanager
def alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Runs a model on one rank while the others wait: a collective raises instead of hanging.

    Synchronised batch norm normalises over the samples that are there.

    Raises:
        RuntimeError: The model issues a collective.
    """
    synchronised = [
        module
        for top in modules
        for module in top.modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    for module in synchronised:
        # An attribute of the instance goes before the class's method.
        module.__dict__["forward"] = functools.partial(_BatchNorm.forward, module)
    try:
        with _NoCollectives():  # type: ignore[no-untyped-call]
            yield
    finally:
        for module in synchronised:
            del module.__dict__["forward"]


def compare_gradients(
    gradients: Gradients,
    reference: Gradients,
    level: LevelSettings,
    *,
    must_be_equal: bool = True,
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
            f"The gradient of {_some(noisy)} is below {_NOISE:g} of the largest one, so rounding; "
            "its error is given as a share of the largest."
        )
    products = [
        (_dot(gradient, expected), _dot(expected, expected)) for _, gradient, expected in pairs
    ]
    factor = sum(p for p, _ in products) / sum(q for _, q in products)
    # Types with fewer digits round by more.
    eps = max((torch.finfo(g.dtype).eps for g in gradients.values() if g is not None), default=0)
    tolerance, rounding = max(_TOLERANCE, 4 * eps), max(_TOLERANCE, 16 * eps)
    if abs(factor - 1) <= tolerance:
        if error > rounding and must_be_equal:
            notes.append(_UNEXPLAINED)
        return BatchProof(None, error, worst_tensor, factor, None, tuple(notes))
    residual = worst(factor)[0] if factor else 1.0
    factor_name = None
    if residual > rounding:
        notes += [_UNEXPLAINED] if must_be_equal else []
    else:
        factor_name = name_factor(factor, level, tolerance)
        if factor_name is None:
            notes.append("The factor between the gradients is no product of the settings.")
        elif _is_near(factor, 1 / (level.dp * level.accumulation), tolerance):
            notes.append(
                "A loss that is the sum over the micro-batch's samples instead of the mean has "
                "this factor."
            )
    return BatchProof(None, error, worst_tensor, factor, factor_name, tuple(notes))


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


_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The odd numbers of SplitMix64 (Steele, Lea, Flood 2014) as signed integers."""


def _mix_(x: Tensor) -> Tensor:
    """Maps 64-bit integers, in place and one-to-one, to ones that look random."""
    for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
        # Without sign: an arithmetic shift would not be one-to-one.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(odd)
    return x


@dataclass(frozen=True)
class _Share:
    """What one rank contributes: its micro-batches and how many samples each has."""

    micro_batches: list[Any]
    samples: list[int | None]


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation talks to other ranks."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(f"the model issues a collective of its own ({func})")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Computes fp32 as fp32: without autocast, and without tf32 or bf16 inside products."""
    before = [setting.fp32_precision for setting in _PRECISIONS]
    try:
        for setting in _PRECISIONS:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, value in zip(_PRECISIONS, before, strict=True):
            setting.fp32_precision = value


def _random_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    kept: contextlib.AbstractContextManager[None] = torch.random.fork_rng(
        devices=[device] if device.type == "cuda" else []
    )
    return kept


def _remove_gradients(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def _modules(ddp: DDP, workload: Workload) -> tuple[nn.Module, ...]:
    return (ddp.module, *workload.extra_modules)


def _reduced(ddp: DDP) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that DDP reduces, each once."""
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def _step(
    ddp: DDP,
    workload: Workload,
    micro_batches: Sequence[Any],
    scale_loss: Callable[[Tensor], Tensor],
) -> list[int | None]:
    """Runs the passes of one step as the loop does and returns the samples of its micro-steps."""
    samples = []
    for micro_step, batch in enumerate(micro_batches):
        last = micro_step == len(micro_batches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            inputs = workload.inputs(batch)
            scale_loss(workload.loss(ddp(*inputs), batch)).backward()  # type: ignore[no-untyped-call]
        samples.append(number_of_samples(inputs))
    return samples


def _compare_ranks(
    gradients: Gradients, level: LevelSettings, group: dist.ProcessGroup, device: torch.device
) -> tuple[bool, list[str]]:
    """Tells whether all ranks hold the same gradients bit for bit, and which differ."""
    if level.dp == 1:
        return True, []
    own = torch.tensor([checksum(g) for g in gradients.values()], device=_comm(group, device))
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    differ = (least != most).tolist()
    names = [name for name, differs in zip(gradients, differ, strict=True) if differs]
    if not names:
        return True, []
    return False, [f"Reduced gradients differ between ranks: {_some(names)}."]


def _slowest(
    seconds: float, level: LevelSettings, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Returns the largest value of all ranks, so that all decide alike."""
    if level.dp == 1:
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64, device=_comm(group, device))
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value)


def _comm(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _caveats(modules: Iterable[nn.Module], level: LevelSettings) -> list[str]:
    """Tells why the gradients of one process need not be those of the level."""
    if level.dp * level.accumulation == 1:
        return []  # The one process sees the same samples from the same state.
    inside = [module for top in modules for module in top.modules()]
    norms = [m for m in inside if isinstance(m, _BatchNorm) and _uses_batch(m)]
    notes = []
    if any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        notes.append(
            "BatchNorm in training mode normalises over each rank's own micro-batch: gradients "
            "need not equal those of one process."
        )
    elif norms and level.accumulation > 1:
        notes.append(
            "Synchronised BatchNorm normalises over one micro-step: with accumulation, gradients "
            "need not equal those of one process."
        )
    if any(module.training and _drops(module) for module in inside):
        notes.append(
            "Dropout modules are active: ranks and micro-steps draw their own numbers, and "
            "gradients need not equal those of one process."
        )
    return notes


def _uses_batch(norm: _BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _drops(module: nn.Module) -> bool:
    # Recurrent and attention modules have a probability of their own.
    p = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(p, (int, float)) and p > 0


def _ask_first_rank(
    question: Callable[[list[_Share]], BatchProof],
    own: _Share,
    level: LevelSettings,
    group: dist.ProcessGroup,
) -> BatchProof:
    """Has the level's first rank answer with what all ranks contribute, and tells all."""
    if level.dp == 1:
        return _answer(question, [own])
    first = level.ranks[0]
    leads = dist.get_rank() == first
    try:
        packed: bytes | None = pickle.dumps(own)
    except Exception:  # A batch may hold anything; the others must not be left waiting.
        packed = None
    shares: list[Any] | None = [None] * level.dp if leads else None
    dist.gather_object(packed, shares, dst=first, group=group)
    answer: list[Any] = [_answer(question, shares)] if shares is not None else [None]
    dist.broadcast_object_list(answer, src=first, group=group)
    proof: BatchProof = answer[0]
    return proof


def _answer(
    question: Callable[[list[_Share]], BatchProof], shares: Sequence[_Share | bytes | None]
) -> BatchProof:
    """Answers in any case, since the other ranks wait for it."""
    try:
        unpacked = [pickle.loads(s) if isinstance(s, bytes) else s for s in shares]
        known = [share for share in unpacked if share is not None]
        if len(known) < len(shares):
            raise ValueError("the micro-batches of a rank cannot be pickled")
        return question(known)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        note = f"Not compared with one process: {type(error).__name__}: {text}"
        return BatchProof(None, None, None, None, None, (note,))


def _against_one_process(
    ddp: DDP,
    workload: Workload,
    gradients: Gradients,
    shares: Sequence[_Share],
    level: LevelSettings,
    device: torch.device,
) -> BatchProof:
    """Computes the gradient of the whole global batch on this rank and compares."""
    modules = _modules(ddp, workload)
    micro_batches = [batch for share in shares for batch in share.micro_batches]
    samples = [number for share in shares for number in share.samples]
    parameters = dict(_reduced(ddp))
    notes = []
    uneven = len(set(samples)) > 1
    if uneven:
        notes.append(
            f"Micro-batches have from {min(s or 0 for s in samples)} to "
            f"{max(s or 0 for s in samples)} samples: the mean of their means need not be the "
            "mean over samples."
        )

    def gradient(batch: Any) -> list[Tensor | None]:
        with state_kept(modules, device), alone(modules):
            batch = to_device(batch, device)
            loss = workload.loss(ddp.module(*workload.inputs(batch)), batch)
            # Not backward(): that would run DDP's hooks.
            return list(torch.autograd.grad(loss, [*parameters.values()], allow_unused=True))

    whole = concatenate(micro_batches)
    try:
        found = gradient(whole)
        out_of_memory = False
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(
            error
        )
        if not out_of_memory or len(micro_batches) == 1:
            raise
    if out_of_memory:
        # Outside the handler, which would hold on to what the attempt allocated.
        notes.append(
            "One process has too little memory for the whole global batch at once: it took the "
            "mean over micro-batches, one after the other."
        )
        weights = [float(s or 1) for s in samples]
        found = _mean((gradient(batch) for batch in micro_batches), weights)
    must_be_equal = not uneven and not _caveats(modules, level)
    proof = compare_gradients(
        gradients,
        dict(zip(parameters, found, strict=True)),
        level,
        must_be_equal=must_be_equal,
    )
    return dataclasses.replace(proof, notes=(*notes, *proof.notes), must_be_equal=must_be_equal)


def _mean(parts: Iterable[list[Tensor | None]], weights: Sequence[float]) -> list[Tensor | None]:
    """Returns the weighted mean of gradients that come one after the other; None counts as 0."""
    total: dict[int, Tensor] = {}
    count = 0
    for part, weight in zip(parts, weights, strict=True):
        count = len(part)
        for index, values in enumerate(part):
            if values is not None:
                share = values * (weight / sum(weights))
                total[index] = total[index] + share if index in total else share
    return [total.get(index) for index in range(count)]


def concatenate(batches: Sequence[Any]) -> Any:
    """Concatenates nested batches along their first dimension, that of the samples.

    >>> concatenate([{"x": torch.ones(1), "name": ["a"]}, {"x": torch.zeros(2), "name": ["b"]}])
    {'x': tensor([1., 0., 0.]), 'name': ['a', 'b']}

    Raises:
        ValueError: Something in the batches has no samples to concatenate and differs.
    """
    first = batches[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: concatenate([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        if not any(isinstance(item, (Tensor, dict, tuple, list)) for item in first):
            # One text or number for each sample.
            return [item for batch in batches for item in batch]
        parts = [concatenate(items) for items in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if all(bool(batch == first) for batch in batches[1:]):
        return first
    raise ValueError(f"micro-batches that hold a {type(first).__name__} cannot be concatenated")


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a nested batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


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


def _some(names: Sequence[str]) -> str:
    """Names one, and counts the rest."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

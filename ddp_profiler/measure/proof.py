"""The batch proof: a level's gradients against one process that sees the whole global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_profiler.measure.batches import concatenate, number_of_samples, to_device
from ddp_profiler.measure.gradients import Gradients, checksum, compare_gradients, some
from ddp_profiler.measure.isolation import alone, full_precision, random_kept, state_kept
from ddp_profiler.measure.memory import is_out_of_memory
from ddp_profiler.schema import BatchProof, LevelSettings
from ddp_profiler.workload import Workload


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
    syncs: Callable[[int], bool] | None = None,
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
        syncs: Whether gradients are reduced in a micro-step; in the last one only if None.
        budget_s: Longest time in s for the one process; above it, that is left out.
        time_per_micro_step_s: What a micro-step took in s, to estimate that time by; the
            slowest rank's counts. No limit where it is None.

    Returns:
        The proof, the same on all ranks.
    """
    modules = _modules(ddp, workload)
    with full_precision(device):
        with random_kept(device):
            own = [batches.next() for _ in range(level.accumulation)]
        with state_kept(modules, device):
            last = level.accumulation - 1
            samples = _step(ddp, workload, own, scale_loss, syncs or (lambda m: m == last))
            gradients = {name: parameter.grad for name, parameter in _reduced(ddp)}
        ranks_agree, notes = _compare_ranks(gradients, level, group, device)
        notes += caveats(modules, level)
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


@dataclass(frozen=True)
class _Share:
    """What one rank contributes: its micro-batches and how many samples each has."""

    micro_batches: list[Any]
    samples: list[int | None]


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
    syncs: Callable[[int], bool],
) -> list[int | None]:
    """Runs the passes of one step as the loop does and returns the samples of its micro-steps."""
    samples = []
    for micro_step, batch in enumerate(micro_batches):
        with contextlib.nullcontext() if syncs(micro_step) else ddp.no_sync():
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
    return False, [f"Reduced gradients differ between ranks: {some(names)}."]


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


def caveats(modules: Iterable[nn.Module], level: LevelSettings) -> list[str]:
    """Tells why the gradients of one process need not be those of the level.

    Args:
        modules: What is trained; each with all that is inside.
        level: The settings in force.
    """
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


def unevenness(samples: Sequence[int | None]) -> str:
    """Says what unequal numbers of samples in micro-batches mean for the mean."""
    numbers = [number or 0 for number in samples]
    return (
        f"Micro-batches have from {min(numbers)} to {max(numbers)} samples: the mean of their "
        "means need not be the mean over samples."
    )


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
        notes.append(unevenness(samples))

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
    except (RuntimeError, MemoryError) as error:
        out_of_memory = is_out_of_memory(error)
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
    must_be_equal = not uneven and not caveats(modules, level)
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

"""Counts the operations of training, with the bytes that each reads and writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from ddp_profiler.measure.batches import to_device
from ddp_profiler.measure.isolation import alone, state_kept
from ddp_profiler.schema import OperationCount, OperationGroup
from ddp_profiler.workload import Workload

_COPIES_OF_PARAMETERS = 6
"""Copies, their gradients, two states of an optimizer, and what it needs on its way."""

_ONLY_SHAPE = (
    "empty",
    "full_like",
    "new_",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
)
"""Operations that take a tensor for its shape and do not read it."""
_UNWRITTEN = ("empty", "new_empty")
"""Operations that reserve memory and write nothing."""
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")
"""Operations in place that do not read what they write."""
_PICK = ("embedding", "gather", "index", "index_select")
"""Operations that read of their first tensor only what they return."""


def count_operations(
    workload: Workload,
    device: torch.device,
    micro_batch: int,
    autocast: torch.dtype | None = None,
) -> OperationCount | None:
    """Counts the operations of one micro-step and of one step of the optimizer, with their bytes.

    The bytes of an operation are those of the tensors that it reads and that it writes, each once:
    what goes through memory without caches and without fusion. What the operation needs inside
    itself does not count, nor do views, which move nothing. The micro-step is forward, loss and
    backward of the first samples, in the run's precision; the optimizer's step is one on copies of
    the parameters, after a first one in which it makes its state. On one rank alone, apart from
    measured steps; parameters, buffers and random numbers are as before.

    Args:
        workload: Whose modules are on the device.
        device: Where to compute.
        micro_batch: Samples to pass through forward at once.
        autocast: What the run computes in; None without autocast.

    Returns:
        The count; None if the model cannot be run on one rank alone.
    """
    modules = (workload.module, *workload.extra_modules)
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    try:
        micro_step = _of_micro_step(workload, modules, parameters, device, micro_batch, autocast)
    except Exception:
        # A figure beside the others: a model that refuses it still has a study.
        return None
    return OperationCount(micro_batch, micro_step, _of_optimizer(workload, parameters, device))


def _of_micro_step(
    workload: Workload,
    modules: tuple[nn.Module, ...],
    parameters: list[nn.Parameter],
    device: torch.device,
    micro_batch: int,
    autocast: torch.dtype | None,
) -> tuple[OperationGroup, ...]:
    samples = len(workload.dataset)  # type: ignore[arg-type]
    items = [workload.dataset[i % samples] for i in range(micro_batch)]
    with state_kept(modules, device), alone(modules):
        batch = to_device(default_collate(items), device)
        counter = ByteCounter()
        with counter:
            inputs = workload.inputs(batch)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                loss = workload.loss(workload.module(*inputs), batch)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    return counter.groups()


def _of_optimizer(
    workload: Workload, parameters: list[nn.Parameter], device: torch.device
) -> tuple[OperationGroup, ...] | None:
    needed = _COPIES_OF_PARAMETERS * sum(p.nbytes for p in parameters)
    if needed > _free_memory(device) / 2:
        return None
    try:
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        optimizer = workload.optimizer(copies)
        optimizer.step()
        counter = ByteCounter()
        with counter:
            optimizer.step()
    except Exception:
        # An optimizer that closes over the model's own parameters, for example.
        return None
    return counter.groups()


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run inside it, with their bytes and floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._groups: dict[tuple[bool, int], list[int]] = {}
        self._products = FlopCounterMode(display=False)

    def groups(self) -> tuple[OperationGroup, ...]:
        """Returns the operations by kind (products and others) and size, small ones first."""
        return tuple(OperationGroup(*self._groups[key]) for key in sorted(self._groups))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        nbytes = moved_bytes(func, args, kwargs, result)
        if nbytes is not None:
            flops = self._flops(func, args, kwargs, result)
            group = self._groups.setdefault((flops > 0, nbytes.bit_length()), [0, 0, 0])
            for place, value in enumerate((1, nbytes, flops)):
                group[place] += value
        return result

    def _flops(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        formula: Callable[..., int] | None = self._products.flop_registry.get(func.overloadpacket)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def moved_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int | None:
    """Returns the bytes that an operation reads and writes; None where it moves nothing.

    Args:
        func: The operation, as torch dispatches it.
        args: Its arguments by place.
        kwargs: Its arguments by name.
        result: What it returned.
    """
    name = func.overloadpacket.__name__
    if name.startswith(_UNWRITTEN):
        return None
    inputs = list(_arguments(func, args, kwargs))
    known = {_storage(t) for _, tensors in inputs for t in tensors}
    mutated = [t for info, tensors in inputs if info is not None and info.is_write for t in tensors]
    made = [t for t in _tensors(result) if _storage(t) not in known]
    if not mutated and not made:
        return None  # A view, or a question about a tensor.
    read: list[Tensor] = []
    for place, (info, tensors) in enumerate(inputs):
        written = info is not None and info.is_write
        if name.startswith(_ONLY_SHAPE) or (written and _is_overwritten(func, name, info)):
            continue
        if place == 0 and name in _PICK:
            read += made  # As much as it returns.
            continue
        read += tensors
    return sum(map(_nbytes, _distinct(read))) + sum(map(_nbytes, (*_distinct(mutated), *made)))


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yields what the schema says of aliasing for each argument, and its tensors."""
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield argument.alias_info, _tensors(value)


def _is_overwritten(func: Any, name: str, info: Any) -> bool:
    outputs = [a.alias_info for a in func._schema.arguments if a.is_out]
    return name.startswith(_OVERWRITE) or info in outputs


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # Sparse tensors and others without a storage.


def _nbytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; of an expanded one those that there are."""
    try:
        return min(tensor.nbytes, tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return 0

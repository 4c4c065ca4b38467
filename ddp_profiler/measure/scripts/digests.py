"""Digests of gradients and buffers, taken when an optimizer is about to step.

Every rank takes its own; the analysis compares them. So no collective of ours is needed to find
ranks that step with different gradients. They are taken at two steps of the warm-up only, which
no figure is made of, and cost one pass over the gradients each. Those of buffers are also taken
between blocks of steps: some change now and then only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.weak import TensorWeakRef

from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import OptimizedParameter, ParameterPlace, SpanKind

_WORD = 8
_AT_ONCE_BYTES = 1 << 25
"""What is copied at once where memory is not aligned to words."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor, like: Tensor | None = None) -> Tensor | None:
    """Returns a digest of a tensor's bits: their sum as 64-bit words, modulo 2**64.

    Equal values have equal digests wherever they lie in memory; NaN is a value as any other.
    It reads the tensor once and changes nothing.

    Args:
        tensor: Dense or sparse (COO), of any type and device.
        like: The tensor whose layout counts, such as the parameter of a gradient; itself if None.

    Returns:
        An int64 scalar on the tensor's device; None for tensors of other layouts or classes.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        # Such as a distributed tensor, of which each rank holds a part.
        return None
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return _sum_of_words(tensor._values()) + _sum_of_words(tensor._indices())
        if tensor.layout is not torch.strided:
            return None
        if like is not None and like.shape == tensor.shape and like.stride() != tensor.stride():
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        return _sum_of_words(tensor)


def _sum_of_words(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    elif _is_dense(tensor):
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    else:
        flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if size > _WORD:
        return total + flat.view(torch.int64).sum()
    per_word = _WORD // size
    words = flat.numel() // per_word * per_word
    if words != flat.numel():
        total = total + flat[words:].view(_INTEGERS[size]).sum(dtype=torch.int64)
    # As words it is many times as fast as element by element.
    if flat.storage_offset() % per_word == 0:
        return total + flat[:words].view(torch.int64).sum()
    for part in torch.split(flat[:words], _AT_ONCE_BYTES // size):
        total = total + part.clone().view(torch.int64).sum()
    return total


def _is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor fills one stretch of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class _Point:
    """A digest that is still on its device."""

    kind: SpanKind
    index: int
    nbytes: int | None
    value: Tensor


class Digests:
    """Takes digests at the second and the last step of the warm-up.

    With a warm-up of two steps these are both. A step that no optimizer makes, such as one that
    a scaler skips, is made up for by the next one of the warm-up.

    Args:
        recorder: Takes the points.
        warmup: Steps of the warm-up.
        ddps: Tells the models so far by their numbers; more may come, and some go.
        reduced: Tells the parameters that they reduce, by name.
    """

    def __init__(
        self,
        recorder: Recorder,
        warmup: int,
        ddps: Callable[[], Mapping[int, DDP]],
        reduced: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        self._recorder = recorder
        self._ddps = ddps
        self._reduced = reduced
        self._last = warmup - 1
        self._due = sorted({max(min(1, warmup - 2), 0), warmup - 1}) if warmup > 0 else []
        self._step = -1
        self._seen: set[int] = set()
        self._others: dict[int, tuple[str, ParameterPlace]] = {}
        """Of this step: names and places of parameters that a DDP holds and does not reduce."""
        self._ordinals: dict[int, tuple[int, TensorWeakRef]] = {}
        """By a parameter's id, with the parameter, whose id another may have when it is gone."""
        self._parameters: list[OptimizedParameter] = []

    @property
    def parameters(self) -> tuple[OptimizedParameter, ...]:
        """The parameters by their ordinals: what DDP reduces first, then others, as they came."""
        return tuple(self._parameters)

    def wanted(self, step: int) -> bool:
        """Tells whether digests are taken when an optimizer steps in this step."""
        if step == self._step:
            return True
        if not self._due or not self._due[0] <= step <= self._last or self._recorder.step != step:
            return False
        return self._has_peers()

    def _has_peers(self) -> bool:
        return any(ddp.process_group.size() > 1 for ddp in self._ddps().values())

    def between_blocks(self, step: int) -> None:
        """Takes the digests of the buffers between two blocks, so in the time of no step.

        Args:
            step: The step that begins next.
        """
        if self._has_peers():
            self._recorder.begin_micro_step(step, -1)
            self._record(list(self._buffers()))

    def take(self, optimizer: Any, step: int) -> None:
        """Takes the digests of an optimizer's gradients, and once a step those of the buffers.

        Args:
            optimizer: It is about to step; what another has digested in this step is left out.
            step: The step, for which digests are :meth:`wanted`.
        """
        points: list[_Point] = []
        if step != self._step:
            self._step, self._seen = step, set()
            self._due = [due for due in self._due if due > step]
            places = self._places()
            for name, parameter in self._reduced().items():
                place = places.get(id(parameter), (ParameterPlace.OUTSIDE, -1))
                self._enter(parameter, name, *place)
            self._others = self._unreduced()
            points += self._buffers()
        points += self._gradients(optimizer)
        self._record(points)

    def _record(self, points: Sequence[_Point]) -> None:
        values = _told(points)
        mark = self._recorder.mark()
        for point, value in zip(points, values, strict=True):
            self._recorder.span(
                point.kind, mark, mark, index=point.index, nbytes=point.nbytes, value=value
            )

    def _gradients(self, optimizer: Any) -> Iterator[_Point]:
        nothing = torch.zeros((), dtype=torch.int64)
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names", ())
            for place, parameter in enumerate(group["params"]):
                shape = "x".join(str(size) for size in parameter.shape) or "scalar"
                name = f"{type(optimizer).__name__} group {number} parameter {place} ({shape})"
                ordinal = self._ordinal(parameter, names[place] if place < len(names) else name)
                if ordinal in self._seen:
                    continue
                self._seen.add(ordinal)
                gradient = parameter.grad
                value = nothing if gradient is None else _tried(gradient, parameter)
                if value is not None:
                    yield _Point(SpanKind.GRADIENT_DIGEST, ordinal, parameter.nbytes, value)

    def _buffers(self) -> Iterator[_Point]:
        for number, ddp in self._ddps().items():
            values = [_tried(buffer) for buffer in getattr(ddp, "modules_buffers", ())]
            known = [value for value in values if value is not None]
            if not known or len(known) < len(values):
                continue
            # Each with a factor of its own: two that swap their values are seen.
            each = [v.to(known[0].device) * (2 * i + 1) for i, v in enumerate(known)]
            yield _Point(SpanKind.BUFFER_DIGEST, number, None, torch.stack(each).sum())

    def _ordinal(self, parameter: nn.Parameter, name: str) -> int:
        known = self._known(parameter)
        if known is not None:
            return known
        other = self._others.get(id(parameter), (name, ParameterPlace.OUTSIDE))
        return self._enter(parameter, *other)

    def _known(self, parameter: nn.Parameter) -> int | None:
        ordinal, same = self._ordinals.get(id(parameter), (None, lambda: None))
        return ordinal if same() is parameter else None

    def _enter(
        self, parameter: nn.Parameter, name: str, place: ParameterPlace, ddp: int = -1
    ) -> int:
        ordinal = self._known(parameter)
        if ordinal is None:
            ordinal = len(self._parameters)
            self._parameters.append(OptimizedParameter(name, place, ddp))
            self._ordinals[id(parameter)] = ordinal, TensorWeakRef(parameter)
        return ordinal

    def _unreduced(self) -> dict[int, tuple[str, ParameterPlace]]:
        """Returns name and place of all parameters in DDPs, for those that none reduces."""
        found: dict[int, tuple[str, ParameterPlace]] = {}
        for ddp in self._ddps().values():
            ignored = set(getattr(ddp, "parameters_to_ignore", ()))
            for name, parameter in ddp.module.named_parameters():
                place = ParameterPlace.IGNORED if name in ignored else ParameterPlace.FROZEN
                found.setdefault(id(parameter), (name, place))
        return found

    def _places(self) -> dict[int, tuple[ParameterPlace, int]]:
        """Returns which DDP holds each parameter, and whether that reduces over all ranks."""
        world = torch.distributed.get_world_size()
        found: dict[int, tuple[ParameterPlace, int]] = {}
        for number, ddp in self._ddps().items():
            whole = ddp.process_group.size() == world
            place = ParameterPlace.REDUCED if whole else ParameterPlace.SUBGROUP
            for parameter in ddp.module.parameters():
                found.setdefault(id(parameter), (place, number))
        return found


def _tried(tensor: Tensor, like: Tensor | None = None) -> Tensor | None:
    """Returns the digest; None where this tensor has none."""
    try:
        return digest(tensor, like)
    except (RuntimeError, NotImplementedError, TypeError):
        # A layout or type that torch cannot read so: never at the cost of the training.
        return None


def _told(points: Sequence[_Point]) -> list[int]:
    """Reads the values of all points: each device is waited for once."""
    values = [0] * len(points)
    by_device: dict[torch.device, list[int]] = {}
    for number, point in enumerate(points):
        by_device.setdefault(point.value.device, []).append(number)
    for numbers in by_device.values():
        told = torch.stack([points[number].value for number in numbers]).tolist()
        for number, value in zip(numbers, told, strict=True):
            values[number] = int(value)
    return values

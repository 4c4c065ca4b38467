"""The built-in model whose times are known: its layers sleep instead of computing.

So the cores stay free for communication, and what a profiler should find can be written
down beforehand. Its gradients are real and depend on the samples.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ddp_profiler.workload.catalog import TimedOptions
from ddp_profiler.workload.data import synthetic_pairs
from ddp_profiler.workload.definition import Workload
from ddp_profiler.workload.losses import mean_squared_error
from ddp_profiler.workload.pacing import Pacer, Schedule

# Below what torch shares out among threads, which would then spin while the layer sleeps.
_SERIAL_ELEMENTS = 16384


_SCHEDULE_NOTE = (
    "The timed layers keep to a schedule, which hides the cost of measuring; "
    "timed:pace=layer shows it."
)


class _AddNumber(torch.autograd.Function):
    """Returns x + scale * sum(weight); takes a set time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TimedLayer) -> Tensor:
        ctx.layer = layer
        ctx.weight_shape = weight.shape
        ctx.weight_dtype = weight.dtype
        number = torch.stack([part.sum() for part in _serial_parts(weight)]).sum()
        y: Tensor = x + (number * layer.scale).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: TimedLayer = ctx.layer
        begin = layer.backward_pacer.begin()
        value = (upstream.sum() * layer.scale).to(ctx.weight_dtype)
        gradient = value.new_empty(ctx.weight_shape)
        for part in _serial_parts(gradient):
            part.copy_(value)
        layer.backward_pacer.finish(layer.backward_s, begin)
        return upstream, gradient, None


def _serial_parts(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values, _SERIAL_ELEMENTS)


class TimedLayer(nn.Module):
    """A layer that takes a set time in forward and backward, and adds a number to x.

    The number is the sum of the weights over the root of how many they are, so that a
    step of gradient descent changes it by as much at any size. The little computing comes
    before the sleep and counts as part of the time: after a sleep the caches are cold, and
    even one small operation takes 0.1 to 0.2 ms.

    Args:
        options: Gives the number of parameters and buffer elements.
        forward_ms: Forward time in ms.
        backward_ms: Backward time in ms.
        forward_pacer: Makes forward times exact in the mean. Layers share one, so that a
            late end is made up for by the next layer, and in the same phase.
        backward_pacer: The same for backward times.
    """

    def __init__(
        self,
        options: TimedOptions,
        forward_ms: float,
        backward_ms: float,
        forward_pacer: Pacer | Schedule,
        backward_pacer: Pacer | Schedule,
    ) -> None:
        super().__init__()
        self.forward_s = forward_ms / 1000
        self.backward_s = backward_ms / 1000
        self.forward_pacer = forward_pacer
        self.backward_pacer = backward_pacer
        self.scale = options.parameters**-0.5
        self.weight = nn.Parameter(torch.randn(options.parameters) * 0.02)
        if options.buffers:
            self.register_buffer("buffer", torch.zeros(options.buffers))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` plus the layer's number."""
        begin = self.forward_pacer.begin()
        y: Tensor = _AddNumber.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        self.forward_pacer.finish(self.forward_s, begin)
        return y


def build(name: str, options: TimedOptions, *, seed: int) -> Workload:
    """Builds a model of sleeping layers, with an encoder outside DDP where one is asked for."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    pace = Schedule if options.pace == "schedule" else Pacer
    forward_pacer, backward_pacer = pace(), pace()
    layers = (
        TimedLayer(options, options.forward_ms, options.backward_ms, forward_pacer, backward_pacer)
        for _ in range(options.layers)
    )
    module = nn.Sequential(*layers).to(dtype)
    encoder: nn.Module | None = None
    if options.outside_backward_ms > 0:
        encoder = TimedLayer(options, 0, options.outside_backward_ms, pace(), pace()).to(dtype)

    def inputs(batch: Any) -> tuple[Any, ...]:
        x = batch[0]
        return (x if encoder is None else encoder(x),)

    # All layers move the output in the same direction: their steps add up.
    rate = 0.1 / options.layers
    return Workload(
        name=name,
        module=module,
        dataset=synthetic_pairs(seed, dtype=dtype),
        inputs=inputs,
        loss=lambda output, batch: mean_squared_error(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        options=asdict(options),
        extra_modules=() if encoder is None else (encoder,),
        notes=(_SCHEDULE_NOTE,) if options.pace == "schedule" else (),
    )

"""The built-in convolutional network; its batch norm has buffers, which DDP broadcasts."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from ddp_profiler.workload.catalog import ConvnetOptions
from ddp_profiler.workload.data import synthetic_classes
from ddp_profiler.workload.definition import Workload
from ddp_profiler.workload.losses import mean_cross_entropy

_IMAGE = (3, 32, 32)
_STAGES = 3


def build(name: str, options: ConvnetOptions, *, seed: int) -> Workload:
    """Builds a convolutional network on synthetic images of 32 x 32 pixels."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    layers: list[nn.Module] = []
    channels = _IMAGE[0]
    for stage in range(_STAGES):
        width = options.width * 2**stage
        layers += [*_convolution(channels, width), *_convolution(width, width), nn.MaxPool2d(2)]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, options.classes)]
    return Workload(
        name=name,
        module=nn.Sequential(*layers).to(dtype),
        dataset=synthetic_classes(seed, shape=_IMAGE, classes=options.classes, dtype=dtype),
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: mean_cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        options=asdict(options),
    )


def _convolution(channels: int, width: int) -> tuple[nn.Module, ...]:
    # No bias: batch norm would take it out again.
    convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(width), nn.ReLU()

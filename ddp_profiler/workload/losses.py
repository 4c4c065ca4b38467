"""Losses of the built-in models: means over samples, computed in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy in nats, as the mean over all targets.

    Args:
        logits: [sample, ..., class].
        targets: [sample, ...], classes as whole numbers.
    """
    return functional.cross_entropy(_at_least_float32(logits).flatten(0, -2), targets.flatten())


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared difference as the mean over all elements of [sample, ...]."""
    return functional.mse_loss(_at_least_float32(outputs), _at_least_float32(targets))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))

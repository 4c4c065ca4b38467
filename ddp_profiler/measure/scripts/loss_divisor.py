"""What a loss was divided by just before backward, as far as autograd shows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_DEPTH = 4
"""Divisions and multiplications one after the other that are followed."""


def loss_divisor(root: Tensor, *, scaled: bool = False) -> float | None:
    """Returns the number that a loss was divided by last, several multiplied.

    >>> import torch
    >>> loss = torch.ones(2, requires_grad=True).sum()
    >>> loss_divisor(loss / 4), loss_divisor(0.5 * loss), loss_divisor(loss)
    (4.0, 2.0, None)

    Only numbers in host memory are read, so that no device is waited for.

    Args:
        root: What backward is called on.
        scaled: Whether a GradScaler has multiplied it by its scale, which does not count.

    Returns:
        The divisor; None where autograd shows none.
    """
    try:
        return _divisor(root.grad_fn, scaled)
    except (AttributeError, RuntimeError):
        return None  # Another version of torch, or values that are gone already.


def _divisor(node: Any, scaled: bool) -> float | None:
    divisor = None
    for _ in range(_DEPTH):
        name = node.name() if node is not None else ""
        if name not in ("DivBackward0", "MulBackward0"):
            break
        constants = [place for place, (source, _) in enumerate(node.next_functions) if not source]
        multiplies = name == "MulBackward0"
        if len(constants) != 1 or not (multiplies or constants == [1]):
            break
        value = node._saved_self if constants == [0] else node._saved_other
        node = node.next_functions[1 - constants[0]][0]
        if multiplies and scaled:
            scaled = False
            continue
        if value is None or value.numel() != 1 or value.device.type != "cpu" or not float(value):
            break
        divisor = (divisor or 1.0) * (1 / float(value) if multiplies else float(value))
    return divisor

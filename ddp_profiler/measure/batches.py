"""Micro-batches: where they come from, and what is done to nested ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ddp_profiler.errors import UsageError
from ddp_profiler.schema import LevelSettings
from ddp_profiler.workload import Workload


def check_data(workload: Workload, level: LevelSettings) -> None:
    """Checks that the data is enough for a micro-step of a level.

    Raises:
        UsageError: It is not.
    """
    samples = len(workload.dataset)  # type: ignore[arg-type]
    needed = level.dp * level.micro_batch
    if samples < needed:
        raise UsageError(
            f"The data has {samples} samples; one micro-step at dp {level.dp} with "
            f"micro-batch {level.micro_batch} needs {needed}.",
            "Give more data, or lower --micro-batch.",
        )


class Batches:
    """Endless micro-batches of one rank, epoch after epoch, each rank its own share.

    Args:
        workload: Gives the samples.
        level: Gives dp and micro-batch.
        group_rank: This rank's place among the level's replicas.
        seed: Order of the samples.
        device: Where batches are moved to.

    Raises:
        UsageError: The data has fewer samples than one step needs.
    """

    def __init__(
        self,
        workload: Workload,
        level: LevelSettings,
        group_rank: int,
        seed: int,
        device: torch.device,
    ) -> None:
        check_data(workload, level)
        self._device = device
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            workload.dataset, num_replicas=level.dp, rank=group_rank, seed=seed, drop_last=True
        )
        self._loader: DataLoader[Any] = DataLoader(
            workload.dataset,
            batch_size=level.micro_batch,
            sampler=self._sampler,
            drop_last=True,
            pin_memory=device.type == "cuda",
        )
        self._stream = self._forever()

    def _forever(self) -> Iterator[Any]:
        epoch = 0
        while True:
            self._sampler.set_epoch(epoch)
            yield from self._loader
            epoch += 1

    def next(self) -> Any:
        """Returns the next micro-batch on the device."""
        return to_device(next(self._stream), self._device, non_blocking=True)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Returns a nested batch with its tensors on a device.

    Args:
        batch: Tensors in dictionaries, tuples and lists; anything else stays as it is.
        device: Where to.
        non_blocking: Whether copies from pinned memory to a GPU may still run on return.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, dict):
        return {
            key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        parts = [to_device(value, device, non_blocking=non_blocking) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def concatenate(batches: Sequence[Any]) -> Any:
    """Concatenates nested batches along their first dimension, that of the samples.

    >>> concatenate([{"x": torch.ones(1), "name": ["a"]}, {"x": torch.zeros(2), "name": ["b"]}])
    {'x': tensor([1., 0., 0.]), 'name': ['a', 'b']}

    Args:
        batches: At least one; all nested alike.

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


def number_of_samples(inputs: object, dimension: int = 0) -> int | None:
    """Returns the size of the first tensor in forward's inputs; None without one.

    Args:
        inputs: Tensors in dictionaries, tuples and lists.
        dimension: The dimension of that tensor that counts samples.
    """
    if isinstance(inputs, Tensor):
        return int(inputs.shape[dimension]) if inputs.dim() > dimension else None
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, (tuple, list)):
        for item in inputs:
            found = number_of_samples(item, dimension)
            if found is not None:
                return found
    return None

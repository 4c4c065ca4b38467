"""Data sets of the built-in models: text as bytes, and synthetic samples."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_profiler.errors import InputError

POOL_SAMPLES = 1024
SYNTHETIC_SAMPLES = 1_048_576


class PooledDataset(Dataset[Any]):
    """Samples that are drawn from a small pool over and over: sample i is i modulo pool.

    So an epoch is long, memory is small, and every sample costs the same.

    Args:
        pool: Tensors of shape [pool, ...], one for each element of a sample. A sample of
            one tensor is that tensor's row, else a tuple of rows.
        length: Number of samples.
    """

    def __init__(self, *pool: Tensor, length: int = SYNTHETIC_SAMPLES) -> None:
        self._pool = pool
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        row = index % len(self._pool[0])
        if len(self._pool) == 1:
            return self._pool[0][row]
        return tuple(tensor[row] for tensor in self._pool)


def synthetic_tokens(
    seed: int,
    *,
    vocab: int,
    context: int,
    pool: int = POOL_SAMPLES,
    length: int = SYNTHETIC_SAMPLES,
) -> PooledDataset:
    """Returns samples of context + 1 tokens; low tokens are frequent, so a model can learn."""
    uniform = torch.rand((pool, context + 1), generator=_generator(seed), dtype=torch.float64)
    return PooledDataset((uniform**3 * vocab).long(), length=length)


def synthetic_classes(
    seed: int,
    *,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float32,
    pool: int = POOL_SAMPLES,
    length: int = SYNTHETIC_SAMPLES,
) -> PooledDataset:
    """Returns samples (features of ``shape``, class): noise around a point for each class."""
    generator = _generator(seed)
    targets = torch.randint(classes, (pool,), generator=generator)
    centers = torch.randn((classes, *shape), generator=generator)
    features = torch.randn((pool, *shape), generator=generator).add_(centers[targets], alpha=0.5)
    return PooledDataset(features.to(dtype), targets, length=length)


def synthetic_pairs(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    pool: int = POOL_SAMPLES,
    length: int = SYNTHETIC_SAMPLES,
) -> PooledDataset:
    """Returns samples (x of shape [1], y of shape [1]) with y = x + 1 and a little noise."""
    generator = _generator(seed)
    x = torch.randn((pool, 1), generator=generator)
    y = x + 1 + 0.1 * torch.randn((pool, 1), generator=generator)
    return PooledDataset(x.to(dtype), y.to(dtype), length=length)


class ByteDataset(Dataset[Tensor]):
    """A text file as tokens of one byte each.

    Sample i is the bytes [i * context, (i + 1) * context], the last one included: context
    inputs, and the same shifted by one as targets. Each sample is read when it is asked for,
    not mapped: a file that is cut short in use is then an error, not the end of the process.
    Each process that gets the data set pickled opens the file for itself.

    Args:
        path: Any file.
        context: Tokens of a sample.

    Raises:
        InputError: The file is missing, not a regular file, unreadable or too short.
    """

    def __init__(self, path: str | Path, context: int) -> None:
        self._path = Path(path)
        self._context = context
        self._size = _readable_size(self._path)
        self._descriptor: int | None = None
        if len(self) < 1:
            have = "is empty" if self._size == 0 else f"has {_bytes(self._size)}"
            raise InputError(
                f"--data {self._path} {have}; one sample of context {context} needs "
                f"{_bytes(context + 1)}.",
                "Give a longer file or a shorter context.",
            )

    def __len__(self) -> int:
        return max(self._size - 1, 0) // self._context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        wanted = self._context + 1
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            # No seek: forked workers share the place in the file.
            read = os.pread(self._descriptor, wanted, index * self._context)
        except OSError as error:
            raise self._changed(error.strerror or str(error)) from error
        if len(read) < wanted:
            raise self._changed(f"it had {_bytes(self._size)} and is shorter now")
        return torch.from_numpy(np.frombuffer(read, dtype=np.uint8).astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        # A descriptor means nothing to another process.
        return {**self.__dict__, "_descriptor": None}

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _changed(self, how: str) -> InputError:
        return InputError(
            f"--data {self._path} can no longer be read as it was at the start: {how}.",
            "Leave the file as it is while it is in use.",
        )


def _readable_size(path: Path) -> int:
    try:
        if path.is_dir():
            raise InputError(f"--data {path} is a folder.", "Give one text file.")
        if path.exists() and not path.is_file():
            raise InputError(f"--data {path} is not a regular file.", "Give one text file.")
        with path.open("rb"):
            return path.stat().st_size
    except FileNotFoundError:
        raise InputError(
            f"--data {path} does not exist (current folder: {Path.cwd()}).",
            "Correct the path, or leave --data out for synthetic data.",
        ) from None
    except OSError as error:
        raise InputError(
            f"--data {path} cannot be read: {error.strerror or error}.",
            "Make the file readable, or give another one.",
        ) from error


def _bytes(number: int) -> str:
    return f"{number} byte" if number == 1 else f"{number} bytes"


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

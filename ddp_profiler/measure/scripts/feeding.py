"""What feeds a script's training: its DataLoaders, digests of first batches, tokens.

Only attributes are read, and lengths of classes whose length is known to be no more than a
number: asking a sampler of unknown make could draw random numbers, and training would no
longer be what it was. Nothing here reads a device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import pathlib
import re
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_profiler.measure.batches import number_of_samples
from ddp_profiler.schema import LoaderFacts

_MOST_LOADERS = 8
_MOST_DIGESTS = 4
_KNOWN_MODULES = ("torch.utils.data.", "accelerate.", "lightning.", "pytorch_lightning.")
"""Where a class whose length may be asked for is defined."""
_SHOWN_VALUES = 64
"""So many values of a large array or list count for a digest."""
_MOST_NODES = 4000
_MOST_COLUMNS = 16
_TABLE_MODULES = ("pandas", "polars", "pyarrow", "h5py", "zarr", "datasets")
"""Makers of tables whose length is a number and nothing more."""
_DEEPEST = 6
_HARMLESS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    logging.Logger,
    torch.Generator,
    torch.dtype,
    torch.device,
    np.random.Generator,
)
_HARMLESS_MODULES = ("transformers.", "tokenizers.", "torchvision.transforms.")
"""What data sets hold without saying anything about their samples."""

_TOKEN_TYPES = (torch.int32, torch.int64)
_TARGETS = re.compile(r"label|target", re.IGNORECASE)
_MASKS = ("attention_mask", "input_mask")
_PADDING_MASK = "key_padding_mask"
"""torch's own layers: true where there is padding."""


@dataclass(frozen=True)
class _Fetched:
    """A batch as it was fetched: its samples and digest, None where they cannot be told."""

    samples: int | None
    digest: int | None


# -- loaders --------------------------------------------------------------------------------------


class FeedWatch:
    """Finds out which loaders feed training on this rank.

    A fetch tells a loader, and the forward that follows tells whether it was for training.

    Args:
        on_change: Told when something new is known.
        batch_dim: The dimension of a batch's first tensor that counts samples.

    Attributes:
        loaders: The loaders that have fed training so far.
        digests: Of the first batches that entered training.
        joins: Whether training ran under DDP's join.
    """

    def __init__(self, on_change: Callable[[], None], batch_dim: int = 0) -> None:
        self.loaders: list[LoaderFacts] = []
        self.digests: list[int] = []
        self.joins = False
        self._on_change = on_change
        self._batch_dim = batch_dim
        self._known: weakref.WeakKeyDictionary[Any, LoaderFacts | None] = (
            weakref.WeakKeyDictionary()
        )
        self._of_datasets: dict[int, tuple[weakref.ref[Any], int | None]] = {}
        self._names: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._pending: list[LoaderFacts] = []
        self._batches: list[_Fetched] = []
        """What was fetched and has not entered forward yet."""
        self._doubtful: tuple[LoaderFacts | None, _Fetched | None] = (None, None)
        """The last fetch, where it seems to be for an evaluation: unless training takes it."""

    def meet(self, iterator: Any) -> None:
        """Notes an iterator that is about to give a batch; its first batch may change it."""
        _quietly(lambda: self._meet(iterator))

    def fetched(
        self, iterator: Any, batch: Any, *, compares: bool, evaluates: bool = False
    ) -> None:
        """Notes a batch that an iterator has given.

        Args:
            iterator: The DataLoader's iterator.
            batch: What it gave.
            compares: Whether there is time for a digest.
            evaluates: Whether it seems to be for an evaluation. It counts only if a training
                call follows before the next fetch.
        """
        facts = _quietly(lambda: self._known.get(iterator))
        fetched = None
        if compares and len(self.digests) + len(self._batches) < _MOST_DIGESTS:
            samples = _quietly(lambda: number_of_samples(batch, self._batch_dim))
            fetched = _Fetched(samples, _quietly(lambda: batch_digest(batch)))
        self._doubtful = (facts, fetched) if evaluates else (None, None)
        if not evaluates:
            self._await(facts, fetched)

    def _await(self, facts: LoaderFacts | None, fetched: _Fetched | None) -> None:
        if facts is not None and facts not in self._pending:
            self._pending.append(facts)
        if fetched is not None:
            self._batches.append(fetched)

    def tokens(self, ddp: Any, inputs: object) -> Tokens | None:
        """Counts the tokens of a call of DDP; see :func:`number_of_tokens`."""
        if ddp not in self._names:
            self._names[ddp] = _quietly(lambda: parameter_names(ddp.module)) or ()
        found: Tokens | None = _quietly(lambda: number_of_tokens(inputs, self._names[ddp]))
        return found

    def trained(self, samples: int | None, *, joins: bool = False) -> None:
        """Notes that training has called the model with so many samples."""
        changed = joins and not self.joins
        self.joins = self.joins or joins
        doubtful, self._doubtful = self._doubtful, (None, None)
        self._await(*doubtful)
        pending, self._pending = self._pending, []
        for facts in pending:
            # A data set may fill a cache of its own; it is the same one nevertheless.
            same = [replace(known, dataset_digest=facts.dataset_digest) for known in self.loaders]
            if facts not in same and len(self.loaders) < _MOST_LOADERS:
                self.loaders.append(facts)
                changed = True
        if self._batches:
            fetched = self._batches.pop(0)
            # A script may fetch the whole batch on every rank and train on a share of it.
            if fetched.digest is not None and fetched.samples == samples:
                self.digests.append(fetched.digest)
                changed = True
        if changed:
            self._on_change()

    def evaluated(self) -> None:
        """Notes that the model was called without gradients: what was fetched was for that."""
        self._pending.clear()
        self._batches.clear()
        self._doubtful = (None, None)

    def _meet(self, iterator: Any) -> None:
        if iterator not in self._known:
            self._known[iterator] = _quietly(lambda: self._describe(iterator))

    def _describe(self, iterator: Any) -> LoaderFacts:
        return replace(describe(iterator), dataset_digest=self._digest_of(iterator._dataset))

    def _digest_of(self, dataset: Any) -> int | None:
        """Returns the digest of a data set's state, taken once as long as it lives."""
        known = self._of_datasets.get(id(dataset))
        if known is not None and known[0]() is dataset:
            return known[1]
        digest: int | None = _quietly(lambda: state_digest(dataset))
        with contextlib.suppress(TypeError):  # Some cannot be referred to weakly.
            self._of_datasets[id(dataset)] = weakref.ref(dataset), digest
        return digest


def describe(iterator: Any) -> LoaderFacts:
    """Returns what a DataLoader's iterator tells of its loader; the data set's digest is left out.

    Args:
        iterator: As ``iter(loader)`` returns it.
    """
    dataset, index = iterator._dataset, iterator._index_sampler
    found = LoaderFacts(
        sampling="other",
        dataset=type(dataset).__name__,
        workers=_read(iterator, "_num_workers", int),
        persistent_workers=_read(iterator, "_persistent_workers", bool),
        pin_memory=_read(iterator, "_pin_memory", bool),
    )
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return replace(
            found,
            sampling="iterable",
            batch_size=_read(index, "batch_size", int),
            drop_last=_read(iterator, "_drop_last", bool),
        )
    found = replace(found, sampler=type(index).__name__, batches=_length(index))
    shard = None
    if hasattr(index, "process_index") and hasattr(index, "batch_sampler"):
        shard, index = index, index.batch_sampler
    if isinstance(index, BatchSampler):
        found = replace(
            found,
            batch_size=_read(index, "batch_size", int),
            drop_last=_read(index, "drop_last", bool),
        )
        index = index.sampler
    if shard is not None:
        return _sharded(found, shard, index)
    found = replace(found, sampler=type(index).__name__, samples=_length(index))
    if isinstance(index, DistributedSampler):
        return replace(
            found,
            sampling="distributed",
            dataset_size=_quietly(lambda: len(index.dataset)),  # type: ignore[arg-type]
            num_replicas=_read(index, "num_replicas", int),
            replica=_read(index, "rank", int),
            sampler_drop_last=_read(index, "drop_last", bool),
        )
    if isinstance(index, (SequentialSampler, RandomSampler)):
        # Others that derive from them may take a share; with replacement there are no shares.
        plain = _defined_in_known(type(index), "__iter__")
        plain = plain and not getattr(index, "replacement", False)
        kind = "sequential" if isinstance(index, SequentialSampler) else "random"
        return replace(
            found,
            sampling=kind if plain else "other",
            dataset_size=_quietly(lambda: len(index.data_source)),
            holds_more=bool(_quietly(lambda: _holds_more(dataset))),
        )
    return found


def _sharded(found: LoaderFacts, shard: Any, sampler: Any) -> LoaderFacts:
    """Describes batches that are made first and dealt out to ranks then, as Accelerate does."""
    replicas = _read(shard, "num_processes", int)
    batch_size = found.batch_size
    if batch_size is not None and replicas and getattr(shard, "split_batches", False):
        batch_size //= replicas
    even = bool(getattr(shard, "even_batches", False)) or bool(found.drop_last)
    samples = None
    if even and found.batches is not None and batch_size is not None:
        samples = found.batches * batch_size
    return replace(
        found,
        sampling="sharded",
        dataset_size=_length(sampler),
        num_replicas=replicas,
        replica=_read(shard, "process_index", int),
        batch_size=batch_size,
        samples=samples,
    )


def _holds_more(dataset: Any) -> bool:
    """Tells whether an attribute of a data set is longer than the data set.

    Then its ``__getitem__`` may choose among more than it says it has, such as a rank's share.
    Torch's own data sets do not.
    """
    if isinstance(dataset, Subset):
        return _holds_more(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(_holds_more(one) for one in dataset.datasets)
    if _defined_in_known(type(dataset), "__getitem__"):
        return False
    count = len(dataset)
    for value in vars(dataset).values():
        # Columns of one table, such as (inputs, targets), stand together.
        columns = value.values() if isinstance(value, dict) else value
        nested = list(columns)[:_MOST_COLUMNS] if isinstance(value, (dict, tuple)) else []
        if any((_extent(one) or 0) > count for one in (value, *nested)):
            return True
        if isinstance(value, Dataset) and _holds_more(value):
            return True
    return False


def _extent(value: Any) -> int | None:
    """Returns how many items something holds that can be asked; None of text and the rest."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    tables = type(value).__module__.partition(".")[0] in _TABLE_MODULES
    if tables or isinstance(value, (list, tuple, dict, set, frozenset, range, Dataset)):
        return len(value)
    return None


def _read(owner: Any, name: str, kind: type) -> Any:
    value = getattr(owner, name, None)
    return kind(value) if isinstance(value, (bool, int)) else None


def _length(sampler: Any) -> int | None:
    """Returns the length of a sampler whose length is known to be a number and nothing more."""
    if not _defined_in_known(type(sampler), "__len__"):
        return None
    inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if inner is not None and _length(inner) is None:
        return None
    kinds = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if inner is None and not isinstance(sampler, (DistributedSampler, *kinds)):
        return None
    length: int | None = _quietly(lambda: len(sampler))
    return length


def _defined_in_known(kind: type, method: str) -> bool:
    """Tells whether a class has a method from torch or from a framework, and not from a user."""
    for base in kind.__mro__:
        if method in vars(base):
            return f"{base.__module__}.".startswith(_KNOWN_MODULES)
    return False


def _quietly(call: Callable[[], Any]) -> Any:
    """Returns what a call returns; None if it fails, since loaders are made in many ways."""
    try:
        return call()
    except Exception:
        return None


# -- digests --------------------------------------------------------------------------------------


class _OpaqueError(Exception):
    """Something holds a value whose content is not to be seen."""


class _Digest:
    """A digest of nested values, of a bounded number of them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._nodes = 0
        self._seen: dict[int, Any] = {}
        """What was added, by its id: kept alive, or the next temporary list could have its id."""

    def value(self) -> int:
        """Returns 63 bits of it."""
        return int.from_bytes(self._hash.digest(), "big") >> 1

    def add(self, value: Any, depth: int = 0) -> None:
        """Adds a value and what it holds.

        Raises:
            _OpaqueError: The content of something is not to be seen.
        """
        self._nodes += 1
        if self._nodes > _MOST_NODES or depth > _DEEPEST:
            return
        self._text(f"{type(value).__module__}.{type(value).__qualname__}")
        if value is None or isinstance(value, (bool, int, float, complex, range, pathlib.PurePath)):
            self._text(repr(value))
        elif isinstance(value, (str, bytes, bytearray)):
            self._text(f"{len(value)} {value[:400]!r}")
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, (Enum, re.Pattern)):
            self._text(repr(value))
        elif isinstance(value, _HARMLESS) or type(value).__module__.startswith(_HARMLESS_MODULES):
            self._text(str(getattr(value, "__qualname__", "")))
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            self._nested(value, depth)

    def _nested(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple)):
            self._text(str(len(value)))
            for item in value[:: max(1, len(value) // _SHOWN_VALUES)]:
                self.add(item, depth + 1)
        elif isinstance(value, dict):
            self._text(str(len(value)))
            for key, item in list(value.items())[:_SHOWN_VALUES]:
                self.add(key, depth + 1)
                self.add(item, depth + 1)
        elif isinstance(value, (set, frozenset)):
            # Texts in it have another order in each process.
            self._text(str(len(value)))
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords], depth + 1)
        elif isinstance(getattr(value, "_fingerprint", None), str):
            # Data sets of Hugging Face: the table is not to be seen, a share has another one.
            self._text(value._fingerprint)
        elif _is_plain_object(value):
            self.add(vars(value), depth + 1)
        else:
            raise _OpaqueError(type(value).__name__)

    def _text(self, text: str) -> None:
        self._hash.update(text.encode(errors="replace"))
        self._hash.update(b"\0")

    def _tensor(self, tensor: Tensor) -> None:
        self._text(f"{tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_meta:
            raise _OpaqueError("a tensor elsewhere")
        with torch.no_grad():
            tensor = tensor.detach()
            if not tensor.is_contiguous():
                # Flattening it would copy all of it.
                tensor = tensor[_spread(len(tensor), _SHOWN_VALUES)]
            flat = tensor.reshape(-1)
            flat = flat[_spread(len(flat), 64 * _SHOWN_VALUES)].contiguous()
            self._hash.update(flat.view(torch.uint8).numpy().tobytes())

    def _array(self, array: Any) -> None:
        self._text(f"{array.dtype} {array.shape}")
        if isinstance(array, np.memmap):
            # Not read: its pages may be on a slow disk.
            self._text(f"{array.filename} {array.offset}")
            return
        if not array.flags.c_contiguous:
            array = array[_spread(len(array), _SHOWN_VALUES)]
        flat = array.reshape(-1)
        flat = flat[_spread(len(flat), 64 * _SHOWN_VALUES)]
        if array.dtype.hasobject:
            self.add(flat.tolist())
        else:
            self._hash.update(flat.tobytes())


def _spread(count: int, shown: int) -> slice:
    return slice(None, None, max(1, count // shown))


def _is_plain_object(value: Any) -> bool:
    """Tells whether all that an object holds is in its ``__dict__``."""
    return hasattr(value, "__dict__") and all(
        base.__flags__ & _HEAP_TYPE or base is object for base in type(value).__mro__
    )


_HEAP_TYPE = 1 << 9
"""Flag of classes that are written in Python (Py_TPFLAGS_HEAPTYPE)."""


def state_digest(dataset: object) -> int | None:
    """Returns a digest of what a data set holds, a part of it where that is much.

    Only attributes are read; no sample is.

    Returns:
        63 bits; None where it holds something whose content is not to be seen.
    """
    digest = _Digest()
    try:
        digest.add(dataset)
    except _OpaqueError:
        return None
    return digest.value()


def batch_digest(batch: object) -> int | None:
    """Returns a digest of a batch of tensors, of a part of the values where they are many.

    Args:
        batch: Tensors in dictionaries, tuples and lists; others do not count.

    Returns:
        63 bits; None without a tensor on the CPU.
    """
    digest = _Digest()
    found = False
    for _, tensor in _tensors("", batch):
        if tensor.device.type == "cpu":
            digest._tensor(tensor)
            found = True
    return digest.value() if found else None


# -- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """What entered a forward: tokens, and the places they took where a mask tells them apart."""

    count: int
    places: int | None = None


def number_of_tokens(inputs: object, names: tuple[str, ...] = ()) -> Tokens | None:
    """Counts the tokens in forward's inputs; None where there are none.

    Tokens are the elements of the first tensor of int32 or int64 with at least two dimensions
    that is not called labels or targets. A mask of the same shape says which are padding; it is
    read on the CPU only, since reading a GPU would make it wait.

    Args:
        inputs: forward's arguments and keywords: (tuple, dict).
        names: Names of its parameters, in order.
    """
    arguments, keywords = inputs if isinstance(inputs, tuple) and len(inputs) == 2 else (inputs, {})
    named = list(zip(names, arguments, strict=False)) if isinstance(arguments, tuple) else []
    rest = arguments[len(named) :] if isinstance(arguments, tuple) else arguments
    found = [pair for name, value in named for pair in _tensors(name, value)]
    found += [*_tensors("", rest), *_tensors("", keywords)]
    tokens = next(
        (
            tensor
            for name, tensor in found
            if tensor.dtype in _TOKEN_TYPES
            and tensor.dim() > 1
            and not _TARGETS.search(name)
            and name not in _MASKS
        ),
        None,
    )
    if tokens is None:
        return None
    for name, mask in found:
        if mask is tokens or mask.shape != tokens.shape or mask.device.type != "cpu":
            continue
        if name in _MASKS and not mask.is_floating_point():
            return Tokens(int(torch.count_nonzero(mask)), tokens.numel())
        if name.endswith(_PADDING_MASK) and mask.dtype == torch.bool:
            return Tokens(tokens.numel() - int(torch.count_nonzero(mask)), tokens.numel())
    return Tokens(tokens.numel())


def parameter_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of forward's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _tensors(name: str, value: object) -> list[tuple[str, Tensor]]:
    """Returns the tensors in nested inputs in order, each with the name it goes by."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _tensors(str(key), item)]
    if isinstance(value, (tuple, list)) and not (value and isinstance(value[0], (str, float))):
        return [pair for item in value for pair in _tensors(name, item)]
    return []

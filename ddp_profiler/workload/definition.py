"""What a workload is: the model, its data, its loss and its optimizer, checked when made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from ddp_profiler.errors import InputError, UsageError


@dataclass(frozen=True)
class WorkloadSettings:
    """What a factory is told.

    Attributes:
        seed: Seed of parameters and synthetic data.
        micro_batch: Samples that one rank passes through forward in one micro-step.
        data_path: The file given with ``--data``; None where none was given.
        options: What followed the factory's name as ``key=value,...``, as written.

    Raises:
        UsageError: The micro-batch is below 1.
    """

    seed: int
    micro_batch: int
    data_path: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.micro_batch < 1:
            raise UsageError(f"micro_batch {self.micro_batch} is below 1.", "Give 1 or more.")


@dataclass(frozen=True)
class Workload:
    """A model to train and everything that one training step of it needs.

    Attributes:
        name: What reports call it.
        module: The model, not wrapped in DDP; called as ``module(*inputs(batch))``.
        dataset: Map-style: ``dataset[i]`` and ``len(dataset)``.
        inputs: From a collated batch to the positional arguments of forward. May run
            modules that live outside DDP, such as an encoder.
        loss: From the module's output and the batch to the mean of the loss over the
            micro-batch's samples, a scalar.
        optimizer: From the parameters to their optimizer.
        tokens_per_sample: Tokens of a sample, for tokens/s; None where there are none.
        options: What it was built with, for the record.
        extra_modules: Trained modules outside DDP, such as an encoder.
        find_unused_parameters: Passed to DDP.
        notes: What a reader of the figures has to know about the model.

    Raises:
        InputError: A field is not what it should be.
    """

    name: str
    module: nn.Module
    dataset: Dataset[Any]
    inputs: Callable[[Any], tuple[Any, ...]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    tokens_per_sample: int | None = None
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    extra_modules: tuple[nn.Module, ...] = ()
    find_unused_parameters: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"Workload: name is {self.name!r}.", "Give a text that is not empty.")
        self._check_module()
        self._check_dataset()
        self._check_functions()
        self._check_extra_modules()
        tokens = self.tokens_per_sample
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise self._wrong(f"tokens_per_sample is {tokens!r}", "Give 1 or more, or None.")
        if not isinstance(self.options, Mapping) or not all(
            isinstance(key, str) and isinstance(value, (str, int, float))
            for key, value in self.options.items()
        ):
            raise self._wrong(
                f"options is {self.options!r}", "Give a dict from str to str, int or float."
            )
        if not all(isinstance(note, str) for note in self.notes):
            raise self._wrong(f"notes is {self.notes!r}", "Give a tuple of texts.")
        if not isinstance(self.find_unused_parameters, bool):
            raise self._wrong(
                f"find_unused_parameters is {self.find_unused_parameters!r}",
                "Give True or False.",
            )

    def _check_module(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise self._wrong(
                f"module is {_type_name(self.module)}, not a torch.nn.Module",
                "Give an instance of the model.",
            )
        if isinstance(self.module, DistributedDataParallel):
            raise self._wrong(
                "module is already wrapped in DistributedDataParallel",
                "Give the bare model; it is wrapped anew at every dp.",
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise self._wrong(
                "module has no trainable parameters",
                "Give a model with at least one parameter that requires a gradient.",
            )

    def _check_dataset(self) -> None:
        remedy = "Give a map-style dataset: one with dataset[i] and len(dataset)."
        # Duck typing: datasets of other libraries do not derive from torch's.
        if not hasattr(self.dataset, "__getitem__") or isinstance(self.dataset, IterableDataset):
            raise self._wrong(f"dataset is {_type_name(self.dataset)}, not map-style", remedy)
        try:
            samples = len(self.dataset)  # type: ignore[arg-type]
        except Exception as error:
            raise self._wrong(
                f"dataset is {_type_name(self.dataset)}, whose length cannot be told "
                f"({type(error).__name__}: {error})",
                remedy,
            ) from error
        if samples < 1:
            raise self._wrong("dataset is empty", "Give at least one sample.")

    def _check_functions(self) -> None:
        for field_name, form in (
            ("inputs", "lambda batch: (batch[0],)"),
            ("loss", "lambda output, batch: cross_entropy(output, batch[1])"),
            ("optimizer", "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
        ):
            value = getattr(self, field_name)
            if not callable(value):
                raise self._wrong(
                    f"{field_name} is {_type_name(value)}, not a function",
                    f"Give one, such as {form}.",
                )

    def _check_extra_modules(self) -> None:
        extra = self.extra_modules
        if not isinstance(extra, tuple) or not all(isinstance(m, nn.Module) for m in extra):
            raise self._wrong(
                "extra_modules is not a tuple of torch.nn.Module",
                "Give one, such as extra_modules=(encoder,).",
            )
        inside = {id(p) for p in self.module.parameters()}
        if any(id(p) in inside for module in extra for p in module.parameters()):
            raise self._wrong(
                "extra_modules and module share parameters",
                "Name in extra_modules only what module does not hold.",
            )

    def _wrong(self, what: str, remedy: str) -> InputError:
        return InputError(f"Workload {self.name!r}: {what}.", remedy)


def _type_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__

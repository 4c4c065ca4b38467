"""Building a workload from a ``--model`` text: a built-in model or a custom factory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.workload import convnet, gpt, mlp, timed
from ddp_profiler.workload.catalog import (
    CATALOG,
    BuiltinSpec,
    ConvnetOptions,
    FactorySpec,
    GptOptions,
    MlpOptions,
    TimedOptions,
    parse_spec,
)
from ddp_profiler.workload.definition import Workload, WorkloadSettings
from ddp_profiler.workload.importing import (
    REPAIR,
    Wanted,
    describe_error,
    file_of,
    find_function,
)

_DOCS = "docs/custom-models.md"
_FACTORY = Wanted(
    noun="factory",
    arguments=1,
    definition="def {}(settings: WorkloadSettings) -> Workload",
    kind="a function from WorkloadSettings to Workload",
    docs=_DOCS,
)


def build(spec: str, *, seed: int, micro_batch: int, data: str | Path | None = None) -> Workload:
    """Builds the workload that a ``--model`` text asks for.

    The same text and seed give the same parameters and samples in every process. The
    global state of torch's random numbers is left as it was.

    Args:
        spec: ``NAME[:key=value,...]`` or ``package.module:factory[:key=value,...]``.
        seed: Seed of parameters and synthetic data.
        micro_batch: Samples that one rank passes through forward in one micro-step.
        data: File to train on; synthetic data where None.

    Raises:
        UsageError: The model or an option is unknown, a value is unusable, or the model
            takes no text.
        InputError: The file or the custom factory cannot be used.
    """
    parsed = parse_spec(spec)
    path = None if data is None else Path(data)
    # Of no other device, so that no process starts a GPU context by this.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(parsed, BuiltinSpec):
            return _build_builtin(parsed, seed, path)
        settings = WorkloadSettings(seed, micro_batch, path, parsed.options)
        return _build_custom(parsed, settings)


def _build_builtin(spec: BuiltinSpec, seed: int, data: Path | None) -> Workload:
    if data is not None and not CATALOG[spec.name].takes_text:
        names = ", ".join(name for name, model in CATALOG.items() if model.takes_text)
        raise UsageError(
            f"--data {data}: model {spec.name} takes no text.",
            f"Leave --data out, or choose one of: {names}.",
        )
    match spec.options:
        case GptOptions():
            return gpt.build(spec.name, spec.options, seed=seed, data=data)
        case MlpOptions():
            return mlp.build(spec.name, spec.options, seed=seed)
        case ConvnetOptions():
            return convnet.build(spec.name, spec.options, seed=seed)
        case TimedOptions():
            return timed.build(spec.name, spec.options, seed=seed)


def _build_custom(spec: FactorySpec, settings: WorkloadSettings) -> Workload:
    factory = _load(spec)
    try:
        workload = factory(settings)
    except InputError as error:
        raise InputError(f"--model {spec}: {error.message}", error.remedy) from error
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        what = describe_error(error, file_of(spec.module))
        raise InputError(f"--model {spec} raised {what}.", REPAIR) from error
    if not isinstance(workload, Workload):
        raise InputError(
            f"--model {spec} returned {type(workload).__name__}, not a Workload.",
            f"Return ddp_profiler.workload.Workload(...); see {_DOCS}.",
        )
    if settings.options and not workload.options:
        workload = dataclasses.replace(workload, options=settings.options)
    return workload


def _load(spec: FactorySpec) -> Callable[[WorkloadSettings], Any]:
    _make_current_folder_importable()
    factory: Callable[[WorkloadSettings], Any] = find_function(
        f"--model {spec}", spec.module, spec.attribute, _FACTORY
    )
    return factory


def _make_current_folder_importable() -> None:
    # As `python -m` does; an installed command does not. It stays, for loader workers.
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)

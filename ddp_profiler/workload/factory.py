"""Building a workload from a ``--model`` text: a built-in model or a custom factory."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import traceback
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
    close_match,
    parse_spec,
)
from ddp_profiler.workload.definition import Workload, WorkloadSettings

_DOCS = "docs/custom-models.md"
_REPAIR = "Correct it; --debug shows the stack trace."


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
        file = getattr(sys.modules.get(spec.module), "__file__", None)
        raise InputError(f"--model {spec} raised {_describe(error, file)}.", _REPAIR) from error
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
    try:
        module = importlib.import_module(spec.module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_of(spec.module, error.name):
            raise InputError(
                f"--model {spec}: {error}.",
                "Run from the folder that holds it, or add that folder to PYTHONPATH.",
            ) from error
        raise InputError(
            f"--model {spec}: importing {spec.module} raised {_describe(error, None)}.", _REPAIR
        ) from error
    target: Any = module
    for name in spec.attribute.split("."):
        if not hasattr(target, name):
            file = getattr(module, "__file__", None) or "no file"
            raise InputError(
                f"--model {spec}: module {spec.module} ({file}) has no {spec.attribute}"
                f"{close_match(name, dir(target))}",
                f"Correct the name, or define the factory; see {_DOCS}.",
            )
        target = getattr(target, name)
    if not callable(target):
        raise InputError(
            f"--model {spec} is {type(target).__name__}, not a function.",
            f"Name a function from WorkloadSettings to Workload; see {_DOCS}.",
        )
    _check_signature(spec, target)
    factory: Callable[[WorkloadSettings], Any] = target
    return factory


def _check_signature(spec: FactorySpec, target: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # Some callables do not tell theirs; calling will show.
    try:
        signature.bind(None)
    except TypeError:
        raise InputError(
            f"--model {spec} cannot be called with one argument: it takes {signature}.",
            f"Define it as def {spec.attribute}(settings: WorkloadSettings) -> Workload.",
        ) from None


def _make_current_folder_importable() -> None:
    # As `python -m` does; an installed command does not. It stays, for loader workers.
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _is_of(module: str, missing: str | None) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _describe(error: BaseException, file: str | None) -> str:
    """Returns an exception as one line: type, first line of its message, place."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return what  # Its message has the place.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    # The user's own line says more than the one deep in a library.
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{what} ({own[-1].filename}:{own[-1].lineno})" if own else what

"""Finding a function of the user's by its name, ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_profiler.errors import InputError
from ddp_profiler.workload.catalog import close_match

REPAIR = "Correct it; --debug shows the stack trace."

_OURS = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Wanted:
    """What a named function has to be, in words and in arguments.

    Attributes:
        noun: What it is, such as ``factory``.
        arguments: How many it is called with.
        definition: How to define it; ``{}`` stands for its name.
        kind: What to name instead of something that is no function.
        docs: The page that explains it.
    """

    noun: str
    arguments: int
    definition: str
    kind: str
    docs: str


def find_function(named: str, module_name: str, attribute: str, wanted: Wanted) -> Any:
    """Imports a module and returns a function of it.

    Args:
        named: How the user named it, with the option, for messages.
        module_name: The module, as in ``import``.
        attribute: The function; names inside names are separated by dots.
        wanted: What it has to be.

    Raises:
        InputError: The module cannot be imported, or has no such function.
    """
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_of(module_name, error.name):
            raise InputError(
                f"{named}: {error}.",
                "Run from the folder that holds it, or add that folder to PYTHONPATH.",
            ) from error
        raise InputError(
            f"{named}: importing {module_name} raised {describe_error(error, None)}.", REPAIR
        ) from error
    target: Any = module
    for name in attribute.split("."):
        if not hasattr(target, name):
            file = getattr(module, "__file__", None) or "no file"
            raise InputError(
                f"{named}: module {module_name} ({file}) has no {attribute}"
                f"{close_match(name, dir(target))}",
                f"Correct the name, or define the {wanted.noun}; see {wanted.docs}.",
            )
        target = getattr(target, name)
    if not callable(target):
        raise InputError(
            f"{named} is {type(target).__name__}, not a function.",
            f"Name {wanted.kind}; see {wanted.docs}.",
        )
    _check_signature(named, attribute, target, wanted)
    return target


def _check_signature(
    named: str, attribute: str, target: Callable[..., Any], wanted: Wanted
) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # Some callables do not tell theirs; calling will show.
    try:
        signature.bind(*[None] * wanted.arguments)
    except TypeError:
        count = "one argument" if wanted.arguments == 1 else f"{wanted.arguments} arguments"
        raise InputError(
            f"{named} cannot be called with {count}: it takes {signature}.",
            f"Define it as {wanted.definition.format(attribute)}.",
        ) from None


def describe_error(error: BaseException, file: str | None) -> str:
    """Returns an exception as one line: type, first line of its message, place.

    Args:
        error: The exception.
        file: The file whose own line says more than the one deep in a library.
    """
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return what  # Its message has the place.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OURS))
    ]
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{what} ({own[-1].filename}:{own[-1].lineno})" if own else what


def file_of(module_name: str) -> str | None:
    """Returns the file of an imported module; None if it has none."""
    return getattr(sys.modules.get(module_name), "__file__", None)


def _is_of(module: str, missing: str | None) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")

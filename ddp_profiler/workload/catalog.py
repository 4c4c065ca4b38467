"""The built-in models by name with their options, and how a ``--model`` text is read.

Needs no torch, so that the command line can show and check models before it loads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from ddp_profiler.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16", "float64")

_DTYPE = {"choices": DTYPES}
_POSITIVE = {"least": 1}
_NOT_NEGATIVE = {"least": 0}
_PROBABILITY = {"least": 0, "below": 1}


@dataclass(frozen=True, kw_only=True)
class GptOptions:
    """Options of the language models.

    Attributes:
        layers: Transformer blocks.
        width: Features of a position.
        heads: Attention heads; divide the width.
        context: Tokens of a sample.
        dropout: Probability with which an activation is dropped.
        vocab: Number of different tokens.
        dtype: Type of the parameters.

    Raises:
        ValueError: The heads do not divide the width.
    """

    layers: int = field(default=4, metadata=_POSITIVE)
    width: int = field(default=128, metadata=_POSITIVE)
    heads: int = field(default=4, metadata=_POSITIVE)
    context: int = field(default=64, metadata=_POSITIVE)
    dropout: float = field(default=0.0, metadata=_PROBABILITY)
    vocab: int = field(default=256, metadata={"least": 2})
    dtype: str = field(default="float32", metadata=_DTYPE)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """Options of the multilayer perceptron.

    Attributes:
        width: Features of a hidden layer.
        depth: Number of hidden layers.
        inputs: Features of a sample.
        classes: Classes to tell apart.
        dtype: Type of the parameters and features.
    """

    width: int = field(default=1024, metadata=_POSITIVE)
    depth: int = field(default=4, metadata=_POSITIVE)
    inputs: int = field(default=256, metadata=_POSITIVE)
    classes: int = field(default=10, metadata={"least": 2})
    dtype: str = field(default="float32", metadata=_DTYPE)


@dataclass(frozen=True, kw_only=True)
class ConvnetOptions:
    """Options of the convolutional network.

    Attributes:
        width: Channels of the first stage; doubled at each of the next two.
        classes: Classes to tell apart.
        dtype: Type of the parameters and images.
    """

    width: int = field(default=32, metadata=_POSITIVE)
    classes: int = field(default=10, metadata={"least": 2})
    dtype: str = field(default="float32", metadata=_DTYPE)


@dataclass(frozen=True, kw_only=True)
class TimedOptions:
    """Options of the model that sleeps instead of computing.

    Attributes:
        layers: Number of layers.
        forward_ms: Forward time of each layer in ms.
        backward_ms: Backward time of each layer in ms.
        parameters: Parameters of each layer.
        outside_backward_ms: Backward time in ms of one more layer, trained outside DDP;
            0 leaves it out.
        buffers: Buffer elements of each layer, which DDP broadcasts.
        pace: ``schedule``: a pass takes layers x ms as a whole, small work between layers
            is absorbed. ``layer``: each layer takes its ms, what lies between them adds to
            it; needed to see the cost of anything that runs between layers.
        dtype: Type of the parameters and features.
    """

    layers: int = field(default=8, metadata=_POSITIVE)
    forward_ms: float = field(default=5.0, metadata=_NOT_NEGATIVE)
    backward_ms: float = field(default=10.0, metadata=_NOT_NEGATIVE)
    parameters: int = field(default=65536, metadata=_POSITIVE)
    outside_backward_ms: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    buffers: int = field(default=0, metadata=_NOT_NEGATIVE)
    pace: str = field(default="schedule", metadata={"choices": ("schedule", "layer")})
    dtype: str = field(default="float32", metadata=_DTYPE)


ModelOptions = GptOptions | MlpOptions | ConvnetOptions | TimedOptions
"""Options of any built-in model."""


@dataclass(frozen=True)
class BuiltinModel:
    """A built-in model as the command line shows it.

    Attributes:
        description: One line, with the number of parameters.
        defaults: Its options and their defaults.
        takes_text: Whether it can be trained on a text file.
    """

    description: str
    defaults: ModelOptions
    takes_text: bool = False


CATALOG: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "gpt-tiny": BuiltinModel(
            "byte-level language model, 0.83 M parameters (4 layers of width 128)",
            GptOptions(),
            takes_text=True,
        ),
        "gpt-small": BuiltinModel(
            "language model of GPT-2's size, 124 M parameters (12 layers of width 768)",
            GptOptions(layers=12, width=768, heads=12, context=256, vocab=50257),
            takes_text=True,
        ),
        "mlp": BuiltinModel(
            "multilayer perceptron, 3.4 M parameters (4 hidden layers of width 1024)",
            MlpOptions(),
        ),
        "convnet": BuiltinModel(
            "convolutional network with batch norm on 32x32 images, 0.29 M parameters",
            ConvnetOptions(),
        ),
        "timed": BuiltinModel(
            "layers that sleep 5 ms forward and 10 ms backward each, 0.52 M parameters (8 layers)",
            TimedOptions(),
        ),
    }
)
"""The built-in models by name."""

BUILTIN_MODELS: Mapping[str, str] = MappingProxyType(
    {name: model.description for name, model in CATALOG.items()}
)
"""One line on each built-in model, by name, for the help text."""


@dataclass(frozen=True)
class BuiltinSpec:
    """A built-in model that was asked for.

    Attributes:
        name: Its name in the catalog.
        options: Its options, defaults filled in.
    """

    name: str
    options: ModelOptions


@dataclass(frozen=True)
class FactorySpec:
    """A custom factory that was asked for.

    Attributes:
        module: Name to import.
        attribute: Name in the module; may have dots.
        options: Its options as they were written.
    """

    module: str
    attribute: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


def parse_spec(spec: str) -> BuiltinSpec | FactorySpec:
    """Reads ``NAME[:key=value,...]`` or ``package.module:factory[:key=value,...]``.

    >>> parse_spec("mlp:width=64").options.width
    64
    >>> str(parse_spec("models.mine:make:width=64"))
    'models.mine:make'

    Raises:
        UsageError: The model or an option is unknown, or a value is unusable.
    """
    name, colon, rest = spec.partition(":")
    if name in CATALOG:
        return BuiltinSpec(name, _builtin_options(name, rest if colon else None))
    attribute, second_colon, options = rest.partition(":")
    if not colon or "=" in attribute:
        raise _unknown_model(name)
    if not _is_dotted_name(name):
        stem = PurePath(name).stem
        example = f"{stem}:{attribute}" if stem.isidentifier() else "package.module:factory"
        raise UsageError(
            f"--model {spec}: {name!r} is neither a built-in model nor the name of a module.",
            f"Name the module as in an import statement, such as {example}.",
        )
    if not _is_dotted_name(attribute):
        raise UsageError(
            f"--model {spec}: {attribute!r} is not the name of a factory.",
            "Give package.module:factory[:key=value,...].",
        )
    return FactorySpec(name, attribute, _pairs(f"{name}:{attribute}", options, second_colon))


def options_text(name: str) -> str:
    """Returns the options of a built-in model with their defaults, on one line.

    >>> options_text("convnet")
    'width=32, classes=10, dtype=float32'
    """
    pairs = dataclasses.asdict(CATALOG[name].defaults).items()
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in pairs
    )


def close_match(word: str, known: list[str]) -> str:
    """Returns ``; did you mean X?`` where a known word is close, else nothing."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else "."


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _unknown_model(name: str) -> UsageError:
    return UsageError(
        f"--model {name}: there is no such built-in model{close_match(name.lower(), [*CATALOG])}",
        f"Built-in models: {', '.join(CATALOG)}; or give your own as package.module:factory.",
    )


def _pairs(model: str, text: str, given: str, remedy: str = "") -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in text.split(",") if given else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise UsageError(
                f"--model {model}: {item.strip()!r} is not of the form key=value.",
                remedy or "Give options as key=value, separated by commas.",
            )
        if key in pairs:
            raise UsageError(
                f"--model {model}: option {key} is given twice ({pairs[key]} and {value}).",
                "Give it once.",
            )
        pairs[key] = value
    return pairs


def _builtin_options(name: str, text: str | None) -> ModelOptions:
    defaults = CATALOG[name].defaults
    remedy = f"Options of {name}: {options_text(name)}."
    if text is not None and text.isidentifier():
        remedy += f" A module of your own needs another name than {name}."
    fields = {each.name: each for each in dataclasses.fields(defaults)}
    values: dict[str, Any] = {}
    for key, value in _pairs(name, text or "", "" if text is None else ":", remedy).items():
        if key not in fields:
            raise UsageError(
                f"--model {name}: there is no option {key} (given as {key}={value})"
                f"{close_match(key, [*fields])}",
                remedy,
            )
        try:
            values[key] = _read(value, type(getattr(defaults, key)), fields[key].metadata)
        except ValueError as error:
            raise UsageError(f"--model {name}: {key}={value} {error}.", remedy) from None
    try:
        return dataclasses.replace(defaults, **values)
    except ValueError as error:
        raise UsageError(f"--model {name}: {error}.", remedy) from None


def _read(text: str, kind: type, limits: Mapping[str, Any]) -> int | float | str:
    if kind is str:
        if text not in limits["choices"]:
            raise ValueError(f"is none of {', '.join(limits['choices'])}")
        return text
    try:
        value: int | float = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"is not a {'whole ' if kind is int else ''}number")
    if value < limits["least"]:
        raise ValueError(f"is below {limits['least']}")
    if "below" in limits and value >= limits["below"]:
        raise ValueError(f"is not below {limits['below']}")
    return value

"""The --model text: what is understood, what is refused, and that none of it needs torch."""

import subprocess
import sys

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.workload.catalog import (
    BUILTIN_MODELS,
    BuiltinSpec,
    FactorySpec,
    GptOptions,
    TimedOptions,
    options_text,
    parse_spec,
)

MLP_OPTIONS = "Options of mlp: width=1024, depth=4, inputs=256, classes=10, dtype=float32."
KNOWN = (
    "Built-in models: gpt-tiny, gpt-small, mlp, convnet, timed; "
    "or give your own as package.module:factory."
)


def refused(spec):
    with pytest.raises(UsageError) as caught:
        parse_spec(spec)
    return str(caught.value).splitlines()


def test_importing_names_and_parser_does_not_import_torch():
    code = (
        "import sys\n"
        "from ddp_profiler.workload.catalog import BUILTIN_MODELS, parse_spec\n"
        "from ddp_profiler.workload import BUILTIN_MODELS, Plant, Planter, parse_plants\n"
        "from ddp_profiler.workload import precise_sleep\n"
        "parse_spec('gpt-small:layers=2')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "from ddp_profiler.workload import Workload, WorkloadSettings, build\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_of_the_package_is_an_attribute_error():
    import ddp_profiler.workload

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = ddp_profiler.workload.nonsense
    assert "build" in dir(ddp_profiler.workload)


def test_builtin_models_have_one_line_with_their_parameters():
    assert list(BUILTIN_MODELS) == ["gpt-tiny", "gpt-small", "mlp", "convnet", "timed"]
    for line in BUILTIN_MODELS.values():
        assert "\n" not in line
        assert " M parameters" in line


def test_builtin_with_defaults():
    assert parse_spec("gpt-tiny") == BuiltinSpec("gpt-tiny", GptOptions())
    small = parse_spec("gpt-small").options
    assert (small.layers, small.width, small.heads, small.context, small.vocab) == (
        12,
        768,
        12,
        256,
        50257,
    )


def test_builtin_with_options():
    options = parse_spec("timed:layers=3, forward_ms=0.5,dtype=bfloat16").options
    assert options == TimedOptions(layers=3, forward_ms=0.5, dtype="bfloat16")
    assert type(options.forward_ms) is float
    assert type(parse_spec("timed:forward_ms=2").options.forward_ms) is float


def test_factory_specs():
    assert parse_spec("a.b:make") == FactorySpec("a.b", "make", {})
    assert parse_spec("a:B.make:lr=0.1,path=c:d") == FactorySpec(
        "a", "B.make", {"lr": "0.1", "path": "c:d"}
    )


@pytest.mark.parametrize(
    ("spec", "message", "remedy"),
    [
        (
            "gpt-tinny",
            "--model gpt-tinny: there is no such built-in model; did you mean gpt-tiny?",
            KNOWN,
        ),
        (
            "GPT-Small:layers=2",
            "--model GPT-Small: there is no such built-in model; did you mean gpt-small?",
            KNOWN,
        ),
        ("resnet50", "--model resnet50: there is no such built-in model.", KNOWN),
        (
            "./my_model.py:make",
            "--model ./my_model.py:make: './my_model.py' is neither a built-in model nor the "
            "name of a module.",
            "Name the module as in an import statement, such as my_model:make.",
        ),
        (
            "my_model:",
            "--model my_model:: '' is not the name of a factory.",
            "Give package.module:factory[:key=value,...].",
        ),
        (
            "my_model:make:fast",
            "--model my_model:make: 'fast' is not of the form key=value.",
            "Give options as key=value, separated by commas.",
        ),
        (
            "my_model:make:a=1,a=2",
            "--model my_model:make: option a is given twice (1 and 2).",
            "Give it once.",
        ),
        (
            "mlp:widht=3",
            "--model mlp: there is no option widht (given as widht=3); did you mean width?",
            MLP_OPTIONS,
        ),
        ("mlp:width=wide", "--model mlp: width=wide is not a whole number.", MLP_OPTIONS),
        ("mlp:width=1.5", "--model mlp: width=1.5 is not a whole number.", MLP_OPTIONS),
        ("mlp:width=", "--model mlp: width= is not a whole number.", MLP_OPTIONS),
        ("mlp:width=0", "--model mlp: width=0 is below 1.", MLP_OPTIONS),
        (
            "mlp:width=2,width=2",
            "--model mlp: option width is given twice (2 and 2).",
            "Give it once.",
        ),
        ("mlp:", "--model mlp: '' is not of the form key=value.", MLP_OPTIONS),
        (
            "mlp:make",
            "--model mlp: 'make' is not of the form key=value.",
            f"{MLP_OPTIONS} A module of your own needs another name than mlp.",
        ),
        (
            "mlp:dtype=int8",
            "--model mlp: dtype=int8 is none of float32, bfloat16, float16, float64.",
            MLP_OPTIONS,
        ),
        (
            "timed:forward_ms=nan",
            "--model timed: forward_ms=nan is not a number.",
            f"Options of timed: {options_text('timed')}.",
        ),
        (
            "timed:backward_ms=-1",
            "--model timed: backward_ms=-1 is below 0.",
            f"Options of timed: {options_text('timed')}.",
        ),
        (
            "gpt-tiny:dropout=1",
            "--model gpt-tiny: dropout=1 is not below 1.",
            f"Options of gpt-tiny: {options_text('gpt-tiny')}.",
        ),
        (
            "gpt-tiny:width=130",
            "--model gpt-tiny: width=130 is not a multiple of heads=4.",
            f"Options of gpt-tiny: {options_text('gpt-tiny')}.",
        ),
    ],
)
def test_refused_specs(spec, message, remedy):
    assert refused(spec) == [message, remedy]


def test_options_text_lists_defaults():
    assert options_text("timed") == (
        "layers=8, forward_ms=5, backward_ms=10, parameters=65536, outside_backward_ms=0, "
        "buffers=0, pace=schedule, dtype=float32"
    )

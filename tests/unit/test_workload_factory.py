"""Custom factories: how they are found and called, and what is said where they fail."""

import random
import sys
import textwrap

import pytest
import torch

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.workload import build

GOOD = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from ddp_profiler.workload import ByteDataset, Workload

    seen = []

    def workload(**changes):
        values = dict(
            name="mine",
            module=nn.Linear(2, 1),
            dataset=TensorDataset(torch.zeros(4, 2)),
            inputs=lambda batch: (batch[0],),
            loss=lambda output, batch: output.mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        return Workload(**{**values, **changes})

    def make(settings):
        seen.append(settings)
        return workload()

    class Zoo:
        @staticmethod
        def make(settings):
            return workload(name="zoo", options={"own": 1})
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a fresh name into the current folder; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(body, head=GOOD):
        name = f"custom_{random.randrange(10**12)}"
        text = textwrap.dedent(head) + textwrap.dedent(body)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("custom_"):
            del sys.modules[name]


def make(spec, **settings):
    return build(spec, **{"seed": 1, "micro_batch": 4, "data": None, **settings})


def refused(spec, **settings):
    with pytest.raises(InputError) as caught:
        make(spec, **settings)
    assert "\n" not in caught.value.message + caught.value.remedy
    assert caught.value.remedy
    return caught.value.message


def test_factory_gets_its_settings(module, tmp_path):
    name = module("")
    made = make(f"{name}:make:width=3, kind=a", data=str(tmp_path / "x"))
    (settings,) = sys.modules[name].seen
    assert settings.seed == 1
    assert settings.micro_batch == 4
    assert settings.data_path == tmp_path / "x"
    assert settings.options == {"width": "3", "kind": "a"}
    assert made.name == "mine"
    assert made.options == {"width": "3", "kind": "a"}  # It recorded none itself.


def test_dotted_attribute_and_own_options(module):
    assert make(f"{module('')}:Zoo.make:a=1").options == {"own": 1}


def test_package(module, tmp_path):
    name = module("")
    (tmp_path / f"{name}_package").mkdir()
    (tmp_path / f"{name}.py").rename(tmp_path / f"{name}_package" / "inner.py")
    assert make(f"{name}_package.inner:make").name == "mine"


def test_torch_is_seeded_and_its_state_left_alone(module):
    name = module("")
    state = torch.get_rng_state()
    weights = [make(f"{name}:make", seed=seed).module.weight for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_missing_module(module):
    assert refused("custom_nowhere.models:make") == (
        "--model custom_nowhere.models:make: No module named 'custom_nowhere'."
    )
    name = module("")
    assert refused(f"{name}.inner:make") == (
        f"--model {name}.inner:make: No module named '{name}.inner'; '{name}' is not a package."
    )


def test_missing_dependency_is_not_a_missing_module(module, tmp_path):
    name = module("import nowhere_to_be_found", head="\n")
    assert refused(f"{name}:make") == (
        f"--model {name}:make: importing {name} raised ModuleNotFoundError: "
        f"No module named 'nowhere_to_be_found' ({tmp_path}/{name}.py:2)."
    )


def test_module_that_raises(module, tmp_path):
    name = module("1 / 0", head="\n")
    assert refused(f"{name}:make") == (
        f"--model {name}:make: importing {name} raised ZeroDivisionError: division by zero "
        f"({tmp_path}/{name}.py:2)."
    )


def test_module_that_exits(module, tmp_path):
    name = module("import sys; sys.exit(3)", head="\n")
    assert refused(f"{name}:make") == (
        f"--model {name}:make: importing {name} raised SystemExit: 3 ({tmp_path}/{name}.py:2)."
    )


def test_module_with_a_syntax_error(module):
    name = module("def make(:", head="\n")
    assert refused(f"{name}:make") == (
        f"--model {name}:make: importing {name} raised SyntaxError: "
        f"invalid syntax ({name}.py, line 2)."
    )


def test_missing_attribute(module, tmp_path):
    name = module("")
    assert refused(f"{name}:mkae") == (
        f"--model {name}:mkae: module {name} ({tmp_path}/{name}.py) has no mkae; did you mean make?"
    )
    assert refused(f"{name}:Zoo.zzzzz") == (
        f"--model {name}:Zoo.zzzzz: module {name} ({tmp_path}/{name}.py) has no Zoo.zzzzz."
    )


def test_not_callable(module):
    name = module("")
    assert refused(f"{name}:seen") == f"--model {name}:seen is list, not a function."


def test_wrong_number_of_arguments(module):
    name = module("def none(): pass\n")
    assert refused(f"{name}:none") == (
        f"--model {name}:none cannot be called with one argument: it takes ()."
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [("return None", "NoneType"), ("return nn.Linear(2, 1)", "Linear"), ("return 3", "int")],
)
def test_wrong_return(module, body, kind):
    name = module(f"def bad(settings): {body}\n")
    assert refused(f"{name}:bad") == f"--model {name}:bad returned {kind}, not a Workload."


def test_factory_that_raises(module, tmp_path):
    name = module("def bad(settings):\n    int(settings.options['width'])\n")
    line = len((tmp_path / f"{name}.py").read_text().splitlines())
    assert refused(f"{name}:bad") == (
        f"--model {name}:bad raised KeyError: 'width' ({tmp_path}/{name}.py:{line})."
    )
    assert refused(f"{name}:bad:width=wide") == (
        f"--model {name}:bad raised ValueError: invalid literal for int() with base 10: 'wide' "
        f"({tmp_path}/{name}.py:{line})."
    )


def test_factory_that_raises_deep_in_a_library(module, tmp_path):
    name = module("def bad(settings):\n    nn.Linear(2, 1)(torch.zeros(3, 5))\n")
    line = len((tmp_path / f"{name}.py").read_text().splitlines())
    assert refused(f"{name}:bad") == (
        f"--model {name}:bad raised RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        f"(3x5 and 2x1) ({tmp_path}/{name}.py:{line})."
    )


def test_long_messages_are_cut_to_their_first_line(module, tmp_path):
    name = module("def bad(settings): raise RuntimeError('first.\\nsecond')\n")
    assert refused(f"{name}:bad").startswith(f"--model {name}:bad raised RuntimeError: first (")
    name = module("def bad(settings): raise RuntimeError\n")
    assert refused(f"{name}:bad").startswith(f"--model {name}:bad raised RuntimeError (")


def test_faulty_workload_is_named_with_its_factory(module, tmp_path):
    name = module("def bad(settings): return workload(dataset=[])\n")
    assert refused(f"{name}:bad") == f"--model {name}:bad: Workload 'mine': dataset is empty."
    name = module(
        "def bad(settings): return workload(dataset=ByteDataset(settings.data_path, 4))\n"
    )
    missing = tmp_path / "none.txt"
    assert refused(f"{name}:bad", data=missing).startswith(
        f"--model {name}:bad: --data {missing} does not exist"
    )


def test_wrong_settings_stay_usage_errors(module):
    name = module(
        "def bad(settings):\n"
        "    from ddp_profiler.errors import UsageError\n"
        "    raise UsageError('width is odd.', 'Give an even one.')\n"
    )
    with pytest.raises(UsageError, match=r"^width is odd\.\nGive an even one\.$"):
        make(f"{name}:bad")
    with pytest.raises(UsageError, match="micro_batch 0 is below 1"):
        make(f"{name}:make", micro_batch=0)


def test_text_for_a_model_that_takes_none():
    with pytest.raises(UsageError) as caught:
        make("mlp", data="text.txt")
    assert str(caught.value) == (
        "--data text.txt: model mlp takes no text.\n"
        "Leave --data out, or choose one of: gpt-tiny, gpt-small."
    )

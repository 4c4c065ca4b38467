"""``ddp-profiler compare``: what is refused, explained and shown, and the exit codes."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_profiler import cli, load
from ddp_profiler.analysis.comparability import Launch
from ddp_profiler.cli import worker_options
from ddp_profiler.cli.compare import command
from tests.unit.study_levels import level, summary

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "hostname": "one",
    "platform": "Linux",
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": None,
    "nccl": None,
    "backend": "gloo",
    "device_type": "cpu",
    "gpus": [],
    "cpu": "Xeon",
    "cores": 2,
    "memory_bytes": 25 * 2**30,
    "threads_per_rank": 1,
    "local_world_size": 2,
    "variables": {"OMP_NUM_THREADS": "1"},
}
SETTINGS = {
    "model": "mlp:width=64",
    "model_options": {"width": 64},
    "bucket_cap_mb": 25.0,
    "precision": "fp32",
    "out": "somewhere",
}


def made(dp=2, factor=1.0, *, planted=None, **settings):
    """A level that is slower by a factor, and in a part by a share of its step."""
    one = level(dp, **settings)
    parts = {name: value * factor for name, value in one.breakdown_ms.items()}
    for name, share in (planted or {}).items():
        parts[name] += share * one.step_ms.mean
    step = sum(parts.values())
    spread = replace(
        one.step_ms, mean=step, median=step, p10=step, p90=step, ci95=(step * 0.99, step * 1.01)
    )
    return replace(one, step_ms=spread, breakdown_ms=parts)


class Folders:
    """Runs by the name of their folder, in place of those on the disk."""

    def __init__(self, root):
        self.root = root
        self.launches = {}

    def add(self, name, *levels, environment=None, created=None, run_id=None, **settings):
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").touch()
        found = summary(*levels)
        run = replace(
            found.run,
            run_id=run_id or name,
            created=created or f"2026-01-01T00:00:{len(self.launches):02d}+00:00",
            settings={**SETTINGS, **settings},
            environment={"0": {**ENVIRONMENT, **(environment or {})}},
        )
        parameters = {one.id: 1000 for one in levels}
        self.launches[folder] = Launch(name, replace(found, run=run), parameters)
        return folder

    def sides(self, base_factor=1.0, new_factor=1.0, *, launches=5, sd=0.005, planted=None, **new):
        """Launches in turns, in a folder a side."""
        random = np.random.default_rng(1)
        for number in range(launches):
            self.add(f"base/{number}", made(factor=base_factor * random.lognormal(0, sd)))
            self.add(
                f"new/{number}",
                made(factor=new_factor * random.lognormal(0, sd), planted=planted),
                **new,
            )
        return self.root / "base", self.root / "new"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    folders = Folders(tmp_path)
    monkeypatch.setattr(load, "load_launch", lambda folder: folders.launches[Path(folder)])
    return folders


def call(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *map(str, arguments)])
    out, err = capfd.readouterr()
    if "--json" not in arguments:
        assert max(map(len, out.splitlines()), default=0) <= 80
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err
    return ended.value.code, " ".join(out.split()), err


def test_planted_regression_is_named_and_fails_the_check(runs, capfd):
    base, new = runs.sides(planted={"backward": 0.1})
    code, out, err = call(capfd, base, new, "--fail-above", "5")
    assert code == 1
    assert "SLOWER" in out
    assert "by backward (+" in out
    assert "smallest change that would have been seen" in out
    assert "FAILS" in out
    assert "Slower by more than 5 %" in err
    # Without the check it is told, and is no failure; nor is it one for a larger allowance.
    assert call(capfd, base, new)[0] == 0
    assert call(capfd, base, new, "--fail-above", "60")[0] == 0
    code, out, _ = call(capfd, new, base, "--fail-above", "0")
    assert code == 0
    assert "FASTER" in out


def test_same_code_has_no_measurable_difference(runs, capfd):
    base, new = runs.sides()
    code, out, err = call(capfd, base, new, "--fail-above", "5")
    assert (code, err) == (0, "")
    assert "no measurable difference" in out
    assert "smallest change that would have been seen" in out
    assert "--fail-above 5 %: holds" in out


def test_noise_is_neither_pass_nor_failure(runs, capfd):
    base, new = runs.sides(sd=0.17)
    code, out, _ = call(capfd, base, new, "--fail-above", "5")
    assert code == 0
    assert "not shown to fail, and not shown to hold" in out
    assert re.search(r"About \d+ launches a side", out)


def test_words_after_an_option_are_its_runs(runs, capfd):
    runs.sides(launches=3, planted={"forward": 0.1})
    base, new = ([runs.root / side / str(i) for i in range(3)] for side in ("base", "new"))
    for arguments in (
        ["--base", *base, "--new", *new],
        ["--new", *new, "--json", "--base", *base],
        [f"--base={runs.root / 'base'}", "--new", *new],
        [
            item
            for pair in zip(base, new, strict=True)
            for item in ("--base", pair[0], "--new", pair[1])
        ],
    ):
        arguments = [*arguments, *([] if "--json" in arguments else ["--json"])]
        code, out, err = call(capfd, *arguments)
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert len(found["base"]) == len(found["new"]) == 3
        assert found["levels"][0]["causes"] == ["forward"]
        assert found["levels"][0]["step"]["verdict"] == "slower"
        assert found["check"] is None


def test_one_launch_a_side_says_what_it_cannot_tell(runs, capfd):
    base, new = runs.add("a", made()), runs.add("b", made(factor=1.5))
    code, out, _ = call(capfd, base, new)
    assert code == 0
    assert "cannot tell" in out
    assert "SLOWER" not in out
    assert "smallest change that could have been seen depends on" in out
    code, out, err = call(capfd, base, new, "--fail-above", "5")
    assert (code, out) == (2, "")
    assert "--launch-sd" in err
    code, out, _ = call(capfd, base, new, "--fail-above", "5", "--launch-sd", "2")
    assert code == 1
    assert "assumption that launches of the same code differ by 2 %" in out
    code, out, _ = call(capfd, base, new, "--fail-above", "5", "--launch-sd", "17")
    assert code == 0
    assert "no measurable difference" in out


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"settings": {"model": "convnet"}}, "models differ: mlp in BASE, convnet in NEW"),
        ({"level": {"dp": 4}}, "dp 2 in BASE, 4 in NEW"),
        ({"level": {"micro_batch": 16}}, "a step has 16 samples in BASE, 32 in NEW"),
        ({"level": {"accumulation": 2}}, "a step has 16 samples in BASE, 32 in NEW"),
    ],
)
def test_what_is_not_the_same_work_is_refused(runs, capfd, new, words):
    base = runs.add("a", made())
    other = runs.add("b", made(**new.get("level", {})), **new.get("settings", {}))
    code, out, err = call(capfd, base, other)
    assert (code, out) == (2, "")
    assert words in err
    assert "--anyway" in err
    code, out, err = call(capfd, base, other, "--anyway")
    assert (code, err) == (0, "")
    assert f"Compared all the same: {words}" in out or words in out


def test_other_parameters_are_another_model(runs, capfd):
    base, new = runs.add("a", made()), runs.add("b", made())
    runs.launches[new] = replace(runs.launches[new], parameters={"dp2-acc1": 999})
    code, _, err = call(capfd, base, new)
    assert code == 2
    assert "1000 parameters in BASE, 999 in NEW" in err


def test_equal_global_batches_split_differently_can_be_compared(runs, capfd):
    base = runs.add("a", made(accumulation=1, micro_batch=8))
    new = runs.add("b", made(accumulation=2, micro_batch=4))
    code, out, _ = call(capfd, base, new)
    assert code == 0
    assert "dp2-acc1 / dp2-acc2" in out


@pytest.mark.parametrize(
    ("environment", "settings", "first"),
    [
        ({"cpu": "EPYC"}, {}, "DIFFERENT MACHINES: processor Xeon -> EPYC"),
        ({"cores": 8}, {}, "DIFFERENT MACHINES: cores 2 -> 8"),
        ({"gpus": ["H100"]}, {}, "DIFFERENT MACHINES: GPUs none -> H100"),
        ({"hostname": "two"}, {}, "Different hosts of the same kind: host one -> two"),
        ({"torch": "2.14.1"}, {}, "DIFFERENT VERSIONS: torch 2.13.0 -> 2.14.1"),
        ({"nccl": "2.32.3"}, {}, "DIFFERENT VERSIONS: NCCL none -> 2.32.3"),
        ({"backend": "nccl"}, {}, "Different settings: backend gloo -> nccl"),
        ({"threads_per_rank": 2}, {}, "Different settings: threads a rank 1 -> 2"),
        (
            {"variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}},
            {},
            "Different settings: NCCL_ALGO none -> Ring",
        ),
        ({}, {"precision": "bf16"}, "Different settings: precision fp32 -> bf16"),
        ({}, {"bucket_cap_mb": 1.0}, "Different settings: bucket_cap_mb 25.0 -> 1.0"),
    ],
)
def test_what_differs_is_said_first(runs, capfd, environment, settings, first):
    base, new = runs.sides(environment=environment, **settings)
    code, out, _ = call(capfd, base, new)
    assert code == 0
    assert out.startswith(first)


def test_long_values_are_cut_to_where_they_differ(runs, capfd):
    long = ["--name=" + "x" * 400, "--lr=1e-3", "--data=" + "y" * 400]
    base = runs.add("a", made(), arguments=long)
    new = runs.add("b", made(), arguments=[long[0], "--lr=2e-3", long[2]])
    _, out, _ = call(capfd, base, new)
    told = " ".join(out.split("BASE a")[0].split())
    assert "--lr=1e-3" in told
    assert "--lr=2e-3" in told
    assert len(told) < 250


def test_a_run_on_both_sides_is_no_check(runs, capfd):
    base, _ = runs.sides()
    code, out, err = call(capfd, base, base, "--fail-above", "5")
    assert (code, out) == (2, "")
    assert "is on both sides" in err
    assert call(capfd, base, base)[0] == 0


def test_wrong_usage_names_the_commands_own_help(capfd):
    code, _, err = call(capfd, "a", "b", "--fail-above", "x")
    assert code == 2
    assert err.endswith("See ddp-profiler compare --help.\n")


def test_the_machine_is_said_before_versions_and_settings(runs, capfd):
    base, new = runs.sides(
        environment={"cpu": "EPYC", "torch": "2.14.1"}, precision="bf16", new_factor=1.2
    )
    _, out, _ = call(capfd, base, new)
    places = [out.index(w) for w in ("DIFFERENT MACHINES", "DIFFERENT VERSIONS", "Different sett")]
    assert places == sorted(places)
    assert "of the machine and of the code together" in out
    assert "with whatever the other machine changes" in out


def test_a_check_of_the_code_needs_one_machine(runs, capfd):
    base, new = runs.sides(environment={"cpu": "EPYC"}, new_factor=1.5)
    code, out, err = call(capfd, base, new, "--fail-above", "5")
    assert (code, out) == (2, "")
    assert "the machines differ: processor Xeon in BASE, EPYC in NEW" in err
    assert call(capfd, base, new, "--fail-above", "5", "--anyway")[0] == 1


def test_launches_of_a_side_must_be_alike(runs, capfd):
    base, new = runs.sides(launches=3)
    runs.add("new/3", made(), environment={"torch": "2.14.1"})
    code, _, err = call(capfd, base, new)
    assert code == 2
    assert "The launches of NEW are not alike: torch 2.13.0 and 2.14.1" in err


def test_a_copy_is_no_repetition(runs, capfd):
    base, new = runs.sides(launches=2)
    runs.add("new/copy", made(), run_id="new/1")
    code, _, err = call(capfd, base, new)
    assert code == 2
    assert "given twice in NEW" in err


def test_launches_that_did_not_alternate_are_noticed(runs, capfd):
    for side in ("base", "new"):
        for number in range(3):
            runs.add(f"{side}/{number}", made(factor=1 + number / 1000))
    _, out, _ = call(capfd, runs.root / "base", runs.root / "new")
    assert "Alternate them" in out


def test_launches_in_turns_are_not(runs, capfd):
    assert "Alternate them" not in call(capfd, *runs.sides(launches=3))[1]


def test_levels_of_one_side_are_named(runs, capfd):
    base = runs.add("a", made(1), made(2))
    new = runs.add("b", made(2), made(4))
    code, out, _ = call(capfd, base, new)
    assert code == 0
    assert "Only in BASE, left out: dp1-acc1." in out
    assert "Only in NEW, left out: dp4-acc1." in out


def test_the_same_run_twice_is_said(runs, capfd):
    base = runs.add("a", made())
    code, out, _ = call(capfd, base, base)
    assert code == 0
    assert "The same run is on both sides: a." in out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a",),
        ("a", "b", "c"),
        ("--base", "a"),
        ("--new", "b"),
        ("a", "--base", "a", "--new", "b"),
        ("a", "b", "--fail-above", "-1"),
        ("a", "b", "--fail-above", "nan"),
        ("a", "b", "--launch-sd", "0"),
        ("a", "b", "--fail-above", "5"),
        ("--base", "a", "c", "--new", "b", "--launch-sd", "2"),
    ],
)
def test_wrong_usage_exits_with_2(runs, capfd, monkeypatch, arguments):
    monkeypatch.chdir(runs.root)
    for name in "abc":
        runs.launches[Path(name)] = runs.launches[runs.add(name, made())]
    code, out, _ = call(capfd, *arguments)
    assert (code, out) == (2, "")


def test_what_is_no_run_exits_with_3(tmp_path, capfd):
    code, out, err = call(capfd, tmp_path, tmp_path / "nowhere")
    assert (code, out) == (3, "")
    assert "holds no run" in err


def test_the_workflow_for_builds_has_commands_that_are_right():
    """Its shell parses, and its options are those that there are."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / "launch" / "github-actions-compare.yml").read_text())
    # YAML 1.1 takes the key "on" for true.
    assert workflow[True] == "pull_request"
    steps = workflow["jobs"]["compare"]["steps"]
    scripts = [step["run"] for step in steps if "run" in step]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    words = " ".join(scripts).replace("\\\n", " ")
    (arguments,) = re.findall(r"ddp-profiler compare (.*?)\s*\|", words)
    context = command.make_context("compare", shlex.split(arguments))
    assert context.params["fail_above"] == 10
    assert len(context.params["runs"]) == 2
    (launched,) = re.findall(r"-m ddp_profiler.run (.*?) train.py", words)
    known = {option for parameter in worker_options.command.params for option in parameter.opts}
    assert {word for word in shlex.split(launched) if word.startswith("--")} <= known
    # A pipe would hide the exit code: bash has pipefail only where it is named.
    assert all(step.get("shell") == "bash" for step in steps if "| tee" in step.get("run", ""))

"""The worker's options where it is given a script."""

from pathlib import Path

import pytest

from ddp_profiler.cli import parse_click, worker_options
from ddp_profiler.config import ScriptConfig, StudyConfig
from ddp_profiler.errors import UsageError


def parse(*words):
    return parse_click(worker_options.command, list(words), "run")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def test_what_follows_the_script_is_its_own(script):
    config = parse("--steps", "7", "train.py", "--steps", "3", "--model", "x", "--help", "-m")
    assert isinstance(config, ScriptConfig)
    assert (config.script, config.steps, config.warmup) == ("train.py", 7, 5)
    assert config.arguments == ("--steps", "3", "--model", "x", "--help", "-m")


def test_module():
    config = parse("--module", "--batch-dim", "1", "package.train", "--lr", "3e-4")
    assert (config.module, config.script, config.batch_dim) == (True, "package.train", 1)
    assert config.arguments == ("--lr", "3e-4")


def test_windows(script):
    assert parse("train.py").every is None
    assert parse("--every", "41", "train.py").every == 41


def test_without_a_script_it_is_a_study():
    assert isinstance(parse("--steps", "3"), StudyConfig)


@pytest.mark.parametrize(
    "option",
    [
        ("--model", "mlp"),
        ("--data", "train.py"),
        ("--dp", "2"),
        ("--kineto", "2"),
        ("--placement", "packed"),
        ("--accumulate", "2"),
        ("--micro-batch", "2"),
        ("--scaling", "weak"),
        ("--global-batch", "4"),
        ("--repeat", "2"),
        ("--precision", "fp32"),
        ("--bucket-cap-mb", "1"),
        ("--allreduce-max-mb", "1"),
        ("--link-gbps", "1"),
        ("--backend", "gloo"),
        ("--threads-per-rank", "1"),
        ("--seed", "1"),
        ("--plant", "part=backward,ms=30"),
    ],
)
def test_options_of_studies_are_refused(script, option):
    with pytest.raises(UsageError, match=f"{option[0]} belongs to studies, not to a script"):
        parse(*option, "train.py")


@pytest.mark.parametrize(
    "option",
    [("--module",), ("--batch-dim", "1"), ("--every", "99"), ("--replay", "package.module:loss")],
)
def test_options_of_scripts_need_one(option):
    with pytest.raises(UsageError, match=f"{option[0]} needs the SCRIPT"):
        parse(*option)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "There is no script missing.py"),
        (["--warmup", "1", "train.py"], "--warmup 1 is below 2"),
        (["--steps", "0", "train.py"], "--steps 0 is below 1"),
        (["--every", "40", "train.py"], "--every 40 is not above 40, the length of a window"),
        (["--steps", "5", "--every", "0", "train.py"], "--every 0 is not above 10"),
        (["--batch-dim", "-1", "train.py"], "--batch-dim -1 is below 0"),
        (["--expect-global-batch", "0", "train.py"], "--expect-global-batch 0 is below 1"),
        (["--timeout", "0", "train.py"], "--timeout 0 is no time"),
        (["--replay", "oracle", "train.py"], "--replay oracle is not of the form"),
        (["--replay", "a-b:loss", "train.py"], "--replay a-b:loss is not of the form"),
        (["--replay", ":loss", "train.py"], "--replay :loss is not of the form"),
        (["--replay", "a:b", "--warmup", "2", "train.py"], "--warmup 2 is too few for --replay"),
    ],
)
def test_settings_out_of_range(script, words, message):
    with pytest.raises(UsageError, match=message):
        parse(*words)

"""A script at several dp: one launch each, one table."""

import json

import pytest

from tests.integration.conftest import ROOT, run_command

pytestmark = pytest.mark.distributed

SCRIPT = ROOT / "tests" / "integration" / "scripts" / "sized.py"
STUDY = ("-m", "ddp_profiler.cli", "study", "--steps", "4", "--warmup", "2")


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Global batch 16 at dp 1 and 2: half of the samples, and of the sleep, on each of two."""
    folder = tmp_path_factory.mktemp("study") / "run"
    keep = ("--keep-global-batch", "--batch-size")
    done = run_command(
        [*STUDY, "--dp", "1,2", *keep, "--out", folder, "--", SCRIPT, "--batch-size", "16"]
    )
    assert done.code == 0, done.err[-3000:]
    done.folder = folder
    return done


def test_levels_are_the_launches(strong):
    assert [level["dp"] for level in strong.summary["levels"]] == [1, 2]
    assert [level["micro_batch"] for level in strong.summary["levels"]] == [16, 8]
    assert [lv["batch_check"]["observed"] for lv in strong.summary["levels"]] == [16, 16]
    assert not strong.summary["run"]["partial"]


def test_efficiency_is_that_of_the_kept_batch(strong):
    double = strong.level("dp2")
    assert double["reference"] == "dp1"
    # 48 ms and 24 ms of sleep, and what a step takes besides.
    assert 1.3 < double["speedup"] <= 2.1
    assert double["efficiency"] == pytest.approx(double["speedup"] / 2)


def test_progress_and_logs_are_there(strong):
    assert "[1/2] dp 1" in strong.err
    assert f"Run folder: {strong.folder}" in strong.out
    logs = sorted(path.name for path in (strong.folder / "launches").glob("*.log"))
    assert logs == ["dp1.log", "dp2.log"]
    info = json.loads((strong.folder / "run.json").read_text())
    assert info["settings"]["keep_global_batch"] == "--batch-size"


def test_a_script_that_fails_ends_the_study_with_its_cause(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('planted')\n")
    done = run_command([*STUDY, "--dp", "1", "--out", tmp_path / "run", "--", script])
    assert done.code == 3
    assert "The launch at dp 1 ended with 1" in done.err
    assert "planted" in done.err
    assert str(tmp_path / "run" / "launches" / "dp1.log") in done.err
    assert "Traceback" not in done.err

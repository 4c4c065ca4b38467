"""A script at several dp: one launch each, one table."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, Looks, run_command, timed

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

SCRIPT = ROOT / "tests" / "integration" / "scripts" / "sized.py"
STUDY = ("-m", "ddp_profiler.cli", "study", "--steps", "4", "--warmup", "2")


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """The same study twice at once, in one folder and without --out.

    Global batch 16 at dp 1 and 2: half of the samples, and of the sleep, on each of two.
    """
    return Looks(lambda: two_at_once(tmp_path_factory))


def two_at_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("studies")
    keep = ("--keep-global-batch", "--batch-size")
    argv = [*STUDY, "--dp", "1,2", *keep, "--", SCRIPT, "--batch-size", "16"]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_command(argv, cwd=root), range(2)))
    for done in both:
        assert done.code == 0, done.err[-3000:]
        (name,) = re.findall(r"Run folder: (.+)", done.out)
        done.folder = root / name
    return both


@pytest.fixture
def studies(looks):
    return looks.last


@pytest.fixture
def strong(studies):
    return studies[0]


def test_two_studies_at_once_both_finish(studies):
    first, second = studies
    assert first.folder != second.folder
    ids = {
        launch["run_id"]
        for study in studies
        for launch in map(json.loads, map(Path.read_text, study.folder.glob("launches/*/run.json")))
    }
    assert len(ids) == 4
    for study in studies:
        assert [level["dp"] for level in study.summary["levels"]] == [1, 2]
        assert not study.summary["run"]["partial"]


def test_levels_are_the_launches(strong):
    assert [level["dp"] for level in strong.summary["levels"]] == [1, 2]
    assert [level["micro_batch"] for level in strong.summary["levels"]] == [16, 8]
    assert [lv["batch_check"]["observed"] for lv in strong.summary["levels"]] == [16, 16]
    assert not strong.summary["run"]["partial"]


@timed
def test_efficiency_is_that_of_the_kept_batch(looks):
    double = looks[0].level("dp2")
    assert double["reference"] == "dp1"
    # 48 ms and 24 ms of sleep, and what a step takes besides.
    assert 1.3 < double["speedup"] <= 2.1
    assert double["efficiency"] == pytest.approx(double["speedup"] / 2)


def test_progress_and_logs_are_there(strong):
    assert "[1/2] dp 1" in strong.err
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

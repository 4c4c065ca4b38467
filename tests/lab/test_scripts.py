"""A script on two nodes whose clocks are seconds apart and that share no folder."""

import json

import pytest

from ddp_profiler.record import paths, reader
from tests.integration.conftest import Looks, run_command, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

SHIFT_S = 5.0
MS = 60
"""How much later rank 1 is, as planted in the script."""


@pytest.fixture(scope="module")
def observed(usable, tmp_path_factory):
    """The nodes' outputs and folders."""

    def measure():
        return observe_once(tmp_path_factory.mktemp("nodes"))

    return Looks(measure)


def observe_once(root):
    (root / "runs").mkdir()
    options = (
        *("-m", "ddp_profiler.run", "--steps", "5", "--warmup", "3", "--out", "runs/run"),
        str(ROOT / "tests" / "integration" / "scripts" / "late.py"),
    )
    with lab_tool.Lab(
        nodes=2, rate_mbit=1000, clock_shift={1: SHIFT_S}, private_dirs=[root / "runs"]
    ) as lab:
        results = lab.run_torchrun(
            options, timeout=120, cwd=root, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
    assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
    return results, [root / f"runs.node{node}" / "run" for node in range(2)]


def joined(folders):
    out = folders[0].parents[1] / "joined"
    if not out.exists():
        done = run_command(["-m", "ddp_profiler.cli", "merge", *folders, "--out", out])
        assert done.code == 0, done.err
    shown = run_command(["-m", "ddp_profiler.cli", "analyze", out, "--json"])
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_the_script_is_left_alone(observed):
    results, _ = observed.last
    assert [r.stdout for r in results] == ["trained\n"] * 2
    assert not [r.stderr for r in results if "has failed" in r.stderr]


def test_each_node_keeps_a_part_and_rank_0_says_so(observed):
    results, folders = observed.last
    for rank, folder in enumerate(folders):
        assert sorted(paths.rank_files(folder)) == [rank]
        info = reader.read_run_info(folder)
        assert (info.status, info.keeper, len(info.levels)) == ("complete", rank, 1)
        assert [part.ranks for part in info.parts] == [(0,), (1,)]
    assert "keep their own: rank 1 on node1 in " in results[0].stderr
    assert "ddp-profiler merge" in results[0].stderr
    assert "PARTIAL" in results[0].stderr
    assert "ms a step" not in results[1].stderr


def test_comparisons_hold_the_true_offset(observed):
    # However noisy the machine was.
    for _, folders in observed.seen:
        readings = reader.read_run_info(folders[0]).clocks
        # Before the script, in the warm-up, and after the observed steps.
        assert [reading.rank for reading in readings] == [1, 1, 1]
        for reading in readings:
            assert reading.low_ns <= SHIFT_S * 1e9 <= reading.high_ns


@timed
def test_offsets_are_known_to_some_ms(observed):
    for reading in reader.read_run_info(observed[1][0]).clocks:
        assert reading.high_ns - reading.low_ns < 20e6


@timed
def test_waiting_and_straggler_are_those_of_one_clock(observed):
    summary = joined(observed[1])
    (level,) = summary["levels"]
    assert not summary["run"]["partial"]
    assert level["batch_check"]["observed"] == 8
    late = level["straggler"]
    assert (late["rank"], late["cause"], late["fixed"]) == (1, "forward", True)
    assert late["lag_ms"] == pytest.approx(MS, abs=15)
    assert level["ranks"][0]["breakdown_ms"]["exposed_wait"] == pytest.approx(MS, abs=20)
    assert sorted(summary["run"]["environment"]) == ["0", "1"]

"""Nodes whose clocks are seconds apart: found to a fraction of a ms, and nothing else changes."""

import json

import pytest

from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

SHIFT_S = 5.0
MS = 60


@pytest.fixture(scope="module")
def measured(usable, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "run"
    options = (
        *("-m", "ddp_profiler.run", "--model", "timed:layers=4,parameters=4096", "--dp", "2"),
        *("--steps", "10", "--warmup", "2", "--allreduce-max-mb", "0", "--threads-per-rank", "1"),
        *("--plant", f"part=backward,ms={MS},rank=1", "--out", str(folder)),
    )
    with lab_tool.Lab(nodes=2, rate_mbit=1000, clock_shift={1: SHIFT_S}) as lab:
        results = lab.run_torchrun(
            options, timeout=150, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
    assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
    return folder


def test_each_comparison_holds_the_true_offset(measured):
    readings = json.loads((measured / "run.json").read_text())["clocks"]
    assert len(readings) == 2
    for reading in readings:
        assert reading["rank"] == 1
        assert reading["low_ns"] <= SHIFT_S * 1e9 <= reading["high_ns"]
        assert reading["high_ns"] - reading["low_ns"] < 20e6


def test_waiting_and_straggler_are_those_of_one_clock(measured):
    (level,) = json.loads((measured / "summary.json").read_text())["levels"]
    late = level["straggler"]
    assert (late["rank"], late["cause"], late["fixed"]) == (1, "backward", True)
    assert late["lag_ms"] == pytest.approx(MS, abs=15)
    early = level["ranks"][0]["breakdown_ms"]
    assert early["exposed_wait"] == pytest.approx(MS, abs=20)

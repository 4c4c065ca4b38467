"""A late rank, a slow link and clocks that are seconds apart, all at once: each is told apart."""

import json

import pytest

from tests.integration.conftest import Looks, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

RATE_MBIT = 500
LATE_MS = 150
SHIFT_S = 5.0
"""Node 1's clock is ahead."""
GRADIENTS = 4 * 1_000_000 * 4


@pytest.fixture(scope="module")
def measured(usable, tmp_path_factory):
    """What a plain socket stream carries, and the run that was measured beside it."""

    def measure():
        folder = tmp_path_factory.mktemp("lab") / "run"
        model = "timed:layers=4,parameters=1000000"
        options = (
            *("-m", "ddp_profiler.run", "--model", model, "--dp", "2", "--out", str(folder)),
            *("--steps", "6", "--warmup", "2", "--allreduce-max-mb", "0"),
            *("--threads-per-rank", "1", "--plant", f"part=backward,ms={LATE_MS},rank=1"),
        )
        with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT, clock_shift={1: SHIFT_S}) as lab:
            stream = sorted(lab_tool.socket_stream_gbit(lab) for _ in range(3))[1]
            results = lab.run_torchrun(
                options, timeout=150, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            )
        assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
        (level,) = json.loads((folder / "summary.json").read_text())["levels"]
        return stream, level, json.loads((folder / "run.json").read_text())["clocks"]

    return Looks(measure)


def bound_ms(nbytes, stream_gbit):
    return nbytes * 8 / (stream_gbit * 1e9) * 1e3


@timed
def test_waiting_and_transfer_are_told_apart(measured):
    stream, level, _ = measured
    early, late = (rank["breakdown_ms"] for rank in level["ranks"])
    assert early["exposed_wait"] == pytest.approx(LATE_MS, rel=0.15)
    assert late["exposed_wait"] < LATE_MS / 5
    for rank in (early, late):
        assert rank["exposed_transfer"] == pytest.approx(bound_ms(GRADIENTS, stream), rel=0.15)


@timed
def test_the_late_rank_is_named_and_nobody_else(measured):
    _, level, _ = measured
    assert [(s["rank"], s["cause"], s["at"]) for s in level["stragglers"]] == [
        (1, "backward", "gradient_reduction")
    ]
    assert level["straggler"]["fixed"]
    assert level["straggler"]["lag_ms"] == pytest.approx(LATE_MS, rel=0.15)


def test_each_comparison_of_clocks_holds_the_true_offset(measured):
    # However noisy the machine was.
    for _, _, readings in measured.seen:
        assert [reading["rank"] for reading in readings] == [1, 1]
        for reading in readings:
            assert reading["low_ns"] <= SHIFT_S * 1e9 <= reading["high_ns"]


@timed
def test_offsets_are_known_to_some_ms(measured):
    for reading in measured[2]:
        assert reading["high_ns"] - reading["low_ns"] < 20e6

"""A late rank and a slow link at once: waiting and transfer are told apart."""

import json

import pytest

from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

RATE_MBIT = 500
LATE_MS = 150
GRADIENTS = 4 * 1_000_000 * 4


@pytest.fixture(scope="module")
def measured(usable, tmp_path_factory):
    """What a plain socket stream carries, and the level that was measured beside it."""
    folder = tmp_path_factory.mktemp("lab") / "run"
    model = "timed:layers=4,parameters=1000000"
    options = (
        *("-m", "ddp_profiler.run", "--model", model, "--dp", "2", "--out", str(folder)),
        *("--steps", "6", "--warmup", "2", "--allreduce-max-mb", "0", "--threads-per-rank", "1"),
        *("--plant", f"part=backward,ms={LATE_MS},rank=1"),
    )
    with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT) as lab:
        stream = sorted(lab_tool.socket_stream_gbit(lab) for _ in range(3))[1]
        results = lab.run_torchrun(
            options, timeout=150, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
    assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
    (level,) = json.loads((folder / "summary.json").read_text())["levels"]
    return stream, level


def bound_ms(nbytes, stream_gbit):
    return nbytes * 8 / (stream_gbit * 1e9) * 1e3


def test_waiting_and_transfer_are_told_apart(measured):
    stream, level = measured
    early, late = (rank["breakdown_ms"] for rank in level["ranks"])
    assert early["exposed_wait"] == pytest.approx(LATE_MS, rel=0.15)
    assert late["exposed_wait"] < LATE_MS / 5
    for rank in (early, late):
        assert rank["exposed_transfer"] == pytest.approx(bound_ms(GRADIENTS, stream), rel=0.15)


def test_the_late_rank_is_named_and_nobody_else(measured):
    _, level = measured
    assert [(s["rank"], s["cause"], s["at"]) for s in level["stragglers"]] == [
        (1, "backward", "gradient_reduction")
    ]
    assert level["straggler"]["lag_ms"] == pytest.approx(LATE_MS, rel=0.15)

"""A step that reduces in every micro-step: what it wastes is told from that run alone."""

import json

import pytest

from tests.integration.conftest import Looks, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

RATE_MBIT = 500
ACCUMULATION = 4
PARAMETERS = 400_000
OPTIONS = (
    *("-m", "ddp_profiler.run", "--model", f"timed:layers=4,parameters={PARAMETERS}", "--dp", "2"),
    *("--steps", "3", "--warmup", "2", "--allreduce-max-mb", "4", "--threads-per-rank", "1"),
    *("--accumulate", str(ACCUMULATION), "--bucket-cap-mb", "1.2"),
    *("--plant", "sync=always", "--confirm"),
)


@pytest.fixture(scope="module")
def run(usable, tmp_path_factory):
    """A study as if no_sync had been forgotten, which then measures what it would bring."""

    def measure():
        folder = tmp_path_factory.mktemp("lab") / "run"
        with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT) as lab:
            results = lab.run_torchrun(
                (*OPTIONS, "--out", str(folder)),
                timeout=200,
                env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
        return json.loads((folder / "summary.json").read_text()), results[0].output

    return Looks(measure)


def level(summary):
    return summary["levels"][0]


@timed
def test_the_gain_that_is_promised_is_what_no_sync_brings(run):
    summary, output = run
    (finding,) = (f for f in summary["findings"] if f["id"] == "needless-reductions")
    buckets, step = level(summary)["comm"]["num_buckets"], level(summary)["step_ms"]["mean"]
    assert (
        f"{ACCUMULATION * buckets} gradient collectives a step for {buckets} buckets: 4 x"
        in (finding["message"])
    )
    found = summary["confirmation"]
    assert (found["setting"], found["level"], found["problem"]) == ("reduce_once", "dp2-acc4", "")
    assert finding["expected_gain_ms"] == pytest.approx(found["gain_ms"], rel=0.2)
    assert finding["expected_gain_pct"] == pytest.approx(100 * finding["expected_gain_ms"] / step)
    # By replay as well; and the setting as it was is the one that had been measured.
    assert found["predicted_gain_ms"] == pytest.approx(found["gain_ms"], rel=0.2)
    assert found["before_ms"] == pytest.approx(step, rel=0.15)
    assert found["ci95_ms"][0] <= found["gain_ms"] <= found["ci95_ms"][1]
    assert "confirmed: dp2-acc4: reduce in the last micro-step only" in output


def test_each_micro_step_reduces_all_gradients(run):
    comm = level(run.last[0])["comm"]
    assert comm["num_buckets"] > 1
    assert comm["num_gradient_collectives_per_step"] == ACCUMULATION * comm["num_buckets"]
    assert comm["gradient_bytes"] == ACCUMULATION * 4 * PARAMETERS * 4


def test_gradients_stay_right(run):
    check = level(run.last[0])["batch_check"]
    assert check["ranks_agree"]
    assert check["gradient_max_rel_error"] < 1e-4

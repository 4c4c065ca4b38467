"""A step that reduces in every micro-step: what it wastes is predicted from that run alone."""

import json

import pytest

from tests.integration.conftest import Looks, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

RATE_MBIT = 500
ACCUMULATION = 4
OPTIONS = (
    *("-m", "ddp_profiler.run", "--model", "timed:layers=4,parameters=400000", "--dp", "2"),
    *("--steps", "3", "--warmup", "2", "--allreduce-max-mb", "0", "--threads-per-rank", "1"),
    *("--accumulate", str(ACCUMULATION), "--bucket-cap-mb", "1.2"),
)


@pytest.fixture(scope="module")
def summaries(usable, tmp_path_factory):
    """The same study as it should be, and as if no_sync had been forgotten."""

    def measure():
        found = {}
        with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT) as lab:
            for name, plant in (("once", ()), ("always", ("--plant", "sync=always"))):
                folder = tmp_path_factory.mktemp("lab") / "run"
                results = lab.run_torchrun(
                    (*OPTIONS, "--out", str(folder), *plant),
                    timeout=150,
                    env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
                assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
                found[name] = json.loads((folder / "summary.json").read_text())
        return found

    return Looks(measure)


def level(summary):
    return summary["levels"][0]


def findings(summary):
    return [f for f in summary["findings"] if f["id"] == "needless-reductions"]


@timed
def test_the_gain_that_is_promised_is_what_no_sync_brings(summaries):
    once, always = (summaries[name] for name in ("once", "always"))
    assert findings(once) == []
    (finding,) = findings(always)
    buckets = level(always)["comm"]["num_buckets"]
    assert (
        f"{ACCUMULATION * buckets} gradient collectives a step for {buckets} buckets: 4 x"
        in (finding["message"])
    )
    gained = level(always)["step_ms"]["mean"] - level(once)["step_ms"]["mean"]
    assert finding["expected_gain_ms"] == pytest.approx(gained, rel=0.2)
    assert finding["expected_gain_pct"] == pytest.approx(
        100 * finding["expected_gain_ms"] / level(always)["step_ms"]["mean"]
    )


def test_each_micro_step_reduces_all_gradients(summaries):
    once, always = (level(summaries.last[name])["comm"] for name in ("once", "always"))
    assert once["num_gradient_collectives_per_step"] == once["num_buckets"] > 1
    assert always["num_gradient_collectives_per_step"] == ACCUMULATION * once["num_buckets"]
    assert always["gradient_bytes"] == ACCUMULATION * once["gradient_bytes"]


def test_gradients_stay_right(summaries):
    check = level(summaries.last["always"])["batch_check"]
    assert check["ranks_agree"]
    assert check["gradient_max_rel_error"] < 1e-4

"""A slow link between nodes is found as exposed transfer, of the size that the link dictates."""

import json

import pytest

from tests.integration.conftest import Looks, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

BUCKET = 4 * 1_000_000 * 4
"""Four layers of a million fp32 numbers, in one bucket: nothing can overlap."""
RATE_MBIT = 500


@pytest.fixture(scope="module")
def measured(usable, tmp_path_factory):
    def measure():
        folder = tmp_path_factory.mktemp("lab") / "run"
        options = (
            *("-m", "ddp_profiler.run", "--model", "timed:layers=4,parameters=1000000"),
            *("--steps", "3", "--warmup", "2", "--allreduce-max-mb", "0"),
            *("--threads-per-rank", "1"),
            *("--plant", "part=data,ms=20,level_dp=2", "--out", str(folder)),
        )
        with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT) as lab:
            stream = sorted(lab_tool.socket_stream_gbit(lab) for _ in range(3))[1]
            results = lab.run_torchrun(
                options, timeout=150, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            )
        assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
        summary = json.loads((folder / "summary.json").read_text())
        found = {finding["id"]: finding["message"] for finding in summary["findings"]}
        return stream, {level["dp"]: level for level in summary["levels"]}, found

    return Looks(measure)


def test_nodes_are_told_apart(measured):
    _, levels, _ = measured.last
    assert (levels[1]["nodes"], levels[2]["nodes"]) == (1, 2)


@timed
def test_exposed_transfer_is_what_the_link_dictates(measured):
    stream_gbit, levels, _ = measured
    # Ring bound: 2(n-1)/n x S/B, which is S/B at n = 2.
    bound_ms = BUCKET * 8 / (stream_gbit * 1e9) * 1e3
    transfer = levels[2]["waterfall_ms"]["exposed_transfer"]
    assert transfer == pytest.approx(bound_ms, rel=0.15)
    assert levels[2]["allreduce"]["buckets"][0]["time_ms"] == pytest.approx(bound_ms, rel=0.15)


@timed
def test_the_ring_bound_stands_beside_the_measured_time(measured):
    stream_gbit, levels, _ = measured
    found = levels[2]["allreduce"]
    link = found["link"]
    assert (link["name"], link["kind"], link["source"], link["ranks"]) == (
        "node0-node1",
        "between_nodes",
        "measured",
        [0, 1],
    )
    assert link["gbit_per_s"] == pytest.approx(stream_gbit, rel=0.05)
    bound_ms = BUCKET * 8 / (stream_gbit * 1e9) * 1e3
    for bound in (found["buckets"][0]["ring_bound_ms"], found["buckets_ring_bound_ms"]):
        assert bound == pytest.approx(bound_ms, rel=0.05)
    assert levels[1]["allreduce"] is None


@timed
def test_other_terms_stay_what_they_were(measured):
    _, levels, _ = measured
    falls = levels[2]["waterfall_ms"]
    assert falls["data"] == pytest.approx(20 * levels[2]["accumulation"], abs=8)
    assert abs(falls["residual"]) <= 0.03 * falls["measured"] + 5
    terms = [term for term in falls if term not in ("bare", "measured")]
    assert max(terms, key=lambda term: falls[term]) == "exposed_transfer"


@timed
def test_the_finding_names_the_network(measured):
    _, levels, found = measured
    assert levels[2]["efficiency"] < 0.6
    assert "from dp 1 to dp 2" in found["efficiency-drop"]
    assert "gradients cross the network between nodes" in found["efficiency-drop"]
    assert "exposed transfer" in found["dominant-loss"]

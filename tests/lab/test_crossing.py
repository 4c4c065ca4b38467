"""What crossing nodes costs is the link's time, found from a level packed and one spread."""

import json

import pytest

from tests.integration.conftest import Looks, timed
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

BUCKET = 4 * 1_000_000 * 4
"""Four layers of a million fp32 numbers, in one bucket: nothing can overlap."""
RATE_MBIT = 250


@pytest.fixture(scope="module")
def measured(usable, tmp_path_factory):
    def measure():
        folder = tmp_path_factory.mktemp("lab") / "run"
        options = (
            *("-m", "ddp_profiler.run", "--model", "timed:layers=4,parameters=1000000"),
            *("--dp", "2", "--steps", "4", "--warmup", "2", "--allreduce-max-mb", "0"),
            *("--threads-per-rank", "1", "--out", str(folder)),
        )
        with lab_tool.Lab(nodes=2, rate_mbit=RATE_MBIT) as lab:
            stream = sorted(lab_tool.socket_stream_gbit(lab, megabytes=16) for _ in range(3))[1]
            results = lab.run_torchrun(
                options, nproc_per_node=2, timeout=150, env={"PYTHONPATH": str(ROOT)}
            )
        assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
        summary = json.loads((folder / "summary.json").read_text())
        record = json.loads((folder / "run.json").read_text())
        return stream, summary, record, results[0].output

    return Looks(measure)


def test_dp_2_is_measured_on_one_node_and_over_both(measured):
    _, summary, record, output = measured.last
    found = [(v["id"], v["placement"], v["nodes"]) for v in summary["levels"]]
    assert found == [("dp2", "packed", 1), ("dp2-spread", "spread", 2)]
    assert [level["ranks"] for level in record["levels"]] == [[0, 1], [0, 2]]
    assert "levels: dp2, dp2-spread" in output
    assert "[2/2] dp2-spread" in output


@timed
def test_the_price_is_the_time_on_the_link(measured):
    stream_gbit, summary, *_ = measured
    packed, spread = summary["levels"]
    # At n = 2 the ring bound is S/B; within a node the same bytes take a moment as well.
    link_ms = BUCKET * 8 / (stream_gbit * 1e9) * 1e3
    within_ms = packed["breakdown_ms"]["exposed_transfer"]
    assert within_ms < 0.3 * link_ms
    assert spread["crossing_ms"] == pytest.approx(link_ms - within_ms, rel=0.2)
    share = spread["crossing_ms"] / spread["step_ms"]["median"]
    assert spread["crossing_fraction"] == pytest.approx(share)
    assert packed["crossing_ms"] is None


@timed
def test_the_finding_says_it(measured):
    _, summary, _, output = measured
    (found,) = [f for f in summary["findings"] if f["id"] == "node-crossing"]
    assert found["message"].startswith("Crossing nodes costs ")
    assert found["message"].endswith(" at dp 2.")
    assert "of it crossing nodes" in output


@timed
def test_each_ring_has_the_bound_of_its_own_link(measured):
    stream_gbit, summary, *_ = measured
    within, between = (level["allreduce"]["link"] for level in summary["levels"])
    assert (within["kind"], within["ranks"]) == ("within_node", [0, 1])
    assert (between["kind"], between["ranks"]) == ("between_nodes", [0, 2])
    assert between["gbit_per_s"] == pytest.approx(stream_gbit, rel=0.05)
    assert within["gbit_per_s"] > 2 * stream_gbit

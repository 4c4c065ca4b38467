"""Collectives of modules are found in forward and backward, apart from gradients."""

import pytest

from tests.integration.conftest import timed

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

MODEL = "tests.integration.sync_norm:make"
OPTIONS = ("--steps", "6", "--warmup", "2", "--threads-per-rank", "1", "--bucket-cap-mb", "0.1")
FORWARD, BACKWARD, REST = 15.0, 25.0, 4.0
ACCUMULATION = 2
MARGIN = 8.0
"""In ms, of what passes between sleeps on a busy machine in a step."""


@pytest.fixture(scope="module")
def late(look):
    """Rank 1 comes late to its collectives; all ranks sleep elsewhere as well."""
    return look(
        2,
        *("--model", f"{MODEL}:rank=1,forward_ms={FORWARD},backward_ms={BACKWARD},rest_ms={REST}"),
        *("--accumulate", str(ACCUMULATION)),
        *OPTIONS,
    )


@timed
def test_the_others_wait_for_the_late_rank_in_its_collectives(late):
    early, last = (rank["breakdown_ms"] for rank in late.level("dp2-acc2")["ranks"])
    for part, planted in (("forward", FORWARD), ("backward", BACKWARD)):
        lag = ACCUMULATION * planted
        assert early[f"{part}_comm"] - last[f"{part}_comm"] == pytest.approx(lag, abs=MARGIN)
        assert last[part] - early[part] == pytest.approx(lag, abs=MARGIN)
        # Sleeping elsewhere is no communication.
        assert early[part] == pytest.approx(ACCUMULATION * REST, abs=MARGIN)


@timed
def test_parts_sum_to_the_step_and_leave_little(late):
    level = late.level("dp2-acc2")
    parts, step = level["breakdown_ms"], level["instrumented_step_ms"]["mean"]
    assert sum(parts.values()) == pytest.approx(step, rel=1e-3)
    assert -0.001 <= parts["other"] <= 0.01 * step + 1
    assert abs(level["costs_ms"]["sync_backward"]) < MARGIN


def test_they_are_no_gradient_collectives(late):
    comm = late.last.level("dp2-acc2")["comm"]
    assert comm["num_gradient_collectives_per_step"] == comm["num_buckets"] > 1
    assert comm["sources"]["forward_comm"] == comm["sources"]["backward_comm"] == "dist_functions"


@timed
def test_alone_they_take_no_time(late):
    parts = late.level("dp1-acc2")["breakdown_ms"]
    assert parts["forward_comm"] + parts["backward_comm"] < MARGIN


@pytest.fixture(scope="module")
def asynchronous(look):
    return look(2, "--model", f"{MODEL}:rank=0,forward_ms=15,async=yes", "--dp", "2", *OPTIONS)


@timed
def test_an_asynchronous_collective_is_its_wait(asynchronous):
    last, early = (r["breakdown_ms"] for r in asynchronous.level("dp2")["ranks"])
    assert early["forward_comm"] - last["forward_comm"] == pytest.approx(15, abs=MARGIN)


@pytest.fixture(scope="module")
def broadcasting(look):
    return look(
        2,
        *("--model", "timed:layers=2,buffers=1000", "--plant", "part=data,ms=20,rank=0"),
        *("--dp", "2", "--steps", "6", "--warmup", "2", "--threads-per-rank", "1"),
    )


@timed
def test_buffer_broadcasts_are_communication_in_forward(broadcasting):
    level = broadcasting.level("dp2")
    last, early = (rank["breakdown_ms"] for rank in level["ranks"])
    # Buffers come from rank 0: whoever is there before it waits.
    assert early["forward_comm"] == pytest.approx(20, abs=MARGIN)
    assert last["forward_comm"] < MARGIN
    assert early["backward_comm"] == last["backward_comm"] == 0
    comm = level["comm"]
    assert comm["num_gradient_collectives_per_step"] == comm["num_buckets"]

"""A step replayed from ingredients made by hand."""

from dataclasses import replace

import pytest

from ddp_profiler.predict.buckets import Bucket
from ddp_profiler.predict.network import Curve, NetworkModel
from ddp_profiler.predict.step import Ingredients, Scatter, replay_step

# 1 ms for each byte: a ring of 2 passes all bytes once.
NETWORK = NetworkModel(
    curve=Curve("ring", 0.0, 0.0, 1.0),
    rivals=(Curve("ring", 0.0, 0.0, 2.0),),
    error=0.01,
    held_out=(),
    unit="sizes",
    ranks=(2,),
    sizes=(1, 100),
    between_nodes=False,
)
GIVEN = Ingredients(
    dp=2,
    micro_steps=1,
    syncs=1.0,
    own={"data": 1.0, "forward": 10.0, "backward": 40.0, "other": 2.0},
    late_backward=0.0,
    buckets=(Bucket(20, 0.5), Bucket(20, 1.0)),
    copy=(1.0, 2.0),
    fill=0.0,
    fill_error=0.0,
    contention_per_byte=0.0,
    contention_unseen=False,
    wait=3.0,
    optimizer=5.0,
    forward_comm=0.5,
    backward_comm=0.25,
    at_once=1,
)


def parts(given=GIVEN, network=NETWORK, drawn=None):
    return replay_step(given, network, drawn or Scatter()).parts_ms


def test_parts_of_a_step():
    # Buckets are ready at 20 and 40 and travel until 40 and 60; the last is then copied.
    assert parts() == pytest.approx(
        {
            "data": 1.0,
            "forward": 10.0,
            "forward_comm": 0.5,
            "backward": 40.0,
            "backward_comm": 0.25,
            "exposed_wait": 3.0,
            "exposed_transfer": 20.0,
            "exposed_copy": 2.0,
            "optimizer": 5.0,
            "other": 2.0,
        }
    )
    found = replay_step(GIVEN, NETWORK)
    assert found.step_ms == pytest.approx(83.75)
    assert found.allreduce_ms == 40.0
    assert found.backward.overlapped_ms == 20.0


def test_micro_steps_and_reductions_multiply_what_is_theirs():
    found = parts(replace(GIVEN, micro_steps=4, syncs=4.0, fill=1.5))
    assert (found["forward"], found["data"], found["other"]) == (40.0, 4.0, 8.0)
    assert found["backward"] == pytest.approx(4 * 41.5)
    assert found["exposed_wait"] == 12.0
    # Filling stretches backward, so the first bucket hides a little more: 20.75 + 20 < 41.5.
    assert found["exposed_transfer"] == pytest.approx(80.0)
    assert found["exposed_copy"] == pytest.approx(8.0)
    assert (found["optimizer"], found["forward_comm"]) == (5.0, 0.5)


def test_contention_lengthens_backward_by_what_travels_beside_it():
    # Half of 40 bytes travel beside backward: 20 x 0.1 ms.
    found = parts(replace(GIVEN, contention_per_byte=0.1))
    assert found["backward"] == pytest.approx(42.0, abs=0.2)


def test_contention_is_at_most_the_time_in_which_something_travels():
    found = parts(replace(GIVEN, contention_per_byte=1e9))
    # 20 ms of travel beside backward, that grows while backward does; never more than all 40.
    assert 60.0 <= found["backward"] <= 80.0


def test_each_uncertainty_moves_its_own_part():
    given = replace(GIVEN, contention_per_byte=0.1, fill=2.0, fill_error=1.0)
    base = parts(given)

    def changed(**drawn):
        found = parts(given, drawn=Scatter(**drawn))
        return {part for part in found if found[part] != pytest.approx(base[part])}

    assert changed(wait=2.0) == {"exposed_wait"}
    assert "exposed_transfer" in changed(network=0.5)
    assert "backward" in changed(contention=3.0)
    assert changed(unseen=2.0) == set()
    assert "backward" in changed(fill=1.0)
    assert {"data", "forward", "backward", "optimizer", "other"} <= changed(compute=1.1)
    assert "exposed_transfer" in changed(rival=1)


def test_contention_that_was_not_seen_has_an_uncertainty_of_its_own():
    given = replace(GIVEN, contention_per_byte=0.1, contention_unseen=True)
    base = parts(given)["backward"]
    assert parts(given, drawn=Scatter(unseen=2.0))["backward"] > base
    assert parts(given, drawn=Scatter(unseen=0.0))["backward"] == 40.0
    assert parts(given, drawn=Scatter(contention=3.0))["backward"] == base


def test_one_rank_reduces_nothing():
    found = parts(replace(GIVEN, dp=1, wait=0.0), network=None)
    assert (found["exposed_transfer"], found["exposed_copy"]) == (0.0, 3.0)


def test_late_ranks_do_not_stretch_the_schedule():
    # 10 ms of the mean backward are those of a rank that is late: buckets are as before.
    own = {**GIVEN.own, "backward": 50.0}
    found = parts(replace(GIVEN, own=own, late_backward=10.0))
    assert (found["backward"], found["exposed_transfer"]) == (50.0, 20.0)

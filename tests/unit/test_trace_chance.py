"""Lateness against chance: equal ranks with jitter are not blamed, a planted late one is."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from ddp_profiler.trace.across import AcrossRanks, Meetings, lateness_of
from ddp_profiler.trace.chance import later_on_average, more_often
from ddp_profiler.trace.findings import find
from ddp_profiler.trace.matching import GroupMatch

COMPUTE_NS, JITTER_NS, TRANSFER_NS = 1_000_000, 300_000, 300_000
DRAWS = {
    "even": lambda draw: draw.uniform(-JITTER_NS, JITTER_NS),
    "normal": lambda draw: draw.gauss(0, JITTER_NS),
    "rare": lambda draw: draw.expovariate(1 / JITTER_NS),
}


TRACE = SimpleNamespace(dtypes=(), groups=())
NONE = SimpleNamespace(
    kind=np.zeros(0, np.uint8), group=np.zeros(0, np.int16), dtype=np.zeros(0, np.int16),
    elements=np.zeros(0, np.int64),
)  # fmt: skip


def late_findings(seed, world, *, steps=6, calls=5, jitter="even", late=None):
    """Findings about late ranks of a job in which each rank computes, then all meet, and so on."""
    draw, now, begins, step_of = random.Random(f"{seed} {world} {jitter}"), 0, [], []
    for step in range(steps):
        for _ in range(calls):
            begins.append(
                [
                    now + COMPUTE_NS + round(DRAWS[jitter](draw)) + (late or {}).get(rank, 0)
                    for rank in range(world)
                ]
            )
            step_of.append(step)
            now = max(begins[-1]) + TRANSFER_NS
    begin = np.array(begins, np.int64)
    number = len(begin)
    order = np.sort(begin, axis=1)
    yes = np.ones(number, bool)
    meetings = Meetings(
        match=GroupMatch(
            "0", world, tuple(range(world)), np.zeros(begin.shape, np.int64),
            np.zeros(number, np.uint8), np.zeros(number, np.int64), False,
        ),
        begin_ns=begin,
        end_ns=begin,
        wait_ns=order[:, -1:] - begin,
        last=begin.argmax(axis=1),
        lag_ns=order[:, -1] - order[:, -2],
        transfer_ns=np.full(number, TRANSFER_NS),
        meets=yes,
        clear=yes,
        told=yes,
        step=np.array(step_of),
    )  # fmt: skip
    waits = {
        rank: SimpleNamespace(
            exposed_wait_ns=int(meetings.wait_ns[:, rank].sum()), exposed_transfer_ns=0
        )
        for rank in range(world)
    }
    across = AcrossRanks((), None, (meetings,), {}, waits, lateness_of((meetings,)), ())
    total = SimpleNamespace(window_ns=now, exposed_comm_ns=None, idle_ns=None)
    ranks = [
        SimpleNamespace(rank=rank, total=total, collectives=NONE, trace=TRACE)
        for rank in range(world)
    ]
    return find(ranks, (), across, (), {})


@pytest.mark.parametrize("jitter", DRAWS)
@pytest.mark.parametrize(("steps", "calls"), [(2, 3), (3, 3), (6, 5), (20, 5)])
def test_equal_ranks_are_not_blamed(jitter, steps, calls):
    found = [
        one
        for seed in range(70)
        for world in (2, 4, 8)
        for one in late_findings(seed, world, steps=steps, calls=calls, jitter=jitter)
    ]
    assert len(found) <= 0.02 * 210, [one.message for one in found]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("jitter", DRAWS)
def test_a_rank_that_is_late_by_three_times_the_jitter_is_found(world, jitter):
    missed = 0
    for seed in range(30):
        found = late_findings(seed, world, jitter=jitter, late={1: 3 * JITTER_NS})
        assert {one.message.partition(" comes")[0] for one in found} <= {"Rank 1"}
        missed += not any(one.severity == "warning" for one in found)
        for one in found:
            assert " 0 of" not in one.message
    assert missed <= 1


def test_ranks_that_are_late_together_are_found():
    found = {one.id: one for one in late_findings(3, 8, late={2: 3 * JITTER_NS, 5: 3 * JITTER_NS})}
    assert found["late-ranks"].message.startswith("Ranks 2, 5 come late together")


def test_with_few_steps_a_late_rank_is_information():
    (one,) = late_findings(1, 4, steps=1, calls=8, late={2: 5 * JITTER_NS})
    assert one.severity == "info"
    assert one.message.startswith("Rank 2 comes late: ")
    assert "too few steps" in one.evidence
    # Last in three of three may well be chance for one of two.
    assert late_findings(1, 2, steps=1, calls=3, late={1: 5 * JITTER_NS}) == ()


def test_what_chance_may_do():
    # The first of two ranks last in 6 of 6 steps: 1 in 64.
    assert not more_often(6, 6, 1 / 2, 2)
    assert more_often(10, 10, 1 / 2, 2)
    assert not more_often(0, 10, 1 / 2, 2)
    assert later_on_average(np.array([[5.0, 0], [6, 0], [5, 0], [5.5, 0]]), 0)
    assert not later_on_average(np.array([[5.0, 0], [6, 0], [-5, 0], [5.5, 0]]), 0)
    assert not later_on_average(np.array([[5.0, 0], [6, 0]]), 0)
    assert not later_on_average(np.array([[5.0, np.nan]] * 9), 0)

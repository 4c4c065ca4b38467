"""Who is late, where and why, in steps made by a small model of DDP whose truth is known."""

import numpy as np
import pytest

from ddp_profiler.analysis.parts import derive_steps
from ddp_profiler.analysis.stragglers import Arrivals, find_stragglers
from ddp_profiler.schema import Variant
from tests.unit.span_columns import Spans

DATA, FORWARD, BACKWARD, TRANSFER, OPTIMIZER = 2.0, 20.0, 40.0, 5.0, 3.0


def run(
    ranks=2, steps=20, late=(), buffers=None, jitter=0.05, blocks=5, seed=0, norm=False, skew=0
):
    """Lets ranks train together and returns what they recorded.

    Args:
        late: (rank, part, ms, every) of each planted delay, or with a fifth number the first
            step that has it.
        buffers: ``barrier``: a collective at the start of forward holds all; ``source``: rank 0
            goes on at once and the others wait for it, as in a broadcast; ``tree``: as source,
            and the last rank gets it from rank 1; None: no such collective.
        norm: Whether a module reduces in the middle of backward, where all ranks meet.
        skew: So many ms later the last rank leaves each reduction.
    """
    random = np.random.default_rng(seed)
    spans = [Spans(variant=int(Variant.INSTRUMENTED)) for _ in range(ranks)]
    now = np.zeros(ranks)

    def length(rank, part, step, base):
        planted = sum(
            ms
            for r, p, ms, every, *first in late
            if (r, p) == (rank, part) and step % every == (first[0] if first else 0)
        )
        return base + planted + abs(random.normal(0, jitter))

    for step in range(steps):
        if step % blocks == 0:
            now[:] = now.max() + 1
        place = {"step": step, "block": step // blocks}
        begin = now.copy()
        for r in range(ranks):
            now[r] += length(r, "data", step, DATA)
            spans[r].data(begin[r], now[r], **place)
        forward, arrived = now.copy(), now.copy()
        if buffers == "barrier":
            now[:] = arrived.max()
        elif buffers in ("source", "tree"):
            now = np.maximum(arrived, arrived[0])
            if buffers == "tree":
                now[-1] = max(now[-1], arrived[1])
        for r in range(ranks):
            if buffers:
                now[r] += 0.1
                spans[r].forward_comm(forward[r], now[r], **place)
            now[r] += length(r, "forward", step, FORWARD)
            spans[r].forward(forward[r], now[r], **place)
            now[r] += length(r, "between", step, 0.0)
        backward = now.copy()
        if norm:
            arrived = backward + [length(r, "before norm", step, 10.0) for r in range(ranks)]
            now[:] = arrived.max() + 0.1
            for r in range(ranks):
                spans[r].backward_comm(arrived[r], now[r], **place)
        local = now + [length(r, "backward", step, BACKWARD) for r in range(ranks)]
        now[:] = local.max() + TRANSFER
        now[-1] += skew
        for r in range(ranks):
            spans[r].backward(backward[r], local[r], now[r], **place)
            spans[r].gradient(local[r], now[r], **place)
            end = now[r] + length(r, "optimizer", step, OPTIMIZER)
            spans[r].optimizer(now[r], end, **place)
            spans[r].step(begin[r], end, **place)
            now[r] = end
    return [
        Arrivals(derive_steps(r, s.columns(), 0, Variant.INSTRUMENTED), lambda times: times)
        for r, s in enumerate(spans)
    ]


PLACES = {None: "gradient_reduction", "barrier": "forward_comm"}


@pytest.mark.parametrize("buffers", [None, "barrier"])
@pytest.mark.parametrize("ms", [10, 30, 100])
@pytest.mark.parametrize("part", ["data", "forward", "between", "backward", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_late_rank_is_found_with_its_cause_and_meeting_point(rank, part, ms, buffers):
    found = find_stragglers(run(ranks=3, late=[(rank, part, ms, 1)], buffers=buffers), 0.0)
    assert len(found) == 1
    early = part in ("data", "optimizer")
    assert (found[0].rank, found[0].fixed) == (rank, True)
    assert found[0].cause == {"between": "other"}.get(part, part)
    assert found[0].at == (PLACES[buffers] if early else "gradient_reduction")
    assert found[0].lag_ms == pytest.approx(ms, abs=0.5)
    # The first step of a block follows a barrier that hides what the optimizer did.
    assert found[0].share_of_steps_fraction == (0.8 if part == "optimizer" else 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_late(seed):
    assert find_stragglers(run(ranks=4, jitter=1.0, seed=seed), 0.0) == ()


@pytest.mark.parametrize(
    ("rank", "buffers", "at"),
    [
        (0, "source", "forward_comm"),
        # The source does not wait for it: the delay travels on to the next meeting point.
        (1, "source", "gradient_reduction"),
        (1, "tree", "gradient_reduction"),
        (3, "tree", "gradient_reduction"),
    ],
)
def test_a_delay_shows_where_the_others_really_wait(rank, buffers, at):
    found = find_stragglers(run(ranks=4, late=[(rank, "data", 50, 1)], buffers=buffers), 0.0)
    assert [(s.rank, s.at, s.cause) for s in found] == [(rank, at, "data")]
    assert found[0].lag_ms == pytest.approx(50, abs=0.5)


def test_two_ranks_late_at_two_meeting_points():
    late = [(0, "data", 40, 1), (2, "backward", 60, 1)]
    found = find_stragglers(run(ranks=3, late=late, buffers="barrier"), 0.0)
    assert [(s.rank, s.cause, s.at) for s in found] == [
        (2, "backward", "gradient_reduction"),
        (0, "data", "forward_comm"),
    ]
    assert [s.lag_ms for s in found] == pytest.approx([60, 40], abs=0.5)


def test_one_rank_late_at_two_meeting_points_has_a_cause_at_each():
    late = [(1, "data", 50, 1), (1, "backward", 30, 1)]
    found = find_stragglers(run(ranks=3, late=late, buffers="barrier"), 0.0)
    assert [(s.rank, s.cause, s.at) for s in found] == [
        (1, "data", "forward_comm"),
        (1, "backward", "gradient_reduction"),
    ]


def test_a_rank_that_is_late_now_and_then_is_passing():
    found = find_stragglers(run(steps=40, late=[(1, "backward", 100, 10)]), 0.0)
    assert [(s.rank, s.fixed, s.cause) for s in found] == [(1, False, "backward")]
    assert found[0].share_of_steps_fraction == pytest.approx(0.1)
    assert found[0].lag_ms == pytest.approx(100, abs=0.5)
    assert found[0].recoverable_ms == pytest.approx(10, abs=0.5)


def test_one_long_step_makes_nobody_a_straggler():
    assert find_stragglers(run(steps=20, late=[(1, "backward", 100, 20)]), 0.0) == ()


def test_what_can_be_recovered_is_the_time_to_the_second_last():
    late = [(1, "forward", 100, 1), (2, "forward", 70, 1)]
    found = find_stragglers(run(ranks=3, late=late), 0.0)
    assert [s.rank for s in found] == [1]
    assert found[0].lag_ms == pytest.approx(30, abs=0.5)


def test_a_lag_within_the_clocks_uncertainty_is_not_named():
    ranks = run(late=[(1, "forward", 10, 1)])
    assert find_stragglers(ranks, 4.0)[0].uncertainty_ms == 4.0
    assert find_stragglers(ranks, 6.0) == ()


def test_too_few_steps_or_ranks_name_nobody():
    assert find_stragglers(run(ranks=1), 0.0) == ()
    assert find_stragglers(run(steps=4, late=[(1, "forward", 100, 1)]), 0.0) == ()
    assert find_stragglers([], 0.0) == ()


def names(found):
    return [(s.rank, s.cause, s.at) for s in found]


def test_ranks_that_take_turns_do_not_hide_each_other():
    """Rank 1 is late in every step, rank 2 by more in every second one: each is last in half."""
    late = [(1, "backward", 30, 1), (2, "backward", 60, 2)]
    found = find_stragglers(run(ranks=3, steps=40, late=late), 0.0)
    assert {s.rank for s in found} == {1, 2}
    assert all(s.lag_ms == pytest.approx(30, abs=0.5) for s in found)
    assert all(s.share_of_steps_fraction == 0.5 for s in found)


def test_the_cause_after_a_collective_in_backward_is_what_came_after_it():
    late = [(1, "data", 50, 1), (1, "backward", 30, 1)]
    found = find_stragglers(run(ranks=3, late=late, norm=True), 0.0)
    assert names(found) == [
        (1, "data", "backward_comm"),
        (1, "backward", "gradient_reduction"),
    ]
    assert [s.lag_ms for s in found] == pytest.approx([50, 30], abs=0.5)


def test_late_before_and_after_the_collective_in_backward():
    late = [(0, "before norm", 40, 1), (2, "backward", 60, 1)]
    found = find_stragglers(run(ranks=3, late=late, norm=True), 0.0)
    assert names(found) == [
        (2, "backward", "gradient_reduction"),
        (0, "backward", "backward_comm"),
    ]


def test_a_rank_that_is_slow_in_several_parts():
    late = [(1, "data", 10, 1), (1, "forward", 12, 1), (1, "backward", 14, 1)]
    (found,) = find_stragglers(run(ranks=3, late=late), 0.0)
    assert (found.rank, found.cause) == (1, "several")
    assert found.lag_ms == pytest.approx(36, abs=0.5)
    assert found.parts_ms["forward"] == pytest.approx(12, abs=0.5)
    assert sum(found.parts_ms.values()) == pytest.approx(36, abs=0.5)


@pytest.mark.parametrize("rank", [1, 2])
def test_one_delay_is_one_straggler_where_half_of_the_others_wait_in_between(rank):
    found = find_stragglers(run(ranks=3, late=[(rank, "data", 50, 1)], buffers="tree"), 0.0)
    assert names(found) == [(rank, "data", "gradient_reduction")]
    assert found[0].lag_ms == pytest.approx(50, abs=0.5)


def test_a_rank_that_only_leaves_the_reduction_later_is_no_straggler():
    """As over a slow link, where one rank has the last piece later in every step."""
    assert find_stragglers(run(ranks=3, skew=15), 0.0) == ()
    late = [(0, "backward", 30, 1)]
    assert [s.rank for s in find_stragglers(run(ranks=3, skew=5, late=late), 0.0)] == [0]


def test_equally_late_ranks_name_nobody():
    """The limit that docs/metrics.md states: nothing could be recovered from one of them."""
    late = [(2, "backward", 50, 1), (3, "backward", 50, 1)]
    assert find_stragglers(run(ranks=4, late=late), 0.0) == ()

"""The group that compares clocks: a run that can do without goes on without, on all ranks."""

import pytest
import torch.distributed as dist

from ddp_profiler.measure.clock_sync import ClockSync, local_clock
from ddp_profiler.schema import RankPlace
from tests.unit.ranks_as_threads import at_once
from tests.unit.test_closing import session_of
from tests.unit.test_meeting import FakeStore

PLACES = [RankPlace(r, 0, r, f"node{r}", f"clock{r}", "cpu", 1) for r in range(3)]


def make(rank, raw, problem=""):
    session = session_of(raw, rank)
    session.side_problem = problem
    return ClockSync(PLACES, local_clock(), session)


@pytest.mark.parametrize("fails", [None, 0, 2])
def test_all_ranks_agree_whether_clocks_are_compared(monkeypatch, fails):
    left = list(range(3))

    def new_group(ranks, **_):
        # Which thread comes first does not matter: one of them fails.
        if left.pop() == fails:
            raise RuntimeError("Connect timeout [127.0.1.1]:1\nmore")
        return "group"

    monkeypatch.setattr(dist, "new_group", new_group)
    raw = FakeStore()
    made = at_once(*(lambda rank=rank: make(rank, raw) for rank in range(3)))
    problems = {sync.problem for sync in made}
    assert len(problems) == 1
    assert all(sync.needed is (fails is None) for sync in made)
    if fails is not None:
        assert problems.pop().endswith("to other hosts: Connect timeout [127.0.1.1]:1")
        assert [sync.compare() for sync in made] == [None] * 3


def test_a_route_that_cannot_work_is_not_tried(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: pytest.fail("was tried"))
    sync = make(0, FakeStore(), "Rank 0 on node0 would use interface lo")
    assert not sync.needed
    assert sync.problem == "Rank 0 on node0 would use interface lo"

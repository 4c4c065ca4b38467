"""What each rank keeps of a lost run, whatever it holds of the run folder and the store."""

import threading

import pytest

from ddp_profiler import aftermath
from ddp_profiler.aftermath import Aftermath
from ddp_profiler.measure.bounded import BoundedStore
from ddp_profiler.measure.failures import FailureBoard, phase_key
from ddp_profiler.measure.study import Phase
from ddp_profiler.measure.watch import alive_key
from tests.unit.test_meeting import FakeStore


class FakeSession:
    watch_interval_s = 0.01

    def __init__(self, raw, rank):
        self.board = FailureBoard(BoundedStore(raw, 5, "x"), rank, ["a", "b"])

    def tell_phase(self, name):
        pass

    def watch(self, on_failure, on_lost, tell):
        self.on_failure, self.on_lost = on_failure, on_lost

    def failure_board(self):
        return self.board


@pytest.fixture
def store():
    raw = FakeStore()
    for rank in range(2):
        raw.set(phase_key(rank), "forward")
        raw.set(alive_key(rank), "5")
    return raw


@pytest.fixture(autouse=True)
def stay(monkeypatch):
    left = []
    monkeypatch.setattr(aftermath, "leave_now", left.append)
    monkeypatch.setattr(aftermath, "_END_S", 600)
    monkeypatch.setattr(aftermath, "_REPORT_S", 0.1)
    return left


def begun(store, rank):
    kept, said = [], []
    own = Aftermath(rank, lambda *what: kept.append(what), said.append)
    session = FakeSession(store, rank)
    own.begin(session, Phase("forward"))
    return own, session, kept, said


@pytest.mark.parametrize("rank", [0, 1])
def test_each_keeper_keeps_its_own_failure(store, rank):
    own, _, kept, said = begun(store, rank)
    own.note("forward", "boom")
    own.finish()
    assert [failure.rank for failure in kept[-1][0]] == [rank]
    # The table, and the phases of all, are rank 0's.
    assert bool(kept[-1][1]) is bool(said) is (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_keeper_keeps_the_failure_of_another(store, rank):
    _, session, kept, _ = begun(store, rank)
    session.board.__class__(BoundedStore(store, 5, "x"), 1 - rank, ["a", "b"]).note("x", "boom")
    session.on_failure()
    assert [failure.rank for failure in kept[-1][0]] == [1 - rank]


def test_own_failure_does_not_replace_the_first_one(store):
    own, session, kept, _ = begun(store, 0)
    FailureBoard(BoundedStore(store, 5, "x"), 1, ["a", "b"]).note("x", "boom")
    session.on_failure()
    own.note("forward", "connection closed")
    own.finish()
    assert all(failures[0].rank == 1 for failures, _ in kept)


def test_failure_is_kept_before_the_store_is_asked(store):
    own, session, kept, _ = begun(store, 0)
    asked = []
    session.failure_board = lambda: asked.append(len(kept)) or session.board
    own.note("forward", "boom")
    assert asked == [1]


def test_a_disk_that_does_not_answer_holds_nothing_up(store, monkeypatch, stay):
    monkeypatch.setattr(aftermath, "_WRITE_S", 0.05)
    said = []
    own = Aftermath(1, lambda *_: threading.Event().wait(60), said.append)
    session = FakeSession(store, 1)
    own.begin(session, Phase("forward"))
    session.on_lost("the store is gone")
    assert stay == [3]
    assert "rank 1 on " in said[0]
    assert "ddp-profiler analyze" in said[0]

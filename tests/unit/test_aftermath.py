"""What each rank keeps of a lost run, whatever it holds of the run folder and the store."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ddp_profiler import aftermath
from ddp_profiler.aftermath import Aftermath
from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import EXIT_BAD_INPUT
from ddp_profiler.keeper import RunKeeper
from ddp_profiler.measure import bounded
from ddp_profiler.measure.bounded import BoundedStore
from ddp_profiler.measure.failures import FailureBoard, phase_key
from ddp_profiler.measure.siblings import SiblingEnd, Siblings
from ddp_profiler.measure.study import Phase
from ddp_profiler.measure.topology import Topology
from ddp_profiler.measure.watch import alive_key
from ddp_profiler.record import reader, writer
from ddp_profiler.run import _Worker
from ddp_profiler.schema import Failure
from tests.unit.test_meeting import FakeStore
from tests.unit.test_record import run_info


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


class FakeSiblings(Siblings):
    """Ranks of this node that have ended as a test says."""

    launcher_is_gone = False

    def __init__(self, rank, pids, *ends):
        super().__init__(rank, 0)
        self._pids, self._ends = pids, {end.rank: end for end in ends}


def begun(store, rank, **keywords):
    kept, said = [], []
    own = Aftermath(rank, lambda *what: kept.append(what), said.append, **keywords)
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


KILLED_0, KILLED_2 = SiblingEnd(0, 10, -9), SiblingEnd(2, 12, -9)


@pytest.mark.parametrize("zero", ["dies", "dies after its report", "lives"])
def test_rank_0_dies_while_others_wait_for_its_report(store, stay, zero):
    """Two ranks are killed at once, and of the other one this one hears first."""
    ends = [KILLED_2] if zero == "lives" else [KILLED_2, KILLED_0]
    siblings, stood_in = FakeSiblings(1, {0: 10, 2: 12}, *ends), []
    own, session, kept, said = begun(
        store, 1, siblings=siblings, stand_in=lambda: stood_in.append(len(kept))
    )
    session.board = FailureBoard(BoundedStore(store, 5, "x"), 1, ["a", "a", "a"])
    if zero == "dies after its report":
        session.board.mark_reported()
    own.sibling_ended(KILLED_2)
    assert stay == [3]
    assert kept[-1][0][0].rank == 2
    assert any("was killed by SIGKILL (process 12)" in text for text in said)
    if zero == "dies":
        assert stood_in
        assert [phase.rank for phase in kept[-1][1]] == [0, 1, 2]
        assert "what each rank was doing" in said[-1]
    else:
        assert not stood_in
        assert not kept[-1][1]


def test_a_launcher_that_has_died_is_the_cause(store):
    """What ranks meet then, one after the other, is its consequence."""
    siblings = FakeSiblings(1, {0: 10})
    own, _, kept, said = begun(store, 1, siblings=siblings)
    lost = "The store at localhost:1 cannot be reached: Connection was likely closed"
    assert own.cause_of(lost) == lost
    siblings.launcher_is_gone = True
    assert own.cause_of(lost) == f"the launcher (process {siblings.launcher}) has died"
    assert own.cause_of("ValueError: own") == "ValueError: own"
    own.sibling_ended(SiblingEnd(0, 10, 3))
    assert (kept, said) == ([], [])
    own.sibling_ended(KILLED_0)
    assert kept


def test_own_words_of_rank_0_stay_first_when_another_rank_takes_its_place(tmp_path):
    told = Failure(0, "forward", "boom", "host")
    writer.write_run_info(tmp_path, run_info(world_size=2, failures=(told,)))
    worker = _Worker(StudyConfig(), Topology(1, 1, 2, 2, True))
    worker._keeper, worker._folder, worker._run_id = RunKeeper(1), tmp_path, "run-1"
    worker._stand_in()
    later = Failure(0, "a phase that is not known", "ended with exit code 3", "host")
    worker._keep_failure((told, later), ())
    assert reader.read_run_info(tmp_path).failures == (told, later)
    worker._keep_failure((later,), ())
    assert reader.read_run_info(tmp_path).failures == (told, later)


@pytest.mark.parametrize("closed", [False, True])
def test_a_rank_that_hangs_when_rank_0_is_through_is_ended(store, stay, monkeypatch, closed):
    monkeypatch.setattr(aftermath, "LINGER_S", 0.05)
    # No test must last until that comes: it would end the whole process.
    own, _, _, said = begun(store, 1, report_s=1e6)
    if closed:
        own.close()
    own.sibling_ended(SiblingEnd(2, 12, 0))
    time.sleep(0.3)
    assert stay == []  # It may be the one that waits for rank 0's report.
    own.sibling_ended(SiblingEnd(0, 10, 0))
    deadline = time.monotonic() + 30
    while not stay and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stay == [3]
    assert "hangs in forward: it did not end within 0.05 s of rank 0" in said[-1]


def test_rank_0_is_not_ended_over_its_report(store, stay, monkeypatch):
    monkeypatch.setattr(aftermath, "LINGER_S", 0.02)
    own, _, _, said = begun(store, 0, report_s=0.02)
    own.sibling_ended(SiblingEnd(1, 11, 0))
    time.sleep(0.3)
    assert (stay, said) == ([], [])


def test_a_rank_that_is_stopped_once_all_is_measured_goes_on(capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        worker = _Worker(StudyConfig(), Topology(0, 0, 2, 2, True))
        worker._siblings = FakeSiblings(0, {1: child.pid})
        deadline = time.monotonic() + 30
        while not worker._siblings.stopped():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker._resume_stopped()
        # It can only end if it goes on.
        child.communicate(b"\n", timeout=30)
    assert child.returncode == 0
    assert f"rank 1 on {socket.gethostname()} was stopped (process {child.pid})" in (
        capsys.readouterr().err
    )


def test_who_hangs_in_its_own_end_leaves_nothing_half_written(store, stay, monkeypatch):
    cleaned, left = [], threading.Event()
    monkeypatch.setattr(aftermath, "_END_S", 0.05)
    monkeypatch.setattr(aftermath, "leave_now", lambda code: (stay.append(code), left.set()))
    own, *_ = begun(store, 0, clean=cleaned.append)
    own.note("forward", "boom")
    assert left.wait(10)
    assert (cleaned, stay) == ([os.getpid()], [EXIT_BAD_INPUT])


def test_a_disk_that_does_not_answer_holds_nobody_up(store, stay, monkeypatch):
    monkeypatch.setattr(aftermath, "_WRITE_S", 0.05)
    monkeypatch.setattr(bounded, "_AFTERWARDS_S", 0.05)
    answers = threading.Event()
    own, *_ = begun(store, 0, clean=lambda _: answers.wait(60))
    own._leave(EXIT_BAD_INPUT)
    answers.set()
    assert stay == [EXIT_BAD_INPUT]

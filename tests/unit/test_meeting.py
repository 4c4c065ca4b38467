"""Who is missing, on a store made by hand; and calls that never return."""

import socket
import threading
import time

import msgspec
import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.measure import meeting
from ddp_profiler.measure.bounded import BoundedStore, NoAnswerError, StoreLostError, within
from ddp_profiler.measure.failures import FailureBoard, phase_key
from ddp_profiler.measure.interfaces import Route
from ddp_profiler.measure.meeting import Presence, check_loopback, gather
from ddp_profiler.measure.topology import Topology
from ddp_profiler.measure.watch import FAILURES, Watch, alive_key
from ddp_profiler.schema import Failure

WHERE = "10.0.0.1:29500"


class FakeStore:
    """What torch's stores do, in this process; ``silent`` ones never answer."""

    def __init__(self):
        self.values = {}
        self.silent = False

    def _answer(self):
        if self.silent:
            threading.Event().wait(60)

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        self._answer()
        return self.values[key]

    def multi_get(self, keys):
        self._answer()
        return [self.values[key] for key in keys]

    def check(self, keys):
        self._answer()
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        self._answer()
        total = int(self.values.get(key, 0)) + amount
        self.values[key] = str(total).encode()
        return total


def presence(rank, host, address="192.0.2.1", stack=None):
    route = Route(("eth0",), (address,), "hostname")
    return Presence(rank, host, stack or host, route, ("eth9",))


def come(store, *members):
    for member in members:
        store.set(f"here/{member.rank}", msgspec.json.encode(member))


def topology(rank, world_size=4):
    return Topology(rank, 0, world_size, 1, launched=True)


def missing_line(store, world_size, environ, rank=0):
    with pytest.raises(UsageError) as caught:
        gather(store, topology(rank, world_size), time.monotonic(), 5, WHERE, environ)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch):
    monkeypatch.setattr(meeting, "_FAREWELL_S", 0)
    monkeypatch.setattr(meeting, "_HEARSAY_S", 0.05)


def test_missing_ranks_nodes_and_the_address_are_named():
    store = FakeStore()
    come(store, presence(0, "a"), presence(1, "a"))
    environ = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    line = missing_line(store, 4, environ)
    assert line == (
        "Ranks 2, 3 of 4 (on node 1) did not come to 10.0.0.1:29500 (rank 0) within 5 s; here: "
        "ranks 0, 1 (a)."
    )
    # A rank that asks later hears the same.
    assert missing_line(store, 4, environ, rank=1) == line


def test_slurm_names_its_nodes():
    store = FakeStore()
    come(store, presence(0, "n1"))
    line = missing_line(store, 2, {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert line.startswith("Rank 1 of 2 did not come to ")
    assert line.endswith(" Slurm's nodes: n[1-2].")


def test_a_large_world_is_named_in_one_line():
    store = FakeStore()
    come(store, *(presence(rank, f"host{rank}") for rank in range(0, 1000, 2)))
    line = missing_line(store, 1000, {})
    assert "Ranks 1, 3, 5, 7, 9, 11, 13, 15 and 492 more of 1000" in line
    assert len(line) < 300


def test_without_a_word_of_rank_0_it_is_the_missing_one():
    store = FakeStore()
    come(store, presence(1, "b"))
    assert "Rank 0 of 2 did not come" in missing_line(store, 2, {}, rank=1)


def test_all_ranks_learn_who_is_here():
    store = FakeStore()
    members = [presence(0, "a"), presence(1, "b")]
    come(store, *members)
    for rank in (0, 1):
        found = gather(store, topology(rank, 2), time.monotonic() + 5, 5, WHERE, {})
        assert list(found) == members


def test_loopback_between_hosts_is_refused_and_within_one_is_not():
    here = [presence(r, "a", "127.0.1.1") for r in (0, 1)]
    check_loopback(here)
    with pytest.raises(UsageError) as caught:
        check_loopback([presence(0, "a", "127.0.1.1"), presence(1, "b")])
    assert "Rank 0 on a would use interface eth0 (127.0.1.1, from hostname)" in str(caught.value)
    assert "rank 1 on b cannot reach" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME=eth9 on a" in caught.value.remedy
    check_loopback([presence(0, "a"), presence(1, "b")])


def test_remedy_names_the_variable_that_chose():
    route = Route(("lo",), ("127.0.0.1",), "NCCL_SOCKET_IFNAME")
    with pytest.raises(UsageError) as caught:
        check_loopback([Presence(0, "a", "a", route, ("eth9",)), presence(1, "b")])
    assert caught.value.remedy == "Set NCCL_SOCKET_IFNAME=eth9 on a, or unset it."


def test_gloo_beside_nccl_over_loopback_is_a_problem_and_no_error():
    nccl = Route((), (), "NCCL")
    loopback = Route(("lo",), ("127.0.1.1",), "hostname")
    good = Route(("eth0",), ("192.0.2.2",), "hostname")
    members = [Presence(0, "a", "a", nccl, (), loopback), Presence(1, "b", "b", nccl, (), good)]
    check_loopback(members)
    assert "Rank 0 on a would use interface lo (127.0.1.1" in meeting.side_problem(members)
    assert meeting.side_problem(members[1:]) == ""


def test_a_name_server_that_does_not_answer_keeps_to_the_deadline(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: threading.Event().wait(60))
    environ = {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}
    begin = time.monotonic()
    with pytest.raises(
        UsageError, match=r"node0:1 within 0\.2 s: the name was not resolved in time"
    ):
        meeting.meet(topology(1), presence(1, "b"), 0.2, environ)
    assert time.monotonic() - begin < 20


def test_an_address_that_answers_is_found_among_several():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        deadline = time.monotonic() + 20
        assert meeting.reach(("127.0.0.2", "127.0.0.1"), port, deadline) == ("127.0.0.1", "")
    assert meeting.reach(("127.0.0.1",), port, time.monotonic() + 0.1) == (
        None,
        "connection refused",
    )


def test_a_call_that_never_returns_is_given_up():
    begin = time.monotonic()
    with pytest.raises(NoAnswerError):
        within(0.1, lambda: threading.Event().wait(60))
    assert time.monotonic() - begin < 20
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


def test_a_store_that_is_lost_fails_at_once():
    raw = FakeStore()
    store = BoundedStore(raw, 0.05, "node0:1 (rank 0)")
    assert store.add("n", 2) == 2
    raw.silent = True
    with pytest.raises(StoreLostError, match=r"node0:1 \(rank 0\) .*did not answer for 0.05 s"):
        store.check(["n"])
    raw.silent = False
    for call in (lambda: store.check(["n"]), lambda: store.set("n", "1"), lambda: store.get("n")):
        with pytest.raises(StoreLostError, match="given up"):
            call()


class Watched:
    """A watch with all times divided by a hundred."""

    def __init__(self, limit_s=0.3):
        self.raw = FakeStore()
        self.failures, self.lost = [], []
        self.watch = Watch(
            BoundedStore(self.raw, limit_s, "x"),
            rank=1,
            world_size=2,
            limit_s=limit_s,
            farewell_s=0.1,
            on_failure=lambda: self.failures.append(True),
            on_lost=self.lost.append,
            interval_s=0.01,
        )
        self.watch.start()


def test_watch_leaves_a_slow_run_alone():
    watched = Watched(limit_s=0.05)
    # Twenty times the limit in which this rank does nothing at all.
    time.sleep(1.0)
    assert int(watched.raw.values[alive_key(1)]) > 3
    assert not watched.lost
    assert not watched.failures
    watched.watch.stop()
    watched.watch.join(5)
    assert not watched.watch.is_alive()


def test_watch_ends_a_rank_whose_store_is_gone():
    watched = Watched()
    watched.raw.silent = True
    watched.watch.join(20)
    assert len(watched.lost) == 1
    assert "did not answer" in watched.lost[0]


def test_watch_tells_of_another_ranks_failure_and_then_ends_this_one():
    watched = Watched()
    watched.raw.add(FAILURES, 1)
    watched.watch.join(20)
    assert watched.failures == [True]
    assert len(watched.lost) == 1
    assert "Another rank has failed" in watched.lost[0]


@pytest.mark.parametrize("block", [True, False])
def test_watch_ends_a_rank_whose_report_blocks_or_fails(block):
    watched = Watched()

    def report():
        if block:
            threading.Event().wait(60)
        raise OSError("no disk")

    watched.watch._on_failure = report
    watched.raw.add(FAILURES, 1)
    watched.watch.join(20)
    assert len(watched.lost) == 1
    assert ("no disk" in watched.lost[0]) is not block


def test_a_stopped_watch_says_nothing():
    watched = Watched()
    watched.watch.stop()
    watched.raw.silent = True
    watched.raw.set(FAILURES, "1")
    watched.watch.join(20)
    assert not watched.lost


def test_failures_are_kept_in_order_with_the_phase_of_each_rank():
    raw = FakeStore()
    for rank in range(3):
        raw.set(phase_key(rank), f"level dp{rank}")
        raw.set(alive_key(rank), "5")
    boards = [FailureBoard(BoundedStore(raw, 5, "x"), rank, ["a", "a", "b"]) for rank in range(3)]
    assert boards[2].note("forward", "boom") == (Failure(2, "forward", "boom", "b"),)
    assert [f.rank for f in boards[0].note("waiting", "late")] == [2, 0]
    failures, phases = boards[0].settle(0.01)
    assert [f.rank for f in failures] == [2, 0]
    assert [(p.rank, p.hostname, p.phase, p.responds) for p in phases] == [
        (0, "a", "waiting", True),
        (1, "a", "level dp1", False),
        (2, "b", "forward", True),
    ]


def test_a_board_whose_store_is_gone_knows_its_own_rank_only():
    raw = FakeStore()
    raw.silent = True
    board = FailureBoard(BoundedStore(raw, 0.05, "x"), 1, ["a", "b"])
    assert board.note("forward", "boom") == (Failure(1, "forward", "boom", "b"),)
    assert board.settle(0.01)[1] == ()
    board.await_report(30)
    # As if rank 0 had: nothing is taken over where nothing is known.
    assert board.await_report(30, lambda: True)
    assert board.phase_of(0) == "a phase that is not known"
    raw.silent = False
    answers = FailureBoard(BoundedStore(raw, 5, "x"), 1, ["a", "b"])
    assert answers.phase_of(0) == "start-up"
    assert not answers.await_report(30, lambda: True)
    answers.mark_reported()
    assert answers.await_report(30, lambda: True)

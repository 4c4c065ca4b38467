"""The end of a run of which a node was cut off: the ranks that are left close in good order."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.measure import collect, session
from ddp_profiler.measure.bounded import BoundedStore
from ddp_profiler.measure.collect import HEARTBEAT
from ddp_profiler.measure.session import Session
from ddp_profiler.measure.topology import Topology
from ddp_profiler.record import paths
from tests.unit.ranks_as_threads import at_once
from tests.unit.test_meeting import FakeStore

TIMEOUT_S = 0.6
CLOSING_S = 0.8
WORLD = 4
GONE = 2


class Taker:
    def write(self, data):
        pass

    def finish(self):
        pass

    def discard(self):
        pass


def session_of(raw, rank):
    """A real session that has met the others, without a process group."""
    own = Session.__new__(Session)
    own.topology = Topology(rank, rank % 2, WORLD, 2, launched=True)
    own.timeout = timedelta(seconds=TIMEOUT_S)
    own.store = BoundedStore(raw, 10, "here")
    own._watch = None
    return own


class Carrier:
    """Rank 2's bytes never come: the group's own timeout ends the wait."""

    problem = ""

    def __init__(self, own):
        self.rank, self.publish = own.rank, own.publish
        self.learn, self.beat = own.learn, own.beat

    def send(self, data):
        pass

    def receive(self, size, source):
        time.sleep(TIMEOUT_S)
        raise RuntimeError("Timed out waiting for recv operation to complete")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    assert session.PATIENCE_S > session.CLOSING_S
    for module in (session, collect):
        monkeypatch.setattr(module, "PATIENCE_S", CLOSING_S + 20)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)


def test_healthy_ranks_wait_for_rank_0_which_waits_for_a_lost_one(tmp_path):
    raw = FakeStore()
    for rank in (2, 3):
        paths.rank_file(tmp_path, rank).write_bytes(b"spans")

    def rank_0():
        own = session_of(raw, 0)
        lost = collect.collect(Carrier(own), [2, 3], lambda *_: Taker())
        with pytest.raises(DdpProfilerError, match="rank 2 to finish"):
            own.close(heartbeat=HEARTBEAT, limit_s=CLOSING_S)
        return sorted(lost)

    def same_node():
        session_of(raw, 1).close(heartbeat=HEARTBEAT)

    def cut_off():
        session_of(raw, GONE).publish("part/2", collect.Offer(5, "0"))

    def other_node():
        own = session_of(raw, 3)
        reason = collect.hand_over(Carrier(own), paths.rank_file(tmp_path, 3))
        own.close(heartbeat=HEARTBEAT)
        return reason

    assert at_once(rank_0, same_node, cut_off, other_node) == [[2, 3], None, None, ""]


def test_what_was_waited_for_is_said_in_words():
    with pytest.raises(DdpProfilerError) as caught:
        session_of(FakeStore(), 0).learn("machine/1/3")
    assert caught.value.message == (
        "Waited 0.6 s for rank 3 to say what its machine gave it, and nothing moved."
    )

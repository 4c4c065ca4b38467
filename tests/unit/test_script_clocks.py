"""Clocks of a script's hosts: ranks as threads, each with a clock of its own."""

import os
import socket
import threading
import time

import msgspec
import pytest

from ddp_profiler.measure.clock_sync import LocalClock
from ddp_profiler.measure.interfaces import Interface
from ddp_profiler.measure.scripts import clocks as script_clocks
from ddp_profiler.measure.scripts.clocks import ScriptClocks
from tests.unit.ranks_as_threads import Board, Store, at_once

SHIFTS_NS = {"a": 0, "b": 7_000_000_000, "c": -3_000_000_000}


class ScriptBoard(Board):
    """A board that can also look without waiting."""

    def find(self, key, kind=object):
        raw = self.store.values.get(key)
        return None if raw is None else msgspec.json.decode(raw, type=kind)


@pytest.fixture
def clocks_of(monkeypatch):
    """Opens the clocks of ranks that read the given ones."""
    here = (Interface("lo", ("127.0.0.1",)), Interface("eth", ("127.0.0.2",)))
    monkeypatch.setattr(script_clocks.interfaces, "list_interfaces", lambda: here)
    # An address of 127.0.0.0/8 is that of this host, as another host's would be reached.
    monkeypatch.setattr(Interface, "loopback", property(lambda self: self.name == "lo"))
    opened = []

    def make(*domains):
        store = Store()
        for rank, domain in enumerate(domains):
            shift = SHIFTS_NS[domain]
            clock = LocalClock(
                lambda shift=shift: time.monotonic_ns() + shift,
                lambda shift=shift: time.time_ns() + 2 * shift,
                domain,
            )
            opened.append(ScriptClocks(ScriptBoard(store, rank), len(domains), clock))
        problems = at_once(*(one.open for one in opened))
        return opened, problems

    yield make
    for one in opened:
        one.close()


def test_each_clock_is_compared_by_its_first_rank(clocks_of):
    ranks, problems = clocks_of("a", "a", "b", "c", "b")
    assert problems == [""] * 5
    for one in ranks:
        one.compare()
    found = ranks[0].found()
    # Once when it was opened, and once more.
    assert [reading.rank for reading in found] == [2, 2, 3, 3]
    for reading in found:
        shift = SHIFTS_NS["b" if reading.rank == 2 else "c"]
        assert reading.low_ns <= shift <= reading.high_ns
        assert reading.high_ns - reading.low_ns < 1e9
        assert reading.real_offset_ns == pytest.approx(2 * shift, abs=1e9)
    assert [len(one.readings) for one in ranks] == [0, 0, 2, 2, 0]


def test_one_clock_needs_no_connection(clocks_of, monkeypatch):
    monkeypatch.setattr(script_clocks, "_listen", lambda: pytest.fail("listens"))
    ranks, problems = clocks_of("a", "a")
    assert problems == ["", ""]
    ranks[1].compare()
    assert ranks[0].found() == ()


def test_hosts_that_find_no_way_go_on_without(clocks_of, monkeypatch):
    def refuse(address, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    ranks, (problem, *others) = clocks_of("a", "b")
    assert problem.startswith("rank 1 on ")
    assert "cannot reach rank 0 at 127.0.0.2, port " in problem
    assert problem.endswith("(connection refused)")
    assert others == [""]
    ranks[1].compare()
    assert ranks[0].found() == ()


def test_an_address_of_somebody_else_is_not_taken(clocks_of, monkeypatch):
    """Such as the bridge of containers, which has the same address on every host."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        real = socket.create_connection

        def reached(address, timeout):
            host, own = address
            return real(("127.0.0.1", port) if host == "10.0.0.1" else (host, own), timeout)

        monkeypatch.setattr(script_clocks, "_TRY_S", 0.3)
        monkeypatch.setattr(socket, "create_connection", reached)
        addresses = lambda *_: ("10.0.0.1", "127.0.0.2")  # noqa: E731
        monkeypatch.setattr(script_clocks, "_own_addresses", addresses)
        ranks, problems = clocks_of("a", "b")
        assert problems == ["", ""]
        assert len(ranks[0].found()) == 1


def test_rank_0_that_is_gone_ends_it_and_keeps_what_was_found(clocks_of):
    ranks, _ = clocks_of("a", "b")
    ranks[1]._connection.shutdown(socket.SHUT_RDWR)
    ranks[1].compare()
    ranks[1].compare()
    assert len(ranks[0].found()) == len(ranks[1].readings) == 1


def test_a_connection_that_others_hold_too_is_ended(clocks_of):
    """Loader workers that were forked while it was open hold it until they end."""
    before = set(threading.enumerate())
    ranks, _ = clocks_of("a", "b")
    (answering,) = (t for t in set(threading.enumerate()) - before if "clock" in t.name)
    forked = os.dup(ranks[1]._connection.fileno())
    try:
        ranks[1].close()
        # Rank 0's thread for it ends with it.
        answering.join(10)
        assert not answering.is_alive()
    finally:
        os.close(forked)


def test_own_addresses_begin_with_the_chosen_interface():
    found = [
        Interface("lo", ("127.0.0.1", "::1")),
        Interface("docker0", ("172.17.0.1",)),
        Interface("ib0", ("10.1.0.7", "fe80::1%ib0")),
        Interface("down", ()),
    ]
    chosen = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert script_clocks._own_addresses(chosen, found) == ("10.1.0.7", "172.17.0.1")
    assert script_clocks._own_addresses({}, found) == ("172.17.0.1", "10.1.0.7")

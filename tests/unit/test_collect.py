"""Collecting files on rank 0: what is whole comes, what is not is named and stays."""

import errno
import queue

import pytest

from ddp_profiler.measure import collect
from ddp_profiler.record import paths
from ddp_profiler.record.parts import PartWriter
from tests.unit.ranks_as_threads import Board, Store, at_once

CHUNK = 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(collect, "CHUNK_BYTES", CHUNK)


class Wire(Board):
    """A carrier whose bytes go through queues, one for each sender."""

    def __init__(self, store, rank, lines, **faults):
        super().__init__(store, rank, wait_s=faults.pop("wait_s", 10))
        self.lines, self.beats = lines, 0
        self.flip, self.cut_after = faults.pop("flip", False), faults.pop("cut_after", None)
        self.problem = faults.pop("problem", "")
        assert not faults

    def beat(self, heartbeat):
        assert heartbeat == collect.HEARTBEAT
        self.beats += 1

    def send(self, data):
        assert 0 < len(data) <= CHUNK
        if self.cut_after is not None:
            self.cut_after -= 1
            if self.cut_after < 0:
                self.lines[self.rank].put(None)
                raise RuntimeError("Connection closed by peer")
        if self.flip:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.lines[self.rank].put(data)

    def receive(self, size, source):
        data = self.lines[source].get(timeout=10)
        if data is None:
            raise RuntimeError("[gloo] Connection closed by peer")
        assert len(data) == size
        return data


class Nodes:
    """Rank 0's folder, and one for each sender with its file."""

    def __init__(self, root, sizes):
        self.root, self.home = root, root / "0"
        self.home.mkdir()
        self.contents = {
            rank: bytes((rank * 31 + i) % 256 for i in range(size)) for rank, size in sizes.items()
        }
        for rank, content in self.contents.items():
            (root / str(rank)).mkdir()
            self.file(rank).write_bytes(content)
        self.told = []

    def file(self, rank):
        return paths.rank_file(self.root / str(rank), rank)

    def take(self, rank, size, sha256):
        return PartWriter(self.home, rank, size, sha256)

    def collect(self, faults=None, take=None, zero=None):
        """Runs rank 0 and all senders; returns what rank 0 could not collect."""
        store, lines = Store(), {rank: queue.Queue() for rank in self.contents}
        senders = list(self.contents)
        first = Wire(store, 0, lines, **(zero or {}))
        results = at_once(
            lambda: collect.collect(
                first, senders, take or self.take, lambda *told: self.told.append(told)
            ),
            *(
                lambda rank=rank: collect.hand_over(
                    Wire(store, rank, lines, **(faults or {}).get(rank, {})), self.file(rank)
                )
                for rank in senders
            ),
        )
        self.alone = dict(zip(senders, results[1:], strict=True))
        self.first = first
        return results[0]

    def collected(self):
        assert not [path for path in self.home.iterdir() if path.name.endswith("partial")]
        return {rank: path.read_bytes() for rank, path in paths.rank_files(self.home).items()}


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_files_come_byte_for_byte(tmp_path, size):
    nodes = Nodes(tmp_path, {2: size, 3: 20})
    assert nodes.collect() == {}
    assert nodes.collected() == nodes.contents
    assert nodes.alone == {2: "", 3: ""}
    assert {rank: nodes.file(rank).read_bytes() for rank in (2, 3)} == nodes.contents
    assert nodes.told[-1] == (size + 20, size + 20)
    # One for each chunk, and one before each wait for an offer.
    assert nodes.first.beats == len(nodes.told) + 2


def test_part_that_cannot_be_read(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 20, 3: 20})
    nodes.file(2).unlink()
    nodes.file(2).mkdir()
    failed = nodes.collect()
    assert failed == {2: "rank-00002.arrows cannot be read: Is a directory"}
    assert sorted(nodes.collected()) == [1, 3]


def test_part_that_is_damaged_on_its_way(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 20})
    failed = nodes.collect({1: {"flip": True}})
    assert list(failed) == [1]
    assert "did not come as it was sent" in failed[1]
    assert nodes.collected() == {2: nodes.contents[2]}


def test_disk_that_fills_up(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 50, 3: 20})

    class Full(PartWriter):
        def write(self, data):
            if self._target.name == "rank-00002.arrows" and self._taken >= 2 * CHUNK:
                raise OSError(errno.ENOSPC, "No space left on device", str(self._partial))
            super().write(data)

    failed = nodes.collect(take=lambda *of: Full(nodes.home, *of))
    assert sorted(failed) == [2, 3]
    assert all("No space left on device" in reason for reason in failed.values())
    assert sorted(nodes.collected()) == [1]


def test_folder_that_refuses_the_file(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 20})
    paths.partial_file(paths.rank_file(nodes.home, 1)).mkdir()
    failed = nodes.collect()
    assert sorted(failed) == [1, 2]
    assert failed[1].endswith(".rank-00001.arrows.partial is in the way; remove it")
    assert paths.rank_files(nodes.home) == {}


def test_file_that_is_there_is_not_replaced(tmp_path):
    nodes = Nodes(tmp_path, {1: 20})
    paths.rank_file(nodes.home, 1).write_bytes(b"kept")
    assert "is there already" in nodes.collect()[1]
    assert nodes.collected() == {1: b"kept"}


def test_connection_that_breaks(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 50, 3: 20})
    failed = nodes.collect({2: {"cut_after": 3}})
    assert sorted(failed) == [2, 3]
    assert failed[3] == "the connection was lost: [gloo] Connection closed by peer"
    assert nodes.collected() == {1: nodes.contents[1]}
    # Rank 3 is told that nobody asks for its file; only rank 2 has lost rank 0.
    assert nodes.alone == {1: "", 2: "Connection closed by peer", 3: ""}


def test_group_that_only_one_side_could_not_make(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 20, 3: 20})
    assert nodes.collect({2: {"problem": "no way"}}) == {2: "no way"}
    assert sorted(nodes.collected()) == [1, 3]


def test_group_that_rank_0_could_not_make(tmp_path):
    nodes = Nodes(tmp_path, {1: 20, 2: 20})
    assert nodes.collect(zero={"problem": "no way"}) == {1: "no way", 2: "no way"}
    assert nodes.collected() == {}
    assert nodes.alone == {1: "", 2: ""}


def test_rank_that_offers_nothing(tmp_path):
    nodes = Nodes(tmp_path, {1: 20})
    store = Store()
    failed = collect.collect(Wire(store, 0, {}, wait_s=0.2), [1, 2], nodes.take)
    assert sorted(failed) == [1, 2]
    assert "nobody published 'part/1'" in failed[1]
    # Those that come later are told, so that they do not wait.
    assert store.values["part/2/go"] == b"false"

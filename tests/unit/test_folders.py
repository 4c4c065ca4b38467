"""Which ranks share a folder: nodes are folders on this disk, ranks are threads."""

import time
from dataclasses import replace

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.measure import folders
from ddp_profiler.record import parts, paths, reader, writer
from ddp_profiler.schema import RecordPart
from tests.unit.ranks_as_threads import Board, Store, at_once
from tests.unit.test_record import run_info


def settle(seen, *, late_s=0.0, hostnames=None):
    """Settles the folders of ranks that see these; rank 0's is claimed as a run would."""
    info = run_info(run_id="run-1", status="running", world_size=len(seen))
    paths.claim_folder(seen[0])
    writer.write_run_info(seen[0], info)
    store = Store()

    def one(rank, folder):
        def claim():
            paths.claim_folder(folder)
            time.sleep(late_s)
            writer.write_run_info(folder, replace(info, keeper=rank))

        return lambda: folders.settle_folders(
            Board(store, rank),
            len(seen),
            hostnames[rank] if hostnames else f"host-{folder.parent.name}",
            folder,
            lambda: parts.keeper_of(folder, "run-1"),
            claim,
        )

    return at_once(*(one(rank, folder) for rank, folder in enumerate(seen)))


def node(tmp_path, name):
    return tmp_path / name / "run"


def test_one_folder_for_all(tmp_path):
    assert settle([node(tmp_path, "a")] * 3) == [()] * 3
    assert [p.name for p in node(tmp_path, "a").iterdir()] == ["run.json"]


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_two_nodes_with_two_ranks_each(tmp_path, late_s):
    a, b = node(tmp_path, "a"), node(tmp_path, "b")
    found = settle([a, a, b, b], late_s=late_s)
    keeper = parts.keeper_of(b, "run-1")
    assert keeper in (2, 3)
    assert found[0] == (
        RecordPart(0, "host-a", str(a), (0, 1)),
        RecordPart(keeper, "host-b", str(b), (2, 3)),
    )
    assert found == [found[0]] * 4
    assert reader.read_run_info(b) == replace(reader.read_run_info(a), keeper=keeper)


def test_ranks_of_one_node_with_folders_of_their_own(tmp_path):
    """Neither node numbers nor hostnames decide, but what a rank sees."""
    a, b, c = (node(tmp_path, name) for name in "abc")
    (found, *others) = settle([a, b, a, c, b], hostnames=["same"] * 5)
    assert [part.ranks for part in found] in ([(0, 2), (1, 4), (3,)], [(0, 2), (3,), (1, 4)])
    assert others == [found] * 4


def test_folder_of_another_run_stops_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_LATE_S", 0.2)
    a, b, c = (node(tmp_path, name) for name in "abc")
    paths.claim_folder(b)
    writer.write_run_info(b, run_info(run_id="older"))
    raised = settle([a, b, c])
    for error in raised:
        assert isinstance(error, UsageError)
        assert error.message.startswith("Rank 1 on host-b does not see rank 0's run folder")
        assert f"{b} already holds a run" in error.message
        assert "--out" in error.remedy
    assert reader.read_run_info(b).run_id == "older"


def test_folder_that_cannot_be_written_stops_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_LATE_S", 0.2)
    (tmp_path / "b").write_text("a file where the node keeps its runs")
    raised = settle([node(tmp_path, "a"), node(tmp_path, "b")])
    assert [type(error) for error in raised] == [UsageError] * 2
    assert "host-b" in raised[1].message
    assert "cannot be used: Not a directory" in raised[1].message


def test_disk_that_fills_up_in_claiming(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_LATE_S", 0.2)

    def full():
        raise OSError(28, "No space left on device")

    store = Store()
    raised = at_once(
        *(
            lambda rank=rank: folders.settle_folders(
                Board(store, rank), 2, "h", tmp_path, lambda: 0 if rank == 0 else None, full
            )
            for rank in range(2)
        )
    )
    assert [type(error) for error in raised] == [UsageError] * 2
    assert "No space left on device" in raised[0].message


def test_released_folder_is_free_again_and_keeps_what_is_not_ours(tmp_path):
    folder = tmp_path / "run"
    paths.claim_folder(folder)
    paths.release_folder(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").touch()
    paths.claim_folder(folder)
    paths.release_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    paths.claim_folder(folder)

"""Joining the folders of a run's nodes: what fits comes together, all else is refused."""

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.load import load_summary
from ddp_profiler.record import parts, paths, reader, writer
from ddp_profiler.schema import (
    ClockReading,
    Failure,
    LevelFacts,
    LevelSettings,
    MachineUse,
    RankPhase,
    RankPlace,
    RecordPart,
)
from tests.unit.test_record import batch, run_info, write_stream

WORLD = 4


def info(**changes):
    values = {
        "world_size": WORLD,
        "levels": (LevelSettings("dp4", 4, 8, 1, "packed", (0, 1, 2, 3)),),
        "ranks": tuple(
            RankPlace(r, r % 2, r // 2, f"node{r // 2}", "boot", "cpu", 17) for r in range(WORLD)
        ),
        "facts": (LevelFacts("dp4", 10, 40, 1, (40,), {"gradient_collectives": None}),),
        "failures": (),
        "parts": (
            RecordPart(0, "node0", "/data/run", (0, 1)),
            RecordPart(2, "node1", "/scratch/run", (2, 3)),
        ),
        **changes,
    }
    return run_info(**values)


def make_part(folder, ranks, description=None, **stream):
    folder.mkdir(parents=True)
    writer.write_run_info(folder, description or info())
    for rank in ranks:
        batches = [{**batch(20 * rank + more), "level": [0, 0]} for more in (0, 10)]
        write_stream(folder, batches, rank, **stream)
    return folder


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def nodes(tmp_path):
    """The folders of two nodes; the second one says that it is rank 2's."""
    return (
        make_part(tmp_path / "a", (0, 1)),
        make_part(tmp_path / "b", (2, 3), info(keeper=2)),
    )


def test_two_nodes_become_one_run(nodes, tmp_path):
    before = [content(folder) for folder in nodes]
    out = tmp_path / "deep" / "out"
    merged = parts.merge(nodes, out)
    assert merged.ranks == {nodes[0]: (0, 1), nodes[1]: (2, 3)}
    assert merged.missing == ()
    files = {name: data for part in before for name, data in part.items() if name != "run.json"}
    assert {name: data for name, data in content(out).items() if name != "run.json"} == files
    assert reader.read_run_info(out) == info()
    assert [content(folder) for folder in nodes] == before
    summary = load_summary(out)
    assert not summary.run.partial
    assert summary.notes == ()


def test_order_does_not_matter(nodes, tmp_path):
    parts.merge(nodes, tmp_path / "x")
    parts.merge(nodes[::-1], tmp_path / "y")
    assert content(tmp_path / "x") == content(tmp_path / "y")


def test_summary_file_and_plots_are_not_taken_over(nodes, tmp_path):
    writer.write_json(paths.summary_file(nodes[0]), {"schema_version": 1})
    paths.plots_folder(nodes[0]).mkdir()
    parts.merge(nodes, tmp_path / "out")
    assert "summary.json" not in content(tmp_path / "out")


def test_missing_ranks_are_named_with_the_place(nodes, tmp_path):
    paths.rank_file(nodes[1], 3).unlink()
    merged = parts.merge(nodes, tmp_path / "out")
    assert merged.missing == (3,)
    summary = load_summary(tmp_path / "out")
    assert summary.run.partial
    assert summary.notes == (
        "The record of rank 3 is missing here; it was written on node1 in /scratch/run. "
        "Join both with ddp-profiler merge.",
    )


def test_collected_file_that_its_node_kept_is_the_same(nodes, tmp_path):
    kept = paths.rank_file(nodes[1], 2)
    paths.rank_file(nodes[0], 2).write_bytes(kept.read_bytes())
    merged = parts.merge(nodes, tmp_path / "out")
    assert merged.ranks == {nodes[0]: (0, 1, 2), nodes[1]: (3,)}


def test_same_rank_with_other_bytes(nodes, tmp_path):
    mine = write_stream(nodes[0], [batch(7)], 2)
    with pytest.raises(InputError) as raised:
        parts.merge(nodes, tmp_path / "out")
    assert "Rank 2 has two different files" in raised.value.message
    assert str(mine) in raised.value.message
    assert str(paths.rank_file(nodes[1], 2)) in raised.value.message
    assert not (tmp_path / "out").exists()


def test_folder_of_another_run(nodes, tmp_path):
    other = make_part(tmp_path / "c", (2,), info(run_id="run-2"), run_id="run-2")
    with pytest.raises(InputError) as raised:
        parts.merge((nodes[0], other), tmp_path / "out")
    for words in ("run-1", "run-2", str(nodes[0]), str(other)):
        assert words in raised.value.message
    assert not (tmp_path / "out").exists()


def test_file_of_another_run(nodes, tmp_path):
    paths.rank_file(nodes[1], 2).unlink()
    write_stream(nodes[1], [batch(0)], 2, run_id="run-2")
    with pytest.raises(InputError, match=r"rank-00002\.arrows belongs to the run run-2"):
        parts.merge(nodes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_file(nodes, tmp_path):
    paths.rank_file(nodes[1], 3).write_bytes(b"\0" * 64)
    with pytest.raises(InputError, match=r"rank-00003\.arrows is not a span stream"):
        parts.merge(nodes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cut_file_is_joined_as_far_as_it_goes(nodes, tmp_path):
    path = paths.rank_file(nodes[1], 3)
    path.write_bytes(path.read_bytes()[:-20])
    parts.merge(nodes, tmp_path / "out")
    summary = load_summary(tmp_path / "out")
    assert summary.run.partial
    assert any("rank 3 was cut" in note for note in summary.notes)


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}'])
def test_damaged_description(nodes, tmp_path, text):
    paths.run_file(nodes[1]).write_text(text)
    with pytest.raises(InputError, match=r"b/run\.json"):
        parts.merge(nodes, tmp_path / "out")


def test_folder_that_holds_no_run(nodes, tmp_path):
    with pytest.raises(InputError, match=r"none is not a folder"):
        parts.merge((*nodes, tmp_path / "none"), tmp_path / "out")


def test_nothing_measured_anywhere(tmp_path):
    empty = [make_part(tmp_path / name, ()) for name in "ab"]
    with pytest.raises(InputError, match=r"holds a rank-\*\.arrows"):
        parts.merge(empty, tmp_path / "out")


def test_one_folder_is_nothing_to_join(nodes, tmp_path):
    for given in ((nodes[0],), (nodes[0], tmp_path / "b" / ".." / "a")):
        with pytest.raises(UsageError, match=r"fewer than two"):
            parts.merge(given, tmp_path / "out")


def test_out_that_holds_a_run_is_left_alone(nodes, tmp_path):
    taken = make_part(tmp_path / "taken", (0,), info(run_id="run-9"), run_id="run-9")
    for out in (taken, *nodes):
        before = content(out)
        with pytest.raises(UsageError, match=r"already holds a run"):
            parts.merge(nodes, out)
        assert content(out) == before


def test_disk_that_fills_up_leaves_nothing(nodes, tmp_path, monkeypatch):
    copied = []

    def full(source, target):
        target.write(b"some")
        copied.append(target.name)
        if len(copied) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts.shutil, "copyfileobj", full)
    with pytest.raises(UsageError, match=r"No space left on device"):
        parts.merge(nodes, tmp_path / "out")
    assert len(copied) == 3
    assert not (tmp_path / "out").exists()


def test_description_is_the_most_complete(tmp_path):
    """Node 1 lost its link: it knows of one level only, and why it failed."""
    early = info(status="failed", keeper=2, facts=(), failures=(Failure(2, "level dp4", "lost"),))
    given = (
        make_part(tmp_path / "b", (2, 3), early),
        make_part(tmp_path / "a", (0, 1), info(failures=(Failure(1, "closing", "late"),))),
    )
    merged = parts.merge(given, tmp_path / "out")
    assert merged.info.status == "complete"
    assert len(merged.info.facts) == 1
    assert merged.info.keeper == 0
    assert merged.info.failures == (
        Failure(1, "closing", "late"),
        Failure(2, "level dp4", "lost"),
    )


def test_each_field_is_the_one_that_knows_most(tmp_path):
    """Node 1 learnt how the run ended; rank 0's node, which was cut off, what was measured."""
    use = (MachineUse(0, 1.0),)
    facts = tuple(replace(fact, machine=use) for fact in info().facts)
    clock = ClockReading(2, 1, -5, 5, 0)
    phase = RankPhase(0, "node0", "closing", False)
    given = (
        make_part(tmp_path / "a", (0, 1), info(status="running", facts=facts, clocks=(clock,))),
        make_part(tmp_path / "b", (2, 3), info(status="failed", keeper=2, phases=(phase,))),
        make_part(tmp_path / "c", (), info(status="complete", keeper=3, facts=(), ranks=())),
    )
    merged = parts.merge(given, tmp_path / "out").info
    assert merged.status == "complete"
    assert (merged.facts, merged.clocks, merged.phases) == (facts, (clock,), (phase,))
    assert (merged.ranks, merged.levels, merged.parts) == (
        info().ranks,
        info().levels,
        info().parts,
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("running", "running"), "running"),
        (("running", "failed"), "failed"),
        (("failed", "complete"), "complete"),
    ],
)
def test_status_is_the_one_that_says_most(tmp_path, states, expected):
    given = [
        make_part(tmp_path / str(i), (i,), info(status=state)) for i, state in enumerate(states)
    ]
    assert parts.merge(given, tmp_path / "out").info.status == expected


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ddp_profiler.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )


def test_command_says_what_it_joined(nodes, tmp_path):
    paths.rank_file(nodes[1], 3).unlink()
    odd = tmp_path / "b\x1b[31m\nfake"
    nodes[1].rename(odd)
    done = call("merge", nodes[0], odd, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Run run-1, complete",
        f"  {nodes[0]}: ranks 0, 1",
        f"  {tmp_path}/b\\x1b[31m\\nfake: rank 2",
        "  missing: rank 3",
        f"Run folder: {tmp_path / 'out'}",
    ]


def test_command_refuses_in_two_lines_without_escapes(nodes, tmp_path):
    other = make_part(tmp_path / "c", (2,), info(run_id="\x1b]0;x\x07"), run_id="\x1b]0;x\x07")
    done = call("merge", nodes[0], other, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 2
    assert "\x1b" not in done.stderr
    assert "\\x1b]0;x\\x07" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("merge",), "Missing argument 'DIR...'"),
        (("merge", "a", "b"), "Missing option '--out'"),
        (("merge", "a", "--out", "x"), "fewer than two"),
    ],
)
def test_wrong_usage(arguments, words):
    done = call(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_old_description_is_read_as_one_folder(tmp_path):
    writer.write_run_info(tmp_path, info())
    path = paths.run_file(tmp_path)
    plain = msgspec.json.decode(path.read_bytes())
    del plain["keeper"], plain["parts"]
    writer.write_json(path, plain)
    assert reader.read_run_info(tmp_path) == replace(info(), parts=(), keeper=0)
    assert parts.keeper_of(tmp_path, "run-1") == 0
    assert parts.keeper_of(tmp_path, "run-2") is None


def test_of_two_runs_that_were_killed_the_one_that_got_further_counts(tmp_path):
    given = (
        make_part(tmp_path / "a", (0, 1), info(status="running", facts=())),
        make_part(tmp_path / "b", (2, 3), info(status="running", keeper=2)),
    )
    assert parts.merge(given, tmp_path / "out").info == info(status="running")

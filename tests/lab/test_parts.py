"""Two nodes that share no folder: each keeps its ranks' files, and rank 0 collects them."""

import json
import shutil

import pytest

from ddp_profiler.load import load_summary
from ddp_profiler.record import paths, reader
from tests.integration.conftest import run_command
from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

OPTIONS = (
    *("-m", "ddp_profiler.run", "--model", "timed:layers=2,parameters=20000"),
    *("--steps", "3", "--warmup", "2", "--allreduce-max-mb", "0.1", "--threads-per-rank", "1"),
    *("--placement", "packed", "--out", "runs/run"),
)


def launch(root, ranks_a_node):
    """Runs a study on two nodes that each see a disk of their own at ``runs``."""
    with lab_tool.Lab(nodes=2, private_dirs=[root / "runs"]) as lab:
        results = lab.run_torchrun(
            OPTIONS,
            nproc_per_node=ranks_a_node,
            timeout=150,
            cwd=root,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    assert [r.returncode for r in results] == [0, 0], results[0].output[-3000:]
    return results, [root / f"runs.node{node}" / "run" for node in range(2)]


def analyzed(folder):
    done = run_command(["-m", "ddp_profiler.cli", "analyze", folder, "--json"])
    assert done.code == 0, done.err
    return json.loads(done.out)


def ranks_in(folder):
    return sorted(paths.rank_files(folder))


@pytest.fixture(scope="module")
def collected(usable, tmp_path_factory):
    """Two nodes with two ranks each; returns their folders."""
    root = tmp_path_factory.mktemp("nodes")
    (root / "runs").mkdir()
    results, folders = launch(root, 2)
    assert "not all parts were collected" not in results[0].output
    return folders


def test_rank_0_has_the_files_of_all_and_node_1_keeps_its_own(collected):
    first, second = collected
    assert ranks_in(first) == [0, 1, 2, 3]
    assert ranks_in(second) == [2, 3]
    for rank in (2, 3):
        kept, copy = paths.rank_file(second, rank), paths.rank_file(first, rank)
        assert copy.read_bytes() == kept.read_bytes()
        assert reader.read_rank(second, rank).complete
    assert {path.name for path in first.iterdir()} == {
        *("run.json", "summary.json", "report.html", "plots"),
        *(f"rank-{rank:05d}.arrows" for rank in range(4)),
    }


def test_collected_run_is_whole(collected):
    summary = json.loads((collected[0] / "summary.json").read_text())
    assert not summary["run"]["partial"]
    assert summary["run"]["nodes"] == 2
    assert [len(level["ranks"]) for level in summary["levels"]] == [1, 2, 4]
    assert analyzed(collected[0]) == summary


def test_both_nodes_describe_the_same_finished_run(collected):
    first, second = map(reader.read_run_info, collected)
    assert (first.status, first.keeper, first.failures) == ("complete", 0, ())
    assert second.keeper in (2, 3)
    assert [part.ranks for part in first.parts] == [(0, 1), (2, 3)]
    assert [part.hostname for part in first.parts] == ["node0", "node1"]
    assert [part.folder for part in first.parts] == [
        str(collected[0].parents[1] / "runs" / "run")
    ] * 2
    own = json.loads(paths.run_file(collected[1]).read_text())
    assert own == {**json.loads(paths.run_file(collected[0]).read_text()), "keeper": second.keeper}


def test_merged_parts_equal_the_collected_run(collected, tmp_path):
    only_own = tmp_path / "node0"
    shutil.copytree(collected[0], only_own)
    for rank in (2, 3):
        paths.rank_file(only_own, rank).unlink()
    assert analyzed(only_own)["run"]["partial"]
    out = tmp_path / "joined"
    command = ["-m", "ddp_profiler.cli", "merge", collected[1], only_own, "--out", out]
    done = run_command(command)
    assert done.code == 0, done.err
    assert f"Run folder: {out}" in done.out
    assert ranks_in(out) == [0, 1, 2, 3]
    assert analyzed(out) == analyzed(collected[0])
    assert run_command(command).code == 2


def test_folder_of_one_node_alone_is_readable(collected):
    done = run_command(["-m", "ddp_profiler.cli", "analyze", collected[1]])
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "PARTIAL: a part of the record is missing" in text
    assert "The record of ranks 0, 1 is missing here; it was written on node0" in text
    summary = load_summary(collected[1])
    dp1, dp2, dp4 = summary.levels
    assert dp1.step_ms is None
    assert dp2.step_ms is None
    assert [rank.rank for rank in dp4.ranks] == [2, 3]
    whole = next(level for level in load_summary(collected[0]).levels if level.dp == 4)
    # Ranks of one step take it together: what two of four say is near what all say.
    assert dp4.step_ms.median == pytest.approx(whole.step_ms.median, rel=0.3)
    for withheld in (dp4.breakdown_ms["exposed_wait"], dp4.allreduce, dp4.pop, dp4.efficiency):
        assert withheld is None
    assert dp4.batch_check.ok is None


def test_collection_that_fails_keeps_the_parts_and_says_so(usable, tmp_path):
    """Something stands where rank 0's disk should take the part of rank 1."""
    (tmp_path / "runs").mkdir()
    blocked = paths.partial_file(paths.rank_file(tmp_path / "runs.node0" / "run", 1))
    blocked.mkdir(parents=True)
    results, (first, second) = launch(tmp_path, 1)
    (line,) = (text for text in results[0].stderr.splitlines() if "not all parts" in text)
    assert f"{blocked.name} is in the way; remove it" in line
    assert f"They are kept: rank 1 on node1 in {tmp_path / 'runs' / 'run'}." in line
    assert "join: ddp-profiler merge runs/run DIR... --out RUN" in results[0].stderr
    assert "not all parts" not in results[1].stderr

    assert "PARTIAL" in results[0].stdout
    summary = json.loads((first / "summary.json").read_text())
    assert summary["run"]["partial"]
    assert summary["run"]["status"] == "complete"
    assert any("rank 1 is missing here; it was written on node1" in n for n in summary["notes"])
    assert ranks_in(first) == [0]
    assert reader.read_run_info(second).status == "complete"

    done = run_command(["-m", "ddp_profiler.cli", "merge", first, second, "--out", tmp_path / "r"])
    assert done.code == 0, done.err
    assert not load_summary(tmp_path / "r").run.partial

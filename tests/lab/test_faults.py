"""Several nodes, and what goes wrong between them: an absent one, a wrong interface, a cut link."""

import json
import os
import subprocess
import sys
import threading

import pytest

from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 15


def test_absent_node_and_its_address_are_the_last_line(usable, tmp_path):
    waits = tmp_path / "torchrun"
    waits.write_text("#!/bin/sh\nexec sleep 99\n")
    waits.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch/lab", "--absent", "1", "--timeout", "1", "--torchrun", waits, "--", "job"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 124
    assert done.stderr.splitlines()[-2:] == [
        "lab: ended after 1 s; still running: node 0",
        "lab: absent: node 1; the others waited at 10.213.77.1:29500",
    ]


def test_interface_that_other_nodes_cannot_reach(usable, tmp_path):
    options = ("-m", "ddp_profiler.run", "--model", "mlp:width=64", "--timeout", "30")
    with lab_tool.Lab(nodes=2) as lab:
        results = lab.run_torchrun(
            [*options, "--out", str(tmp_path / "run")],
            timeout=90,
            env={**ENV, "GLOO_SOCKET_IFNAME": "lo"},
        )
    assert all(r.returncode not in (0, 124) and not r.timed_out for r in results)
    line = "Rank 0 on node0 would use interface lo (127.0.0.1, from GLOO_SOCKET_IFNAME)"
    for result in results:
        assert line in result.stderr, result.stderr[-2000:]
        assert "GLOO_SOCKET_IFNAME=lab0 on node0" in result.stderr


@pytest.fixture(scope="module")
def cut(usable, tmp_path_factory):
    """A study of two nodes whose link goes down in the steps of dp 2; seconds from cut to end."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    options = (
        *("-m", "ddp_profiler.run", "--model", "timed:layers=2,parameters=100000"),
        *("--dp", "2", "--steps", "400", "--warmup", "2", "--threads-per-rank", "1"),
        *("--timeout", str(TIMEOUT_S), "--out", str(folder)),
    )
    cut_at: list[float] = []
    with lab_tool.Lab(nodes=2) as lab:
        begin = lab_tool.time.monotonic()

        def pull() -> None:
            cut_at.append(lab_tool.time.monotonic() - begin)
            lab.set_link(1, up=False)

        timer = threading.Timer(6, pull)

        def follow(node: int, stream: str, line: str) -> None:
            if line.startswith("[1/1] dp2"):
                timer.start()

        results = lab.run_torchrun(options, timeout=120, env=ENV, echo=follow)
        timer.cancel()
    assert cut_at, results[0].output[-3000:]
    return folder, results, [r.ended_s - cut_at[0] for r in results]


def test_both_sides_of_a_cut_link_end_with_an_error(cut):
    _, results, seconds = cut
    assert [r.timed_out for r in results] == [False, False], results[1].output[-3000:]
    assert all(r.returncode != 0 for r in results)
    # Its timeout, some 15 s more at the most, and room for a busy machine.
    assert max(seconds) < TIMEOUT_S + 30


def test_each_side_says_what_it_was_doing(cut):
    _, results, _ = cut
    for rank, result in enumerate(results):
        assert f"rank {rank} " in result.stderr
        assert "in level dp2, " in result.stderr
    table = results[0].stderr.split("what each rank was doing:")[1].splitlines()[2:4]
    assert [line.split()[:2] for line in table] == [["0", "node0"], ["1", "node1"]]
    assert all("level dp2" in line for line in table)
    assert "failed first" in table[0]
    assert "no sign of life" in table[1]


def test_what_was_recorded_before_is_kept(cut):
    folder, _, _ = cut
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "failed"
    assert info["failures"][0]["rank"] == 0
    assert [(p["hostname"], p["responds"]) for p in info["phases"]] == [
        ("node0", True),
        ("node1", False),
    ]
    assert info["environment"]["1"]["network"] == {
        "interfaces": ["lab0"],
        "addresses": ["10.213.77.2"],
        "chosen_by": "GLOO_SOCKET_IFNAME",
    }
    shown = subprocess.run(
        [sys.executable, "-m", "ddp_profiler.cli", "analyze", str(folder), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert shown.returncode == 0, shown.stderr
    summary = json.loads(shown.stdout)
    assert summary["run"]["partial"] is True
    assert summary["levels"][0]["breakdown_ms"]["backward"] > 0
    assert summary["levels"][0]["steps"] > 0
    assert any("no sign of life" in note for note in summary["notes"])

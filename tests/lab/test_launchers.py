"""The launchers for several nodes, run for real: on the lab's nodes, and under a Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.conftest import ROOT, lab_tool

pytestmark = pytest.mark.lab

LAUNCH = ROOT / "launch"
SHORT = (
    "--model",
    "timed",
    "--dp",
    "2",
    "--steps",
    "4",
    "--warmup",
    "2",
    "--allreduce-max-mb",
    "1",
)
# The launchers call torchrun, as a user's environment has it.
ENVIRON = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "NPROC_PER_NODE": "1",
}


def measured(folder):
    """Returns hostnames, by rank, of a run that was measured to its end at dp 2."""
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "complete"
    summary = json.loads((folder / "summary.json").read_text())
    assert [level["dp"] for level in summary["levels"]] == [2]
    return [place["hostname"] for place in info["ranks"]]


@pytest.mark.parametrize("name", ["multi_node_static.sh", "multi_node_c10d.sh"])
def test_on_two_nodes_of_the_lab(usable, tmp_path, name):
    # The lab tells each node NNODES, NODE_RANK and MASTER_ADDR, as a user would.
    command = f"{LAUNCH / name} {' '.join(SHORT)} --out {tmp_path / 'run'}"
    with lab_tool.Lab(nodes=2, rate_mbit=1000) as lab:
        commands = {node: ["sh", "-c", command] for node in range(2)}
        found = lab.run_nodes(commands, ENVIRON, timeout=120, cwd=tmp_path)
    assert [node.returncode for node in found] == [0, 0], found[0].output[-3000:]
    assert sorted(measured(tmp_path / "run")) == ["node0", "node1"]


@pytest.fixture(scope="module")
def slurm():
    """Skips, and says what is missing, where no Slurm can be started."""
    found = subprocess.run(
        [LAUNCH / "slurm_here", "--check"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())


def slurm_here(*command, cwd):
    return subprocess.run(
        [LAUNCH / "slurm_here", *command],
        cwd=cwd,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_under_slurm(slurm, tmp_path):
    before = set(os.listdir("/tmp"))
    found = slurm_here("sbatch", "--wait", LAUNCH / "slurm.sbatch", *SHORT, cwd=tmp_path)
    said = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert found.returncode == 0, found.stdout + found.stderr + said
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "slurm-1"
    assert sorted(measured(folder)) == ["node0", "node1"]
    # Nothing of it is left: neither files nor, as the kernel sees to, processes.
    left = [n for n in os.listdir("/tmp") if n.startswith("slurm_here.") and n not in before]
    assert left == []


def test_failure_of_a_job_is_passed_on(slurm, tmp_path):
    assert slurm_here("sh", "-c", "exit 7", cwd=tmp_path).returncode == 7
    job = "#!/bin/sh\\nexit 3\\n"
    found = slurm_here("sh", "-c", f"printf '{job}' | sbatch --wait", cwd=tmp_path)
    assert found.returncode == 3, found.stdout + found.stderr

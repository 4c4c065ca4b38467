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


SCRIPT = """
import os, socket
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), os.environ["RANK"], socket.gethostname())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["multi_node_static.sh", "multi_node_c10d.sh"])
def test_on_two_nodes_of_the_lab(usable, tmp_path, name):
    """A script that only meets, for time's sake; the study runs under Slurm below."""
    (tmp_path / "meet.py").write_text(SCRIPT)
    # The lab tells each node NNODES, NODE_RANK and MASTER_ADDR, as a user would.
    commands = {node: [str(LAUNCH / name), "--out", "runs/run", "meet.py"] for node in range(2)}
    with lab_tool.Lab(nodes=2, rate_mbit=1000) as lab:
        found = lab.run_nodes(commands, ENVIRON, timeout=120, cwd=tmp_path)
    assert [node.returncode for node in found] == [0, 0], found[0].output[-3000:]
    said = sorted(line.split() for node in found for line in node.stdout.splitlines())
    assert [line[:3] for line in said] == [["sum", "2", "0"], ["sum", "2", "1"]]
    assert {line[3] for line in said} == {"node0", "node1"}


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


# sbatch --wait looks after 2, 10 and 42 s only.
SUBMIT_AND_WAIT = """
id=$(sbatch --parsable "$@") || exit
open='PENDING|RUNNING|COMPLETING'
while squeue --noheader --jobs="$id" --states=all --format=%T | grep -qE "$open"
do sleep 0.3; done
scontrol --oneliner show job "$id" | grep -oE 'JobState=[A-Z]+|ExitCode=[0-9]+'
"""


def test_under_slurm(slurm, tmp_path):
    before = set(os.listdir("/tmp"))
    submit = ("sh", "-c", SUBMIT_AND_WAIT, "submit")
    found = slurm_here(*submit, LAUNCH / "slurm.sbatch", *SHORT, cwd=tmp_path)
    said = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert found.stdout.split() == ["JobState=COMPLETED", "ExitCode=0"], found.stderr + said
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "slurm-1"
    assert sorted(measured(folder)) == ["node0", "node1"]
    # Nothing of it is left: neither files nor, as the kernel sees to, processes.
    left = [n for n in os.listdir("/tmp") if n.startswith("slurm_here.") and n not in before]
    assert left == []


def test_failures_are_passed_on(slurm, tmp_path):
    assert slurm_here("sh", "-c", "exit 7", cwd=tmp_path).returncode == 7
    (tmp_path / "job").write_text("#!/bin/sh\nexit 3\n")
    found = slurm_here("sh", "-c", SUBMIT_AND_WAIT, "submit", "job", cwd=tmp_path)
    assert found.stdout.split() == ["JobState=FAILED", "ExitCode=3"], found.stderr


def test_nothing_is_left_of_one_that_is_ended(slurm, tmp_path):
    with subprocess.Popen(
        [LAUNCH / "slurm_here", "sh", "-c", "echo $SLURM_CONF; exec sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        folder = Path(started.stdout.readline().strip()).parent
        assert folder.is_dir()
        started.terminate()
        assert started.wait(20) == 143
    assert not folder.exists()
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(folder) not in shown.stdout

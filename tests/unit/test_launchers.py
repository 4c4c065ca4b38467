"""The launchers as files: what they say of themselves, and that they hold no logic."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = ("single_node.sh", "multi_node_static.sh", "multi_node_c10d.sh", "slurm.sbatch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_short_and_without_logic(name):
    text = (LAUNCH / name).read_text()
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(commands) <= 16
    words = set(
        re.findall(r"^\s*(if|for|while|case|function)\b", "\n".join(commands), re.MULTILINE)
    )
    assert not words
    # What could be tried, and what could not.
    assert re.search(r"not on\s+(#\s+)?GPUs", text)
    assert "-m ddp_profiler.run" in text


def test_each_option_has_its_word():
    """In the lists of options each line has a comment, or one above it, or explains itself."""
    for name in SCRIPTS:
        options = re.search(r"options=\((.*?)\n\)", (LAUNCH / name).read_text(), re.DOTALL)[1]
        above = ""
        for line in filter(None, options.splitlines()):
            if not line.strip().startswith("#"):
                assert " # " in line or above.strip().startswith("#") or ":?" in line, line
            above = line


def dry(name, *arguments, **environ):
    """Runs a launcher with a torchrun that prints what it was given."""
    folder = environ.pop("folder")
    for tool, lines in (
        ("torchrun", 'printf "%s\\n" "$@"'),
        ("srun", 'printf "srun %s\\n" "$1" "$2"; shift 2; exec "$@"'),
        ("scontrol", "echo first; echo second"),
    ):
        (folder / tool).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / tool).chmod(0o755)
    plain = {
        k: v for k, v in os.environ.items() if not k.startswith(("NNODES", "NODE_", "MASTER_"))
    }
    return subprocess.run(
        ["bash", LAUNCH / name, *arguments],
        env={**plain, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_reaches_torchrun(tmp_path):
    told = ("train.py", "--name", "two words")
    end = ["-m", "ddp_profiler.run", *told]
    one = dry("single_node.sh", *told, folder=tmp_path).stdout.splitlines()
    assert one == ["--standalone", "--nproc-per-node=auto", *end]
    where = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node0", "NPROC_PER_NODE": "4"}
    static = dry("multi_node_static.sh", *told, folder=tmp_path, **where).stdout.splitlines()
    assert {"--nnodes=3", "--node-rank=2", "--master-addr=node0", "--nproc-per-node=4"} <= set(
        static
    )
    assert static[-5:] == end
    c10d = dry("multi_node_c10d.sh", *told, folder=tmp_path, **where).stdout.splitlines()
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", "--nnodes=3"} <= set(c10d)
    job = {
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "x[0-1]",
        "SLURM_CPUS_PER_TASK": "8",
    }
    slurm = dry("slurm.sbatch", *told, folder=tmp_path, **job).stdout.splitlines()
    assert "srun --cpus-per-task=8" in slurm
    assert {"--rdzv-endpoint=first:29500", "--rdzv-id=17", "--nnodes=2"} <= set(slurm)
    assert slurm[-7:] == ["-m", "ddp_profiler.run", "--out", "runs/slurm-17", *told]


def test_what_is_missing_is_named(tmp_path):
    for name, variable in (("multi_node_static.sh", "NNODES"), ("multi_node_c10d.sh", "NNODES")):
        found = dry(name, folder=tmp_path)
        assert found.returncode != 0
        assert found.stdout == ""
        assert f"set {variable} to the number of nodes" in found.stderr


def test_kubernetes():
    text = (LAUNCH / "kubeflow_trainjob.yaml").read_text()
    assert "Not run here" in text
    runtime, job = yaml.safe_load_all(text)
    assert {d["apiVersion"] for d in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    # Kubeflow fills in the trainer's settings where it finds this label and this name.
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    trainer = job["spec"]["trainer"]
    assert [*trainer["command"], *trainer["args"]][:3] == ["torchrun", "-m", "ddp_profiler.run"]
    limits = trainer["resourcesPerNode"]["limits"]
    (threads,) = [e["value"] for e in trainer["env"] if e["name"] == "OMP_NUM_THREADS"]
    assert int(limits["cpu"]) == trainer["numProcPerNode"] * int(threads)
    assert int(limits["nvidia.com/gpu"]) == trainer["numProcPerNode"]


def test_slurm_here_explains_itself():
    shown = subprocess.run(
        ["bash", LAUNCH / "slurm_here", "--help"], capture_output=True, text=True, check=True
    )
    assert "launch/slurm_here sbatch --wait launch/slurm.sbatch" in shown.stdout
    assert "set -euo" not in shown.stdout

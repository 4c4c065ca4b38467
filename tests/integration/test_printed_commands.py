"""Every command that README, the documents and the launchers print runs as it is printed.

In a sandbox that holds what the text presupposes. What starts ranks takes long: of those only
README's and the quickstart's run each time, all others with DDP_PROFILER_ALL_COMMANDS=1.
"""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest

from . import printed
from .conftest import ROOT
from .printed_sandbox import STUDY, Sandboxes

NETWORK = "installs from the network"
SUITE = "runs these tests, or part of them"
LONG = "takes many minutes on a quiet machine; its arithmetic has tests of its own"
CLUSTER = "needs a cluster"
GPU = "needs a GPU, or minutes to rehearse without one; its arithmetic has tests of its own"

BY_HAND = {
    r"make run": NETWORK,
    r"make (test|lint)\b.*": SUITE,
    r"make docs(-links)?": NETWORK,
    r"pip install .*": NETWORK,
    r"(DDP_PROFILER_\w+=1 )?pytest .*": SUITE,
    r"python benchmarks/(accuracy|compare|hostile|overhead|scripts|soak)\.py.*": LONG,
    r"python benchmarks/(gathering|worker_costs)\.py.*": LONG,
    r"make notebooks": LONG,
    r"torchrun .* --nccl .*": GPU,
    r"(benchmarks/gpu_check\.sh|python benchmarks/gpu_check\.py).*": GPU,
    r"python benchmarks/trace_speed\.py .*": NETWORK,
    r"srun .* ddp-profiler doctor .*": CLUSTER,
    r"sbatch launch/slurm\.sbatch .*": CLUSTER,
    r"kubectl .*": CLUSTER,
    r"(apt-get update && )?launch/slurm_here --install": NETWORK,
    r"systemctl disable .*": "changes the machine",
    r"sysctl net.*": "changes the machine",
    r"scp .*": "needs a second host",
    r"python -m ddp_profiler\.run": "stands for what a launcher starts with its variables",
}
"""What cannot run here: all of a command, as a pattern, and why."""

REFUSED = {
    "ddp-profiler plan --samples 50000 --epochs 90 --global-batch 256 --micro-batch 2 "
    "--accumulate 18 --dp 7": 2,
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29801 "
    "python -m ddp_profiler.run --timeout 5": 2,
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29801 "
    "python -m ddp_profiler.run --timeout 5": 2,
}
"""Exit codes that the text states; all others are 0."""

VERDICTS = (r"ddp-profiler doctor\b.*", r"ddp-profiler compare .*--fail-above .*")
"""What may also end with 1, by what it finds on the machine that it runs on."""

ON_TWO_NODES = {
    "NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/multi_node_static.sh --out runs/NAME": (
        "NODE_RANK=0",
        "NODE_RANK=1",
    ),
    "NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/multi_node_static.sh --out runs/NAME": (
        "NODE_RANK=1",
        "NODE_RANK=0",
    ),
    "NNODES=2 MASTER_ADDR=node0 launch/multi_node_c10d.sh --out runs/NAME": ("", ""),
    "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 --master-addr=node0 "
    "--master-port=29500 -m ddp_profiler.run --out runs/NAME": ("--node-rank=0", "--node-rank=1"),
}
"""Commands for one node of two, which run in the lab; and what differs on the other one."""

SLOW = frozenset(
    f"{STUDY} {options}"
    for options in (
        "--data README.md --accumulate 1,4",
        "--global-batch 32 --micro-batch 4",
        "--confirm",
        "--find-micro-batch",
    )
) | frozenset(ON_TWO_NODES)
"""Of README's and the quickstart's launches those that take more than 20 s on 2 cores."""

ALL = os.environ.get("DDP_PROFILER_ALL_COMMANDS") == "1"
ALWAYS = re.compile(r"README.*\.md|docs/quickstart\.md")
"""Documents whose launches are always tried, but for SLOW ones."""


def launches(key):
    """Tells whether a command starts ranks, which takes 10 s and more."""
    if key.endswith("--help"):
        return False
    if key.startswith("launch/lab "):
        return " -- " in key
    return bool(
        re.search(r"torchrun|ddp_profiler\.run|ddp-profiler study|slurm_here (?!--check)|\.sh", key)
    )


def by_hand(key):
    return next((why for pattern, why in BY_HAND.items() if re.fullmatch(pattern, key)), None)


def codes(key):
    """Returns the exit codes that the text allows."""
    is_verdict = any(re.fullmatch(pattern, key) for pattern in VERDICTS)
    return (0, 1) if is_verdict else (REFUSED.get(key, 0),)


FOUND = printed.commands(ROOT)
UNIQUE = {}
for command in FOUND:
    UNIQUE.setdefault(command.key, []).append(command)


def cases():
    """Returns a case for each command that can run, named by where it is printed first."""
    found = []
    for key, places in UNIQUE.items():
        if by_hand(key):
            continue
        marks = [pytest.mark.distributed] if launches(key) else []
        if key.startswith("launch/lab ") or key in ON_TWO_NODES:
            marks.append(pytest.mark.lab)
        always = any(ALWAYS.fullmatch(place.file) for place in places)
        if launches(key) and (key in SLOW or not always) and not ALL:
            marks.append(pytest.mark.skip("starts ranks: DDP_PROFILER_ALL_COMMANDS=1 runs it"))
        found.append(pytest.param(places[0], id=places[0].place, marks=marks))
    return found


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory):
    return Sandboxes(lambda: tmp_path_factory.mktemp("printed"))


def require(tool):
    """Skips where what a command is about cannot run; in CI with root that is a failure."""
    check = subprocess.run([tool, "--check"], cwd=ROOT, capture_output=True, text=True)
    if check.returncode == 0:
        return
    if tool == "launch/lab" and os.environ.get("CI") == "true" and os.geteuid() == 0:
        pytest.fail(f"CI must have all that the lab needs: {check.stdout}{check.stderr}")
    pytest.skip(check.stdout + check.stderr)


def on_two_nodes(command):
    """Returns the command of the lab that gives a command to one node, and its like to another."""
    here, there = ON_TWO_NODES[command.key]
    nodes = [command.text, command.text.replace(here, there)]
    if here.endswith("=1"):
        nodes.reverse()
    # A comment at the end of a command ends with its line.
    given = shlex.quote(f"case $NODE_RANK in\n0) {nodes[0]}\n;;\n*) {nodes[1]}\n;;\nesac")
    text = f"launch/lab --nodes 2 --timeout 600 --exec {given}"
    return printed.Command(text, command.file, command.line)


def documents_in(text):
    """Returns the JSON documents in a text, one after the other."""
    found, text = [], text.strip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


@pytest.mark.parametrize("command", cases())
def test_runs_as_printed(command, sandboxes):
    for tool in ("launch/lab", "launch/slurm_here"):
        if f"{tool} " in command.text or (tool == "launch/lab" and command.key in ON_TWO_NODES):
            require(tool)
    if "jq" in command.key.split() and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    given = on_two_nodes(command) if command.key in ON_TWO_NODES else command
    done = sandboxes.done(given, timeout=900 if ALL else 170)
    said = f"{command.place}: {command.text}\n{done.out[-3000:]}\n{done.err[-3000:]}"
    assert done.code in codes(command.key), said
    if command.key.endswith("; echo $?"):
        assert done.out.split()[-1] == command.output.split()[-1], said
    if "--json" in command.key.split() and ">" not in command.text:
        assert documents_in(done.out), said


def test_the_commands_that_are_kept_here_are_printed():
    """Else the tables would rot, and the others' runs would come from nowhere."""
    for pattern in (*BY_HAND, *VERDICTS):
        assert any(re.fullmatch(pattern, key) for key in UNIQUE), pattern
    for key in (*REFUSED, *ON_TWO_NODES, *SLOW, STUDY):
        assert key in UNIQUE, key


def test_a_good_part_of_the_documents_is_found():
    """A collector that finds nothing would let every test pass."""
    of_readme = [command for command in FOUND if command.file == "README.md"]
    assert len(of_readme) >= 20
    assert len({command.file for command in FOUND}) >= 15
    assert sum(by_hand(key) is None for key in UNIQUE) >= 60

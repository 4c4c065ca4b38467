"""A launch in which ranks are missing, or a rank fails, on one host."""

import json
import socket

import pytest

from tests.integration.conftest import run_command

pytestmark = pytest.mark.distributed


def alone(rank, folder, **more):
    """Starts one rank of two and returns its port and how it ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    options = ("--model", "mlp:width=64", "--timeout", "5", "--out", folder)
    done = run_command(
        ["-m", "ddp_profiler.run", *options],
        env={**env, "MASTER_PORT": str(port), **more},
        timeout=60,
    )
    return port, done


def test_rank_1_is_missing(tmp_path):
    port, done = alone(0, tmp_path / "run")
    lines = done.err.strip().splitlines()
    assert done.code == 2, done.err
    assert len(lines) == 2, done.err
    assert "Rank 1 of 2 did not come" in lines[0]
    assert f"127.0.0.1:{port}" in lines[0]
    # Nothing was measured: the same command, put right, finds its folder free.
    assert not (tmp_path / "run").exists()


def test_rank_0_is_missing(tmp_path):
    port, done = alone(1, tmp_path / "run", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    lines = done.err.strip().splitlines()
    assert done.code == 2, done.err
    assert len(lines) == 2, done.err
    assert (
        f"Rank 1 on {socket.gethostname()} could not reach rank 0 at 127.0.0.1:{port}" in lines[0]
    )
    assert "refused" in lines[0]


def test_a_wrong_interface_is_said_before_ranks_meet(tmp_path):
    _, done = alone(0, tmp_path / "run", GLOO_SOCKET_IFNAME="nosuch*")
    lines = done.err.strip().splitlines()
    assert done.code == 2, done.err
    assert len(lines) == 2, done.err
    assert f"GLOO_SOCKET_IFNAME='nosuch*' on {socket.gethostname()} is a pattern" in lines[0]
    assert "127.0.0.1" in lines[0]
    assert not (tmp_path / "run").exists()


def test_one_rank_fails_and_each_ranks_phase_is_shown(study, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os, torch\nfrom ddp_profiler.workload import Workload\n"
        "class M(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        M.calls += 1\n"
        "        if M.calls > 9 and os.environ['RANK'] == '1': raise ValueError('planted')\n"
        "        return super().forward(x)\n"
        "def make(settings):\n"
        "    return Workload(name='broken', module=M(2, 1),\n"
        "        dataset=torch.utils.data.TensorDataset(torch.ones(64, 2)),\n"
        "        inputs=lambda b: (b[0],), loss=lambda o, b: o.mean(),\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    done = study(2, "--model", "broken:make", "--dp", "2", cwd=tmp_path)
    assert done.code != 0
    ours = [line for line in done.err.splitlines() if line.startswith("ddp_profiler.run: ")]
    assert f"rank 1 on {socket.gethostname()} failed in level dp2, " in done.err
    assert "ValueError: planted" in done.err
    # The failure once, then the table: not once for each rank.
    assert len([line for line in ours if "failed in" in line]) == 1, done.err
    assert "what each rank was doing" in done.err
    info = json.loads((done.folder / "run.json").read_text())
    assert info["status"] == "failed"
    assert info["failures"][0]["rank"] == 1
    assert "planted" in info["failures"][0]["message"]
    assert [p["rank"] for p in info["phases"]] == [0, 1]
    assert all(p["phase"].startswith("level dp2") for p in info["phases"])
    assert all(p["responds"] for p in info["phases"])

"""Nobody gets in: a run listens on what torch.distributed opens, and on nothing else."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddp_profiler.launches import environment as launch_environment
from ddp_profiler.launches import plan_launches
from ddp_profiler.measure.scripts import clocks
from tests.integration.conftest import environment

SCRIPT = Path(__file__).parent / "scripts" / "on_a_disk.py"
TRAIN = (str(SCRIPT), "hold", "-")


def listeners(process):
    """Returns what a launch listens on, as (agent or rank, address, port)."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        role = "agent" if one.pid == process.pid else "rank"
        with contextlib.suppress(psutil.Error):
            for each in one.net_connections(kind="inet"):
                # UDP knows no listening: each socket that is bound takes what comes.
                open_to_all = each.status == "LISTEN" or each.type == socket.SOCK_DGRAM
                if open_to_all and each.laddr:
                    found.add((role, each.laddr.ip, each.laddr.port))
    return found


def launch(argv, env):
    return subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.distributed
def test_a_run_opens_no_port_of_its_own_and_a_launch_of_ours_is_on_loopback(tmp_path):
    plain = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ours = plan_launches((2,), tmp_path, TRAIN, ("--warmup", "4", "--steps", "2"), None)[0]
    running = {
        "plain": launch((*plain, *TRAIN), environment({})),
        "ours": launch(ours.command, environment(launch_environment(2, lambda _: None))),
    }
    processes = {name: psutil.Process(one.pid) for name, one in running.items()}
    seen = {name: set() for name in running}
    deadline = time.monotonic() + 120
    while any(one.poll() is None for one in running.values()) and time.monotonic() < deadline:
        for name, one in running.items():
            if one.poll() is None:
                with contextlib.suppress(psutil.Error):
                    seen[name] |= listeners(processes[name])
        time.sleep(0.05)
    texts = {name: one.communicate(timeout=60)[0] for name, one in running.items()}
    # The script ends with 7, so torchrun ends with 1.
    assert [one.returncode for one in running.values()] == [1, 1], texts
    assert "4 + 4 steps were observed" in texts["ours"], texts["ours"]
    # The stores of torchrun's agent, and gloo on each rank.
    roles = {name: sorted(role for role, _, _ in found) for name, found in seen.items()}
    assert {"agent", "rank"} <= set(roles["plain"])
    assert {address for _, address, _ in seen["ours"]} <= {"127.0.0.1", "::1"}
    assert roles["ours"] == roles["plain"]


def test_the_clocks_of_hosts_close_their_port_and_answer_nobody_else():
    """The one port of ours: of a script on several hosts, for at most 10 s at its start."""

    class Board(dict):
        rank = 0
        find = learn = lambda self, key, kind=None: self.get(key)
        publish = dict.__setitem__

    board = Board({"clock domain/0": "a", "clock domain/1": "b"})
    made = clocks.ScriptClocks(board, 2, clocks.LocalClock(time.monotonic_ns, time.time_ns, "a"))
    thread = threading.Thread(target=made.open)
    thread.start()
    while "clock service" not in board:
        time.sleep(0.01)
    service = board["clock service"]
    with socket.create_connection(("127.0.0.1", service.port), timeout=5) as stranger:
        stranger.sendall(b"x" * len(service.token))
        # Closed without an answer.
        assert stranger.recv(1) == b""
    board["clock problem/1"] = ""
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", service.port), timeout=5).close()

"""The lab itself: links, names, clocks, exit codes, and that nothing of it is ever left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Looks
from tests.lab.conftest import ROOT, lab_tool

COMMAND = str(ROOT / "launch" / "lab")

Lab, LabError = lab_tool.Lab, lab_tool.LabError

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def nothing_left():
    """Fails a test after which namespaces or host files of a lab that it started remain."""
    before = set(spaces())
    yield
    etc = Path("/etc/netns")
    names = {*spaces(), *(p.name for p in (etc.iterdir() if etc.exists() else ()))} - before
    # Labs that others run on this machine meanwhile have living owners.
    owners = {name: int(name.split("-")[1]) for name in names}
    assert not [name for name, pid in owners.items() if gone(pid) or pid == os.getpid()]


@pytest.fixture(scope="module")
def pair(usable):
    """Two nodes with 1 Gbit/s, and 5.25 s between their clocks."""
    with Lab(nodes=2, rate_mbit=1000, clock_shift={1: 5.25}) as lab:
        yield lab


def spaces(pid: int | None = None) -> list[str]:
    pattern = re.compile(rf"ddplab-{pid or '[0-9]+'}-")
    folder = Path("/run/netns")
    return [p.name for p in folder.iterdir() if pattern.match(p.name)] if folder.exists() else []


def lab_command(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    kwargs.setdefault("env", {**os.environ, "PYTHON": sys.executable})
    return subprocess.run(
        [COMMAND, *args], capture_output=True, text=True, timeout=60, check=False, **kwargs
    )


def start_command(*args: str) -> subprocess.Popen[str]:
    """Starts a lab whose node 0 says "up", and returns when it has."""
    process = subprocess.Popen(
        [COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        # Tests that were started in the background inherit SIGINT as ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert "up" in process.stdout.readline()
    return process


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def gone(pid: int) -> bool:
    return lab_tool._start_time(pid) is None


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


# --- what a node is -----------------------------------------------------------------------------


def test_nodes_have_own_hostname_and_address_and_see_each_other(pair):
    code = (
        "import os, socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()),"
        " socket.gethostbyname('node0'), sorted(os.listdir('/sys/class/net')))"
    )
    here = os.uname().nodename
    results = pair.run_nodes({0: python(code), 1: python(code)})
    first, second = pair.addresses
    assert results[0].stdout == f"node0 {first} {first} ['lab0', 'lo']\n"
    assert results[1].stdout == f"node1 {second} {first} ['lab0', 'lo']\n"
    assert os.uname().nodename == here


def test_environment_and_placeholders(pair):
    argv = ["sh", "-c", "echo {node} {addr} $NODE_RANK $NODE_ADDR $NNODES $MASTER_ADDR $MINE"]
    result = pair.run(1, [*argv, "x"], {"MINE": "at-{addr}"})
    first, second = pair.addresses
    assert result.stdout == f"1 {second} 1 {second} 2 {first} at-{second}\n"
    names = ["sh", "-c", "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"]
    assert pair.run(0, names).stdout == "lab0 lab0\n"
    assert pair.run(0, names, {"GLOO_SOCKET_IFNAME": "lo"}).stdout == "lo lab0\n"


def test_shifted_clock_is_the_monotonic_one_alone(pair):
    code = (
        "import time; print(time.monotonic(), time.perf_counter(), time.time(),"
        " time.clock_gettime(time.CLOCK_BOOTTIME))"
    )
    clocks = (time.monotonic, time.perf_counter, time.time)
    for node, shift in ((0, 0.0), (1, 5.25)):
        before = [read() for read in clocks] + [time.clock_gettime(time.CLOCK_BOOTTIME)]
        seen = [float(word) for word in pair.run(node, python(code)).stdout.split()]
        after = [read() for read in clocks] + [time.clock_gettime(time.CLOCK_BOOTTIME)]
        shifts = [shift, shift, 0.0, 0.0]
        for low, value, high, by in zip(before, seen, after, shifts, strict=True):
            assert low <= value - by <= high


def test_negative_and_impossible_shift(usable):
    with Lab(1, clock_shift={0: -0.5}) as lab:
        before = time.monotonic()
        assert float(lab.run(0, python("import time; print(time.monotonic())")).stdout) < before
    with pytest.raises(LabError, match="must stay above 0"):
        Lab(1, clock_shift={0: -1e9})


def test_shifted_node_passes_exit_code_and_signals(pair):
    assert pair.run(1, ["sh", "-c", "exit 9"]).returncode == 9
    assert pair.run(1, ["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL
    assert pair.run(1, ["no-such-program"]).returncode == 127
    trap = "trap 'echo caught; exit 4' TERM; echo up; while :; do sleep 0.02; done"
    process = pair.popen(1, ["sh", "-c", trap], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.terminate()
    assert process.communicate(timeout=5)[0] == b"caught\n"
    assert process.returncode == 4


def test_private_folder_and_logs(usable, tmp_path):
    private = tmp_path / "runs"
    logs = tmp_path / "logs"
    done = lab_command(
        *("--private-dir", str(private), "--log-dir", str(logs)),
        *("--exec", f"hostname > {private}/name; cat {private}/name; echo bad >&2"),
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[node0] node0", "[node1] node1"]
    assert sorted(done.stderr.splitlines()) == ["[node0] bad", "[node1] bad"]
    assert list(private.iterdir()) == []
    for node in ("node0", "node1"):
        assert (tmp_path / f"runs.{node}" / "name").read_text() == f"{node}\n"
        assert sorted((logs / f"{node}.log").read_text().splitlines()) == ["bad", node]


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [250, 1000])
def test_stream_carries_what_framing_leaves_of_the_rate(pair, rate):
    for node in (0, 1):
        pair.set_rate(node, rate)

    def measure():
        # Several short streams: another load on this machine may hold up one of them.
        return [lab_tool.socket_stream_gbit(pair, megabytes=rate / 32) for _ in range(5)]

    def claim(streams):
        assert 0.90 * rate < statistics.median(streams) * 1e3 < rate, streams

    Looks(measure).show(claim)


def within_a_tenth(gbit):
    assert 0.080 < gbit < 0.110


def test_slow_link_of_one_node_limits_both_directions(pair):
    pair.set_rate(0, 1000)
    pair.set_rate(1, 100)
    for src, dst in ((0, 1), (1, 0)):
        looks = Looks(lambda s=src, d=dst: lab_tool.socket_stream_gbit(pair, s, d, megabytes=4))
        looks.show(within_a_tenth)
    pair.set_rate(1, 1000)


def test_socket_test_command(usable):
    done = lab_command("--rate-mbit", "500", "--socket-test")
    assert done.returncode == 0
    assert re.fullmatch(
        r"node0 -> node1: 0\.\d{4} Gbit/s of payload, \d+\.\d% of the link's 500 Mbit/s\n",
        done.stdout,
    )


def test_link_down_and_up(pair):
    connect = python(
        f"import socket; socket.create_connection(({pair.addresses[1]!r}, 7), timeout=0.5)"
    )
    # Nobody listens on the port: an answer at all means that the link is there.
    assert "refused" in pair.run(0, connect).stderr
    pair.set_link(1, up=False)
    assert "timed out" in pair.run(0, connect).stderr
    pair.set_link(1, up=True)
    wait_until(lambda: "refused" in pair.run(0, connect).stderr, 5)


def test_wrong_settings_are_named(pair):
    for call in (
        lambda: Lab(nodes=0),
        lambda: Lab(rate_mbit=0),
        lambda: Lab(burst_kb=0),
        lambda: Lab(clock_shift={2: 1.0}),
        lambda: pair.set_link(2, up=True),
        lambda: pair.set_rate(0, float("nan")),
        lambda: Lab().popen(0, ["true"]),
        pair.start,
    ):
        with pytest.raises(LabError):
            call()


# --- nothing is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_gone_after_end_and_after_exception(usable, fails):
    expected = pytest.raises(RuntimeError, match="planted") if fails else contextlib.nullcontext()
    with expected, Lab(2) as lab:
        names = lab.namespaces
        assert set(names) <= set(spaces())
        # A grandchild in a session of its own, as torchrun starts its workers.
        process = lab.popen(
            0, ["sh", "-c", "setsid sleep 99 & echo $!; wait"], stdout=subprocess.PIPE
        )
        grandchild = int(process.stdout.readline())
        if fails:
            raise RuntimeError("planted")
    assert not set(names) & set(spaces())
    assert process.returncode is not None
    assert gone(grandchild)


def test_gone_after_failed_start(usable, monkeypatch):
    real = lab_tool._tool

    def fail_at_last(argv, feature):
        if argv[0] == "tc" and argv[2].endswith("node1"):
            raise LabError("planted")
        real(argv, feature)

    monkeypatch.setattr(lab_tool, "_tool", fail_at_last)
    lab = Lab(2)
    with pytest.raises(LabError, match="planted"):
        lab.start()
    assert not [name for name in spaces() if name.startswith(lab.name)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_gone_after_signal(usable, number):
    process = start_command("--exec", "trap 'echo bye; exit' TERM; echo up; sleep 99 & wait")
    inside = list(lab_tool._pids_in(spaces(process.pid)))
    assert len(inside) >= 2
    process.send_signal(number)
    out, _ = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert "[node0] bye" in out
    assert not spaces(process.pid)
    assert all(gone(pid) for pid in inside)


def test_killed_lab_is_removed_by_its_watch(usable):
    process = start_command("--exec", "echo up; sleep 99")
    inside = list(lab_tool._pids_in(spaces(process.pid)))
    process.kill()
    process.communicate()
    wait_until(lambda: not spaces(process.pid))
    wait_until(lambda: all(gone(pid) for pid in inside))


def test_killed_lab_is_removed_by_the_next_start(usable):
    process = start_command("--exec", "echo up; sleep 99")
    inside = list(lab_tool._pids_in(spaces(process.pid)))
    watch = [
        pid
        for pid in children(process.pid)
        if "ddplab-watch" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(watch) == 1
    os.killpg(watch[0], signal.SIGKILL)
    # Not reaped: a zombie owner counts as gone too.
    process.kill()
    time.sleep(0.1)
    assert len(spaces(process.pid)) == 3
    with Lab(1):
        assert not spaces(process.pid)
    assert all(gone(pid) for pid in inside)
    process.communicate()


def test_clean_command_leaves_living_labs_alone(pair):
    done = lab_command("--clean")
    assert done.returncode == 0
    assert set(pair.namespaces) <= set(spaces())


def test_two_labs_at_once_do_not_meet(pair):
    with Lab(2) as other:
        assert other.addresses == pair.addresses
        port = 4242
        serve = python(
            f"import socket; s = socket.create_server((socket.gethostname(), {port}));"
            "print('ready', flush=True); s.accept()[0].sendall(b'first')"
        )
        ask = python(
            f"import socket; print(socket.create_connection(('node0', {port}), 5).recv(9))"
        )
        server = pair.popen(0, serve, stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        assert "refused" in other.run(1, ask).stderr
        assert "first" in pair.run(1, ask).stdout
        server.communicate(timeout=5)
    assert set(pair.namespaces) <= set(spaces())
    assert pair.run(0, ["true"]).returncode == 0


# --- commands, exit codes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("true", 0),
        ("exit $((NODE_RANK * 3))", 3),
        ("[ $NODE_RANK = 1 ] && exit 7; sleep 0.5; exit 3", 7),
        ("[ $NODE_RANK = 1 ] && kill -9 $$; true", 137),
    ],
)
def test_exit_code_is_that_of_the_first_to_fail(usable, shell, code):
    assert lab_command("--exec", shell).returncode == code


def test_timeout_ends_nodes_that_run_and_keeps_their_output(usable):
    done = lab_command("--timeout", "0.5", "--exec", "echo on $NODE_RANK; exec sleep 99$NODE_RANK")
    assert done.returncode == 124
    assert "lab: ended after 0.5 s; still running: node 0, 1" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[node0] on 0", "[node1] on 1"]


def test_output_comes_live_and_last_line_needs_no_newline(pair):
    seen = []
    timer = threading.Timer(0.3, lambda: seen.append("timer"))
    timer.start()
    result = pair.run_nodes(
        {0: ["sh", "-c", "echo early; sleep 0.6; printf late"]},
        echo=lambda node, stream, line: seen.append((node, stream, line)),
    )[0]
    timer.join()
    assert seen == [(0, "stdout", "early"), "timer", (0, "stdout", "late")]
    assert result.output == "early\nlate\n"


@pytest.mark.parametrize("rdzv", ["static", "c10d"])
def test_torchrun_options_per_node(usable, tmp_path, rdzv):
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\necho "$@"\nexit 5\n')
    fake.chmod(0o755)
    done = lab_command(
        *("--nodes", "3", "--nproc-per-node", "2", "--rdzv", rdzv, "--absent", "1"),
        *("--torchrun", str(fake), "--", "-m", "job", "--name", "at-{node}", "--", "{addr}"),
    )
    assert done.returncode == 5
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    if rdzv == "static":
        meet = "--node-rank=2 --master-addr=10.213.77.1 --master-port=29500"
    else:
        meet = r"--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=ddplab-[-\d]+"
    job = r"-m job --name at-2 -- 10\.213\.77\.3"
    assert re.fullmatch(rf"\[node2\] --nnodes=3 --nproc-per-node=2 {meet} {job}", lines[1])


@pytest.mark.distributed
@pytest.mark.parametrize("rdzv", ["static", "c10d"])
def test_all_reduce_over_two_nodes(pair, tmp_path, rdzv):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, socket, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(value)\n"
        "print('sum', value.item(), 'rank', dist.get_rank(), socket.gethostname(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    results = pair.run_torchrun([str(script)], rdzv=rdzv, timeout=60, env={"OMP_NUM_THREADS": "1"})
    assert [result.returncode for result in results] == [0, 0], results
    assert [result.stdout for result in results] == [
        "sum 3.0 rank 0 node0\n",
        "sum 3.0 rank 1 node1\n",
    ]


def test_check_says_ok_for_each_thing(usable):
    done = lab_command("--check")
    assert done.returncode == 0
    names = {re.split(r"\s{2,}", line)[0] for line in done.stdout.splitlines()}
    assert {"root", "ip", "bridge", "veth", "tbf", "clock shift (unshare -T)"} <= names
    assert all(line.endswith("  ok") for line in done.stdout.splitlines())


def test_missing_program_is_named_in_one_line(usable, tmp_path):
    for tool in ("sh", "ip", "unshare", "dirname", "readlink", "true"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    env = {**os.environ, "PATH": str(tmp_path), "PYTHON": sys.executable}
    done = lab_command("--exec", "true", env=env)
    assert done.returncode == 2
    assert done.stderr == "lab: needs the program tc (package iproute2)\n"
    checked = lab_command("--check", env=env)
    assert checked.returncode == 2
    assert re.search(r"^tc +needs the program tc", checked.stdout, re.MULTILINE)
    assert re.search(r"^tbf +needs tbf", checked.stdout, re.MULTILINE)
    assert re.search(r"^veth +ok", checked.stdout, re.MULTILINE)


def test_missing_kernel_feature_is_named_in_one_line(usable, tmp_path):
    # A tc that answers as the real one does where the kernel has no tbf.
    (tmp_path / "tc").write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n"
    )
    (tmp_path / "tc").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = lab_command("--exec", "true", env={**os.environ, "PATH": path, "PYTHON": sys.executable})
    assert done.returncode == 2
    assert done.stderr == (
        "lab: needs tbf: this kernel or container does not offer it "
        "(Error: Specified qdisc kind is unknown.)\n"
    )


@pytest.mark.parametrize("mode", [["--exec", "true"], ["--socket-test"], ["--clean"]])
def test_missing_root_is_named_in_one_line(monkeypatch, capsys, mode):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    ways = [signal.getsignal(number) for number in lab_tool._SIGNALS]
    assert lab_tool.main(mode) == 2
    assert [signal.getsignal(number) for number in lab_tool._SIGNALS] == ways
    assert capsys.readouterr().err == "lab: needs root (for network namespaces and tc)\n"


def test_check_without_root_tries_nothing(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert lab_tool.main(["--check"]) == 2
    out = capsys.readouterr().out
    assert re.search(r"^root +needs root", out, re.MULTILINE)
    assert re.search(r"^tbf +not tried without root", out, re.MULTILINE)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--exec", "true", "--", "x"],
        ["--socket-test", "--nodes", "1"],
        ["--clock-shift", "1", "--exec", "true"],
        ["--env", "X", "--exec", "true"],
    ],
)
def test_wrong_usage(args):
    done = lab_command(*args)
    assert done.returncode == 2
    assert "launch/lab" in done.stderr

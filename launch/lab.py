"""Several nodes on one machine: network namespaces, links of a set rate, shifted clocks.

Each node is a network namespace with its own address and hostname, joined by a veth pair to one
bridge. The bridge lives in a namespace of its own, so the host's network is not touched. `tc tbf`
holds both directions of each node's link to a rate. Needs root and Linux.

Glossary:
    node: a network namespace with interface `lab0`, hostname `nodeK` and, if asked, its own
        monotonic clock; processors, memory and (unless made private) files are the host's.
    link: the veth pair of a node; its rate is per direction and counts Ethernet frames.
    agent: the torchrun process of one node.
    leftover: the namespaces and processes of a lab whose owner process is gone.

Environment of every process on a node: NODE_RANK, NODE_ADDR, NNODES, MASTER_ADDR (node 0's
address), GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (`lab0`).

Exit status of the command: 0 all nodes ended with 0; otherwise the code of the node that failed
first (128 + n for signal n); 124 the time limit passed and no node failed before it; 2 wrong
usage, no root, or a missing kernel feature; 128 + n the command itself was ended by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Literal

INTERFACE = "lab0"
"""The name of every node's network interface."""

_SUBNET = "10.213.77"
_MAX_NODES = 200
_BRIDGE = "br0"
_FIRST_PORT = 29500
_QUEUE_MS = 50
_NETNS = Path("/run/netns")
_NETNS_ETC = Path("/etc/netns")
# ddplab-<owner's pid>-<owner's start time in clock ticks>-<n-th lab of that process>-<part>.
# The start time tells an owner from a later process that was given the same pid.
_NAME = re.compile(r"(?P<lab>ddplab-(?P<pid>\d+)-(?P<start>\d+)-\d+)-(?:node\d+|bridge|check)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Runs inside the node's network, mount and UTS namespaces: $1 is the hostname, then pairs of
# folders to bind, then "--" and the command. Writing to /proc spares the `hostname` program.
_ENTER = """\
echo "$1" > /proc/sys/kernel/hostname || exit 2
shift
while [ "$1" != "--" ]; do mount --bind "$1" "$2" || exit 2; shift 2; done
shift
exec "$@"
"""

# Shifts the monotonic clock by argv[1] nanoseconds and runs the rest of argv. `unshare -T` knows
# whole seconds only. A time namespace counts from the next fork on (kernels before 6.1), so this
# stays the parent: it passes signals on, and the kernel ends the child if this is killed.
_SHIFT_CLOCK = """\
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x80) != 0:
    sys.exit(f"no time namespaces: {os.strerror(ctypes.get_errno())}")
seconds, nanoseconds = divmod(int(sys.argv[1]), 10**9)
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write(f"monotonic {seconds} {nanoseconds}\\n")
passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
child = os.fork()
if child == 0:
    libc.prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        os.write(2, f"{sys.argv[2]}: {error.strerror}\\n".encode())
        os._exit(127)
for number in passed_on:
    signal.signal(number, lambda number, frame: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

# argv: address, port, bytes to leave out at the start. Prints bytes and nanoseconds.
_RECEIVE = """\
import socket, sys, time
skip = int(sys.argv[3])
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
buffer = bytearray(1 << 20)
total = first_total = first_ns = last_ns = 0
while count := connection.recv_into(buffer):
    last_ns = time.monotonic_ns()
    total += count
    if total >= skip and not first_ns:
        first_total, first_ns = total, last_ns
connection.close()
print(total - first_total, last_ns - first_ns)
"""

# argv: address, port, bytes. Waits until the receiver has read everything.
_SEND = """\
import socket, sys
left = int(sys.argv[3])
chunk = memoryview(bytes(1 << 20))
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    while left:
        part = chunk[: min(left, len(chunk))]
        connection.sendall(part)
        left -= len(part)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""

Rendezvous = Literal["static", "c10d"]
Echo = Callable[[int, str, str], None]
"""Gets node, stream ("stdout" or "stderr") and one line of output, as it comes."""


class LabError(Exception):
    """What is wrong or missing, in one line."""


@dataclass(frozen=True)
class NodeResult:
    """How the process of one node ended.

    Attributes:
        node: Number of the node.
        returncode: Its exit status; -n if signal n ended it.
        stdout: What it wrote there.
        stderr: What it wrote there.
        output: Both, by lines in the order in which they came.
        ended_s: Seconds from the start of the run to its end.
        timed_out: Whether the lab ended it because the time limit had passed.
    """

    node: int
    returncode: int
    stdout: str
    stderr: str
    output: str
    ended_s: float
    timed_out: bool


@dataclass(frozen=True)
class Check:
    """One thing that the lab needs.

    Attributes:
        name: What is needed.
        problem: Why it cannot be used; None if it can.
    """

    name: str
    problem: str | None


def first_failure(results: Iterable[NodeResult]) -> int:
    """The exit status of a run: that of the node which failed first.

    Args:
        results: One per node.

    Returns:
        0 if all nodes ended with 0; the earliest other status, 128 + n for signal n; 124 if nodes
        were stopped by the time limit and none had failed before.
    """
    results = list(results)
    failed = [r for r in results if r.returncode != 0 and not r.timed_out]
    if failed:
        code = min(failed, key=lambda r: r.ended_s).returncode
        return code if code > 0 else 128 - code
    return 124 if any(r.timed_out for r in results) else 0


def find_torchrun() -> str:
    """Path of the torchrun beside the running Python, else of the one on PATH.

    Raises:
        LabError: There is none.
    """
    beside = Path(sys.executable).with_name("torchrun")
    found = str(beside) if beside.exists() else shutil.which("torchrun")
    if found is None:
        raise LabError(
            f"no torchrun beside {sys.executable} or on PATH: activate the environment that has "
            "torch, or give --torchrun PATH"
        )
    return found


def remove_leftovers() -> list[str]:
    """Ends the processes and removes the namespaces of labs whose owner is gone.

    Returns:
        The names of the removed labs.
    """
    stale: dict[str, list[str]] = {}
    for folder in (_NETNS, _NETNS_ETC):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and _start_time(int(match["pid"])) != match["start"]:
                stale.setdefault(match["lab"], []).append(path.name)
    for names in stale.values():
        _remove_namespaces(set(names))
    return sorted(stale)


def check() -> list[Check]:
    """Tries each thing that the lab needs, in a namespace that is removed again."""
    tools = [(tool, _missing_tool(tool)) for tool in ("ip", "tc", "unshare")]
    root = _missing_root()
    space = f"{_lab_name()}-check"
    inside = ["ip", "-n", space]
    features = {
        "network namespace": ["ip", "netns", "add", space],
        "bridge": [*inside, "link", "add", _BRIDGE, "type", "bridge"],
        "veth": [*inside, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        "tbf": ["tc", "-n", space, *_tbf("lo", 1000.0, 256)],
        "hostname (unshare --uts)": ["unshare", "--uts", "true"],
        "clock shift (unshare -T)": _shift_clock(1.0, ["true"]),
    }
    problems: dict[str, str | None] = {}
    try:
        for name, argv in features.items():
            problems[name] = "not tried without root" if root else None
            if not root:
                try:
                    _tool(argv, name)
                except LabError as error:
                    problems[name] = str(error)
    finally:
        if not root:
            _remove_namespaces({space})
    return [Check(name, problem) for name, problem in [("root", root), *tools, *problems.items()]]


def socket_stream_gbit(lab: Lab, src: int = 0, dst: int = 1, megabytes: float = 64.0) -> float:
    """What one plain TCP stream carries between two nodes, in Gbit/s of payload.

    The first 4 MiB (at least 8 bursts) are sent but not counted: they hold the burst, which runs
    faster than the link, and TCP's start. The receiver's clock is used, from the read that passed
    that mark to the last one.

    Args:
        lab: A started lab.
        src: Sending node.
        dst: Receiving node.
        megabytes: Counted payload, in 10^6 bytes.

    Raises:
        LabError: The stream broke, or took over a minute longer than the link's rate explains.
    """
    skip = max(4 << 20, 8 * lab.burst_kb * 1024)
    port = lab.next_port()
    size = skip + round(megabytes * 1e6)
    address = [lab.addresses[dst], str(port)]
    limit_s = 60.0 + 10 * size * 8 / (min(lab.rates_mbit[src], lab.rates_mbit[dst]) * 1e6)
    receiver = lab.popen(
        dst,
        [sys.executable, "-I", "-c", _RECEIVE, *address, str(skip)],
        stdout=subprocess.PIPE,
    )
    try:
        assert receiver.stdout is not None
        if receiver.stdout.readline() != b"ready\n":
            raise LabError(f"node {dst} could not listen on {':'.join(address)}")
        send = [sys.executable, "-I", "-c", _SEND, *address, str(size)]
        sent = lab.run(src, send, timeout=limit_s)
        if sent.returncode != 0:
            reason = "too slow" if sent.timed_out else (sent.stderr.splitlines() or ["?"])[-1]
            raise LabError(f"stream from node {src} to node {dst} broke: {reason}")
        counted, elapsed_ns = receiver.communicate(timeout=10)[0].split()
    finally:
        receiver.kill()
        receiver.wait()
    return int(counted) * 8 / int(elapsed_ns)


class Lab:
    """Nodes on this machine, from `start` to `close`; use it in a `with` statement.

    A watching process removes the lab if this process dies without closing it.
    """

    def __init__(
        self,
        nodes: int = 2,
        rate_mbit: float = 1000.0,
        *,
        burst_kb: int = 256,
        clock_shift: Mapping[int, float] | None = None,
        private_dirs: Sequence[str | Path] = (),
    ) -> None:
        """Checks the settings; creates nothing yet.

        Args:
            nodes: Number of nodes.
            rate_mbit: Rate of each node's link, per direction, in 10^6 bit/s on the wire.
            burst_kb: How much may pass at once after an idle time, in KiB.
            clock_shift: Node to seconds by which its monotonic clock is ahead of the host's.
            private_dirs: Folders that the nodes do not share: what node K sees at PATH is kept
                in PATH.nodeK on the host.

        Raises:
            LabError: A setting that cannot hold.
        """
        if not 1 <= nodes <= _MAX_NODES:
            raise LabError(f"nodes must be 1 to {_MAX_NODES}, not {nodes}")
        _check_rate(rate_mbit)
        if burst_kb < 4:
            raise LabError(f"the burst must be 4 KiB or more, not {burst_kb}")
        self.nodes = nodes
        self.rate_mbit = float(rate_mbit)
        self.rates_mbit = [self.rate_mbit] * nodes
        self.burst_kb = burst_kb
        self.clock_shift = dict(clock_shift or {})
        self.private_dirs = [Path(path).absolute() for path in private_dirs]
        self.name = _lab_name()
        for node, shift in self.clock_shift.items():
            self._check_node(node)
            if not math.isfinite(shift) or time.monotonic() + shift < 1:
                raise LabError(
                    f"node {node}'s clock cannot be shifted by {shift:g} s: the monotonic clock "
                    f"of this machine stands at {time.monotonic():.0f} s and must stay above 0"
                )
        self._started = False
        self._processes: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._watch: subprocess.Popen[bytes] | None = None
        self._ports = itertools.count(_FIRST_PORT)
        self.rendezvous: str | None = None
        """Address at which the agents of the latest torchrun meet; None before the first."""

    @property
    def addresses(self) -> list[str]:
        """IPv4 address of each node."""
        return [f"{_SUBNET}.{node + 1}" for node in range(self.nodes)]

    @property
    def hostnames(self) -> list[str]:
        """Hostname of each node; they resolve on every node."""
        return [f"node{node}" for node in range(self.nodes)]

    @property
    def namespaces(self) -> list[str]:
        """Network namespace of each node, as `ip netns` names it."""
        return [f"{self.name}-node{node}" for node in range(self.nodes)]

    def __enter__(self) -> Lab:
        """Starts the lab."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the lab."""
        self.close()

    def start(self) -> Lab:
        """Removes leftovers of dead labs and creates the nodes.

        Raises:
            LabError: No root, or a tool or kernel feature is missing; nothing is left behind.
        """
        missing = [_missing_root(), *map(_missing_tool, ("ip", "tc", "unshare"))]
        if problem := next(filter(None, missing), None):
            raise LabError(problem)
        if self._started:
            raise LabError("the lab is started already")
        remove_leftovers()
        if self.clock_shift:
            _tool(_shift_clock(1.0, ["true"]), "clock shift (unshare -T)")
        try:
            self._started = True
            self._watch = self._start_watch()
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def close(self, grace_s: float = 5.0) -> None:
        """Ends every process on the nodes and removes the nodes; closing twice is harmless.

        Args:
            grace_s: How long started processes may take after SIGTERM before SIGKILL.

        Raises:
            LabError: Something of the lab is still there.
        """
        if not self._started:
            return
        running = [process for _, process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        _remove_namespaces({*self.namespaces, self._bridge_space})
        for _, process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._processes.clear()
        self._started = False
        if self._watch is not None:
            # Its own session, so that the group holds the shell and what it waits in.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watch.pid, signal.SIGKILL)
            self._watch.wait()
            assert self._watch.stdin is not None
            self._watch.stdin.close()
            self._watch = None

    def set_rate(self, node: int, mbit: float) -> None:
        """Sets the rate of one node's link, both directions, in 10^6 bit/s.

        Raises:
            LabError: No such node or rate.
        """
        self._check_node(node)
        _check_rate(mbit)
        for space, interface in (
            (self.namespaces[node], INTERFACE),
            (self._bridge_space, self.hostnames[node]),
        ):
            _tool(["tc", "-n", space, *_tbf(interface, mbit, self.burst_kb)], "tbf")
        self.rates_mbit[node] = float(mbit)

    def set_link(self, node: int, up: bool) -> None:
        """Pulls one node's cable out of the bridge, or plugs it in again.

        Raises:
            LabError: No such node.
        """
        self._check_node(node)
        state = "up" if up else "down"
        _tool(["ip", "-n", self._bridge_space, "link", "set", self.hostnames[node], state], "veth")

    def next_port(self) -> int:
        """A TCP port that no run of this lab has been given yet."""
        return next(self._ports)

    def popen(
        self,
        node: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: str | Path | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a node; `close` ends it.

        Args:
            node: Number of the node.
            argv: The command; `{node}` and `{addr}` stand for the node's number and address.
            env: Added to this process's and the node's environment; same placeholders.
            cwd: Working directory.
            stdin: As for subprocess.Popen; nothing to read unless given.
            stdout: As for subprocess.Popen.
            stderr: As for subprocess.Popen.

        Raises:
            LabError: No such node, or the lab is not started.
        """
        self._check_node(node)
        if not self._started:
            raise LabError("the lab is not started")
        values = {"{node}": str(node), "{addr}": self.addresses[node]}
        command = [_fill(argument, values) for argument in argv]
        if shift := self.clock_shift.get(node):
            command = _shift_clock(shift, command)
        enter = ["ip", "netns", "exec", self.namespaces[node], "unshare", "--uts", "--"]
        enter += ["sh", "-c", _ENTER, "sh", self.hostnames[node]]
        for path in self.private_dirs:
            enter += [f"{path}.{self.hostnames[node]}", str(path)]
        environment = {
            **os.environ,
            "NODE_RANK": str(node),
            "NODE_ADDR": self.addresses[node],
            "NNODES": str(self.nodes),
            "MASTER_ADDR": self.addresses[0],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            **{key: _fill(value, values) for key, value in (env or {}).items()},
        }
        process = subprocess.Popen(
            [*enter, "--", *command],
            env=environment,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C must reach the lab alone, which then ends the nodes in order.
            start_new_session=True,
        )
        self._processes.append((node, process))
        return process

    def run(
        self,
        node: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        cwd: str | Path | None = None,
    ) -> NodeResult:
        """Runs a command on one node to its end; see `popen` and `run_nodes`."""
        return self.run_nodes({node: argv}, env, timeout=timeout, cwd=cwd)[0]

    def run_nodes(
        self,
        commands: Mapping[int, Sequence[str]],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        cwd: str | Path | None = None,
        echo: Echo | None = None,
        log_dir: str | Path | None = None,
    ) -> list[NodeResult]:
        """Runs one command per node, at the same time, to their ends.

        A node that fails does not end the others, as in a cluster.

        Args:
            commands: Node to command.
            env: As for `popen`.
            timeout: Seconds after which every process on nodes that still run is ended.
            cwd: Working directory.
            echo: Gets each line as it comes.
            log_dir: Folder for one file per node, `nodeK.log`.

        Returns:
            One result per command, by node.
        """
        with contextlib.ExitStack() as stack:
            logs: dict[int, IO[str]] = {}
            if log_dir is not None:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
                for node in commands:
                    path = Path(log_dir) / f"node{node}.log"
                    logs[node] = stack.enter_context(path.open("w", buffering=1))
            runs: dict[int, _Run] = {}
            try:
                for node, argv in sorted(commands.items()):
                    pipe = subprocess.PIPE
                    process = self.popen(node, argv, env, cwd=cwd, stdout=pipe, stderr=pipe)
                    runs[node] = _Run(node, process, echo, logs.get(node))
                self._follow(runs, timeout)
            except BaseException:
                # Let the nodes say their last words before the lab is closed.
                with contextlib.suppress(LabError):
                    self._follow(runs, 0.0)
                raise
        return [runs[node].result() for node in sorted(runs)]

    def run_torchrun(
        self,
        args: Sequence[str],
        nproc_per_node: int = 1,
        rdzv: Rendezvous = "static",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        *,
        torchrun: str | None = None,
        absent: Sequence[int] = (),
        cwd: str | Path | None = None,
        echo: Echo | None = None,
        log_dir: str | Path | None = None,
    ) -> list[NodeResult]:
        """Runs one torchrun agent per node to their ends.

        Args:
            args: What follows the options that the lab sets: torchrun options, script, arguments.
            nproc_per_node: Processes per node.
            rdzv: `static` gives node ranks and a master address; `c10d` an endpoint on node 0.
            timeout: As for `run_nodes`.
            env: As for `popen`.
            torchrun: Its path; else as `find_torchrun`.
            absent: Nodes that never join: counted in --nnodes, but no agent is started there.
            cwd: Working directory.
            echo: As for `run_nodes`.
            log_dir: As for `run_nodes`.

        Returns:
            One result per started agent.

        Raises:
            LabError: No torchrun.
        """
        for node in absent:
            self._check_node(node)
        program = torchrun or find_torchrun()
        port = self.next_port()
        self.rendezvous = f"{self.addresses[0]}:{port}"
        common = [program, f"--nnodes={self.nodes}", f"--nproc-per-node={nproc_per_node}"]
        if rdzv == "static":
            common += ["--node-rank={node}", f"--master-addr={self.addresses[0]}"]
            common += [f"--master-port={port}"]
        else:
            common += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hostnames[0]}:{port}"]
            common += [f"--rdzv-id={self.name}"]
        commands = {n: [*common, *args] for n in range(self.nodes) if n not in absent}
        return self.run_nodes(commands, env, timeout=timeout, cwd=cwd, echo=echo, log_dir=log_dir)

    @property
    def _bridge_space(self) -> str:
        return f"{self.name}-bridge"

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise LabError(f"there is no node {node}: the nodes are 0 to {self.nodes - 1}")

    def _create(self) -> None:
        # With the mapped form, under which torch's store looks up the names of IPv4 peers.
        hosts = ["127.0.0.1 localhost", "::1 ip6-localhost"]
        for address, hostname in zip(self.addresses, self.hostnames, strict=True):
            hosts += [f"{address} {hostname}", f"::ffff:{address} {hostname}"]
        for path in self.private_dirs:
            for folder in (path, *(Path(f"{path}.{h}") for h in self.hostnames)):
                folder.mkdir(parents=True, exist_ok=True)
        bridge = ["ip", "-n", self._bridge_space]
        _tool(["ip", "netns", "add", self._bridge_space], "network namespace")
        _tool([*bridge, "link", "add", _BRIDGE, "type", "bridge"], "bridge")
        _tool([*bridge, "link", "set", _BRIDGE, "up"], "bridge")
        for node, space in enumerate(self.namespaces):
            port = self.hostnames[node]
            inside = ["ip", "-n", space]
            _write_hosts(space, hosts)
            _tool(["ip", "netns", "add", space], "network namespace")
            pair = ["type", "veth", "peer", "name", port, "netns", self._bridge_space]
            _tool([*inside, "link", "add", INTERFACE, *pair], "veth")
            # No IPv6: a link-local address would be found first by some, and is of no use here.
            _tool([*inside, "link", "set", INTERFACE, "addrgenmode", "none"], "veth")
            _tool([*bridge, "link", "set", port, "addrgenmode", "none"], "veth")
            _tool([*inside, "addr", "add", f"{self.addresses[node]}/24", "dev", INTERFACE], "veth")
            self.set_rate(node, self.rates_mbit[node])
            _tool([*bridge, "link", "set", port, "master", _BRIDGE, "up"], "bridge")
            _tool([*inside, "link", "set", INTERFACE, "up"], "veth")
            _tool([*inside, "link", "set", "lo", "up"], "network namespace")

    def _start_watch(self) -> subprocess.Popen[bytes]:
        # Its input ends when this process does, however that happens; a second later the process
        # is surely gone and its lab a leftover.
        clean = [sys.executable, str(Path(__file__).resolve()), "--clean"]
        return subprocess.Popen(
            ["sh", "-c", 'cat > /dev/null; sleep 1; exec "$@"', "ddplab-watch", *clean],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _follow(self, runs: Mapping[int, _Run], timeout: float | None) -> None:
        """Reads the output of all runs until they have ended.

        Past the time limit: SIGTERM, 5 s later SIGKILL for all that lives on those nodes.
        """
        deadlines = iter(()) if timeout is None else iter((timeout, 5.0, 5.0))
        start = time.monotonic()
        deadline = start + next(deadlines, math.inf)
        stage = 0
        with selectors.DefaultSelector() as selector:
            for run in runs.values():
                run.register(selector)
            while any(run.returncode is None for run in runs.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [run for run in runs.values() if run.returncode is None]
                    if stage == 2:
                        nodes = ", ".join(str(run.node) for run in late)
                        raise LabError(f"the processes of node {nodes} cannot be killed")
                    for run in late:
                        run.timed_out = True
                        if stage == 0:
                            run.process.terminate()
                    if stage == 1:
                        _kill_in({self.namespaces[run.node] for run in late})
                    stage += 1
                    deadline = time.monotonic() + next(deadlines, math.inf)
                    continue
                for key, _ in selector.select(None if left == math.inf else left):
                    key.data()
            # What an agent left behind may hold the pipes open for ever: do not wait for that.
            drained = time.monotonic() + 1.0
            while selector.get_map() and (left := drained - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data()


@dataclass
class _Run:
    """Collects output and end of one node's process; registers itself with a selector."""

    node: int
    process: subprocess.Popen[bytes]
    echo: Echo | None
    log: IO[str] | None
    pidfd: int | None = None
    returncode: int | None = None
    timed_out: bool = False
    start: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    lines: list[tuple[str, str]] = field(default_factory=list)
    pending: dict[str, bytes] = field(default_factory=dict)

    def register(self, selector: selectors.BaseSelector) -> None:
        if self.returncode is None:
            if self.pidfd is None:
                self.pidfd = os.pidfd_open(self.process.pid)
            pidfd = self.pidfd

            def ended() -> None:
                selector.unregister(pidfd)
                os.close(pidfd)
                self.returncode = self.process.wait()
                self.ended_s = time.monotonic() - self.start

            selector.register(pidfd, selectors.EVENT_READ, ended)
        for name, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            if stream is not None and not stream.closed:
                self._register_stream(selector, name, stream)

    def _register_stream(
        self, selector: selectors.BaseSelector, name: str, stream: IO[bytes]
    ) -> None:
        def readable() -> None:
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                selector.unregister(stream)
                stream.close()
                if rest := self.pending.pop(name, b""):
                    self._take(name, rest)
                return
            *lines, rest = (self.pending.get(name, b"") + data).split(b"\n")
            self.pending[name] = rest
            for line in lines:
                self._take(name, line)

        selector.register(stream, selectors.EVENT_READ, readable)

    def _take(self, name: str, data: bytes) -> None:
        line = data.decode(errors="replace")
        self.lines.append((name, line))
        if self.log is not None:
            self.log.write(line + "\n")
        if self.echo is not None:
            self.echo(self.node, name, line)

    def result(self) -> NodeResult:
        for name in list(self.pending):
            if rest := self.pending.pop(name):
                self._take(name, rest)

        def text(*names: str) -> str:
            return "".join(f"{line}\n" for name, line in self.lines if name in names)

        assert self.returncode is not None
        return NodeResult(
            self.node,
            self.returncode,
            text("stdout"),
            text("stderr"),
            text("stdout", "stderr"),
            self.ended_s,
            self.timed_out,
        )


_serials = itertools.count()


def _lab_name() -> str:
    return f"ddplab-{os.getpid()}-{_start_time(os.getpid())}-{next(_serials)}"


def _start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None if it is gone (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is a name in brackets that may itself hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _missing_root() -> str | None:
    return None if os.geteuid() == 0 else "needs root (for network namespaces and tc)"


def _missing_tool(tool: str) -> str | None:
    package = "util-linux" if tool == "unshare" else "iproute2"
    return None if shutil.which(tool) else f"needs the program {tool} (package {package})"


def _tool(argv: Sequence[str], feature: str) -> None:
    """Runs a system tool; its failure means that the kernel feature is missing."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            process_group=0,  # out of the reach of Ctrl-C
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"needs {feature}: {argv[0]}: {error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise LabError(f"needs {feature}: this kernel or container does not offer it ({said})")


def _tbf(interface: str, mbit: float, burst_kb: int) -> list[str]:
    rate = ["rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst_kb}kb", "latency"]
    return ["qdisc", "replace", "dev", interface, "root", "tbf", *rate, f"{_QUEUE_MS}ms"]


def _shift_clock(seconds: float, argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _SHIFT_CLOCK, str(round(seconds * 1e9)), *argv]


def _check_rate(mbit: float) -> None:
    if not 0.1 <= mbit <= 100_000:
        raise LabError(f"the rate must be 0.1 to 100000 Mbit/s, not {mbit:g}")


def _fill(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _write_hosts(space: str, lines: Iterable[str]) -> None:
    # `ip netns exec` binds /etc/netns/NAME/hosts over /etc/hosts. Another lab's end may remove
    # the empty parent between its creation and ours: try again.
    folder = _NETNS_ETC / space
    for attempt in range(10):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
        except FileNotFoundError:
            time.sleep(0.01 * attempt)
        except OSError as error:
            raise LabError(f"needs to write {folder}: {error.strerror}") from None
        else:
            return
    raise LabError(f"needs to write {folder}: it keeps vanishing")


def _pids_in(spaces: Iterable[str]) -> Iterator[int]:
    inodes = set()
    for space in spaces:
        with contextlib.suppress(OSError):
            inodes.add((_NETNS / space).stat().st_ino)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in inodes:
                    yield int(entry.name)


def _kill_in(spaces: Iterable[str]) -> None:
    spaces = set(spaces)
    deadline = time.monotonic() + 5.0
    # More than once: a process may fork while the list is read.
    while pids := list(_pids_in(spaces)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _remove_namespaces(spaces: Iterable[str]) -> None:
    spaces = set(spaces)
    _kill_in(spaces)
    problems = []
    for space in sorted(spaces):
        shutil.rmtree(_NETNS_ETC / space, ignore_errors=True)
        if (_NETNS / space).exists():
            try:
                _tool(["ip", "netns", "del", space], "network namespace")
            except LabError as error:
                # Another lab may have been quicker with a leftover.
                if (_NETNS / space).exists():
                    problems.append(f"{space} is still there: {error}")
    with contextlib.suppress(OSError):
        _NETNS_ETC.rmdir()
    if problems:
        raise LabError("; ".join(problems))


class _SignalledError(BaseException):
    """The command was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _SignalledError(number)


def _node_seconds(text: str) -> tuple[int, float]:
    node, equals, seconds = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"NODE=SECONDS expected, not {text!r}")
    return int(node), float(seconds)


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"K=V expected, not {text!r}")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/lab",
        usage="launch/lab [options] -- TORCHRUN_ARGS...\n"
        "       launch/lab [options] --exec CMD | --socket-test\n"
        "       launch/lab --check | --clean",
        description="Several nodes on this machine, with links of a set rate (needs root).",
        epilog="{node} and {addr} in TORCHRUN_ARGS, CMD and --env are each node's number and "
        "address. See docs/lab.md.",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, metavar="N", help="nodes; default: 2")
    add(
        "--nproc-per-node",
        type=int,
        default=1,
        metavar="N",
        help="processes on each node; default: 1",
    )
    add(
        "--rate-mbit",
        type=float,
        default=1000.0,
        metavar="X",
        help="rate of each node's link, per direction, 10^6 bit/s on the wire; default: 1000",
    )
    add(
        "--burst-kb",
        type=int,
        default=256,
        metavar="N",
        help="what may pass at once after an idle time, in KiB; default: 256",
    )
    add(
        "--clock-shift",
        type=_node_seconds,
        action="append",
        default=[],
        metavar="NODE=SECONDS",
        help="that node's monotonic clock is ahead by so much; fractions and negative values "
        "work; repeat it for more nodes",
    )
    add(
        "--private-dir",
        action="append",
        default=[],
        metavar="PATH",
        help="a folder of which every node sees its own, kept as PATH.nodeK; repeat it for more "
        "folders",
    )
    add(
        "--rdzv",
        choices=("static", "c10d"),
        default="static",
        help="rendezvous: numbered here, or by torchrun at an endpoint on node0; default: static",
    )
    add(
        "--torchrun",
        metavar="PATH",
        help="the torchrun to start; default: the one beside this Python, else on PATH",
    )
    add(
        "--env",
        type=_key_value,
        action="append",
        default=[],
        metavar="K=V",
        help="variable of every node, over what the lab sets; repeat it for more",
    )
    add(
        "--absent",
        type=int,
        action="append",
        default=[],
        metavar="NODE",
        help="counted among the nodes, but nothing starts there; repeat it for more nodes",
    )
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="end all nodes that still run after S seconds by SIGTERM, 5 s later by SIGKILL",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="also write each node's output to DIR/nodeK.log, without prefix",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--exec",
        metavar="CMD",
        dest="shell",
        help="run CMD with sh -c on each node instead of torchrun",
    )
    mode.add_argument(
        "--socket-test",
        action="store_true",
        help="measure what a TCP stream carries from node0 to node1",
    )
    mode.add_argument("--check", action="store_true", help="say what is missing here")
    mode.add_argument(
        "--clean", action="store_true", help="remove what labs that are gone left here"
    )
    return parser


def _print_line(node: int, stream: str, line: str) -> None:
    print(f"[node{node}] {line}", file=getattr(sys, stream), flush=True)


def _run_check() -> int:
    checks = check()
    width = max(len(item.name) for item in checks)
    for item in checks:
        print(f"{item.name:<{width}}  {'ok' if item.problem is None else item.problem}")
    return 2 if any(item.problem for item in checks) else 0


def _run_clean() -> int:
    problem = _missing_root() or _missing_tool("ip")
    if problem:
        raise LabError(problem)
    removed = remove_leftovers()
    for name in removed:
        print(f"removed {name}")
    if not removed:
        print("no leftovers")
    return 0


def _work(lab: Lab, options: argparse.Namespace, torchrun_args: Sequence[str]) -> int:
    if options.socket_test:
        gbit = socket_stream_gbit(lab)
        share = gbit * 1e3 / lab.rate_mbit
        print(
            f"node0 -> node1: {gbit:.4f} Gbit/s of payload, "
            f"{share:.1%} of the link's {lab.rate_mbit:g} Mbit/s"
        )
        return 0
    env = dict(options.env)
    if options.shell is not None:
        nodes = [node for node in range(lab.nodes) if node not in options.absent]
        results = lab.run_nodes(
            {node: ["sh", "-c", options.shell] for node in nodes},
            env,
            timeout=options.timeout,
            echo=_print_line,
            log_dir=options.log_dir,
        )
    else:
        results = lab.run_torchrun(
            torchrun_args,
            options.nproc_per_node,
            options.rdzv,
            options.timeout,
            env,
            torchrun=options.torchrun,
            absent=options.absent,
            echo=_print_line,
            log_dir=options.log_dir,
        )
    late = ", ".join(str(result.node) for result in results if result.timed_out)
    if late:
        print(f"lab: ended after {options.timeout:g} s; still running: node {late}",
              file=sys.stderr)  # fmt: skip
    code = first_failure(results)
    if code and options.absent:
        absent = ", ".join(map(str, sorted(set(options.absent))))
        print(f"lab: absent: node {absent}; the others waited at "
              f"{lab.rendezvous or lab.addresses[0]}", file=sys.stderr)  # fmt: skip
    return code


def _run_lab(options: argparse.Namespace, torchrun_args: Sequence[str]) -> int:
    lab = Lab(
        options.nodes,
        options.rate_mbit,
        burst_kb=options.burst_kb,
        clock_shift=dict(options.clock_shift),
        private_dirs=options.private_dir,
    )
    if torchrun_args and options.torchrun is None:
        options.torchrun = find_torchrun()
    # A signal that was ignored when we were started (nohup) stays ignored.
    before = {n: signal.getsignal(n) for n in _SIGNALS}
    handled = {n: way for n, way in before.items() if way is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, _on_signal)
    try:
        lab.start()
        return _work(lab, options, torchrun_args)
    except _SignalledError as error:
        return 128 + error.number
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        lab.close()
        # Whoever calls this from Python goes on, and so would what it starts, deaf to signals.
        for number, way in handled.items():
            signal.signal(number, way)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:split])
    torchrun_args = arguments[split + 1 :]
    other = options.check or options.clean or options.socket_test or options.shell is not None
    if other == bool(torchrun_args):
        parser.error("give either torchrun arguments after `--` or one of the other modes")
    if options.socket_test and options.nodes < 2:
        parser.error("--socket-test needs two nodes")
    try:
        if options.check:
            return _run_check()
        if options.clean:
            return _run_clean()
        return _run_lab(options, torchrun_args)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

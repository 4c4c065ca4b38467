"""Interfaces, names and ports: how ranks would find and reach each other."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_profiler.doctor.verdict import Verdict, error, not_applicable, ok, warning
from ddp_profiler.errors import UsageError
from ddp_profiler.measure.interfaces import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    Interface,
    find_route,
    is_loopback,
    list_interfaces,
    reachable_interfaces,
)

DEFAULT_PORT = 29500
"""Where torchrun's ranks meet unless told otherwise."""

_SLOW_NAMES_S = 1.0
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "vxlan", "tailscale", "tun")


@dataclass(frozen=True)
class LinkState:
    """State of an interface.

    Attributes:
        up: Whether it is up.
        speed_mbit: Its rate in Mbit/s; 0 where the system does not know it.
        mtu_bytes: Largest packet.
    """

    up: bool
    speed_mbit: int
    mtu_bytes: int


@dataclass(frozen=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE adapter.

    Attributes:
        device: As the kernel names the adapter.
        port: Number of the port.
        state: As the kernel names it, such as ``ACTIVE``.
        rate: As the kernel has it, such as ``400 Gb/sec (4X NDR)``.
    """

    device: str
    port: int
    state: str
    rate: str


@dataclass(frozen=True)
class Choice:
    """What a backend would use.

    Attributes:
        interfaces: Their names; empty where the choice fails.
        addresses: The address of each.
        chosen_by: The variable or the rule.
        problem: Why it fails; None where it does not.
        remedy: What to do then.
    """

    interfaces: tuple[str, ...] = ()
    addresses: tuple[str | None, ...] = ()
    chosen_by: str = ""
    problem: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """Interfaces of this node.

    Attributes:
        interfaces: All of them.
        states: By name.
        gloo: What gloo would use.
        nccl: What NCCL would use.
        rdma: Ports of InfiniBand and RoCE.
    """

    interfaces: tuple[Interface, ...]
    states: Mapping[str, LinkState]
    gloo: Choice
    nccl: Choice
    rdma: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True)
class NameFacts:
    """How names resolve here.

    Attributes:
        hostname: Own name.
        addresses: What it resolves to; empty where it does not.
        seconds: How long that took.
        own: Addresses that this node has.
        localhost: What ``localhost`` resolves to.
        master: ``MASTER_ADDR``; None where not set.
        master_addresses: What it resolves to.
    """

    hostname: str
    addresses: tuple[str, ...]
    seconds: float
    own: tuple[str, ...]
    localhost: tuple[str, ...] = ("127.0.0.1",)
    master: str | None = None
    master_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class PortFacts:
    """Ports of this node.

    Attributes:
        default_free: Whether nobody listens on 29500.
        free: A port that is free now.
        master: ``MASTER_PORT`` as it is set; None where it is not.
        master_free: Whether nobody listens on it; None where it is no port.
        inside_job: Whether this runs as a rank of a job, which then listens itself.
    """

    default_free: bool
    free: int | None
    master: str | None = None
    master_free: bool | None = None
    inside_job: bool = False


def read_network(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> NetworkFacts:
    """Reads the interfaces and what each backend would choose of them."""
    interfaces = list_interfaces()
    states = {
        name: LinkState(stats.isup, stats.speed, stats.mtu)
        for name, stats in psutil.net_if_stats().items()
    }
    return NetworkFacts(
        interfaces,
        states,
        choose("gloo", environ, interfaces),
        choose("nccl", environ, interfaces),
        read_rdma(root),
    )


def choose(backend: str, environ: Mapping[str, str], interfaces: Sequence[Interface]) -> Choice:
    """Returns what a backend would use, also where it leaves that to itself."""
    try:
        route = find_route(backend, environ, interfaces)
    except UsageError as problem:
        return Choice(problem=problem.message, remedy=problem.remedy)
    if backend == "nccl" and not route.interfaces:
        chosen = nccl_order(interfaces)
        return Choice(
            tuple(i.name for i in chosen), tuple(i.addresses[0] for i in chosen), "NCCL's own order"
        )
    return Choice(route.interfaces, route.addresses, route.chosen_by)


def nccl_order(interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    """Returns what NCCL takes where ``NCCL_SOCKET_IFNAME`` is not set.

    Interfaces whose name begins with ``ib``; without any, all but those of Docker, loopback and
    libvirt; without any, Docker's, then loopback, then libvirt's. (NCCL's socket.cc; older
    versions take libvirt's like others.)
    """
    usable = [i for i in interfaces if i.addresses]

    def named(*stems: str) -> tuple[Interface, ...]:
        return tuple(i for i in usable if i.name.startswith(stems))

    left_out = named("docker", "lo", "virbr")
    others = tuple(i for i in usable if i not in left_out)
    steps = (named("ib"), others, named("docker"), named("lo"), named("virbr"))
    return next((step for step in steps if step), ())


def read_rdma(root: Path = Path("/")) -> tuple[RdmaPort, ...]:
    """Reads the ports of InfiniBand and RoCE adapters."""
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            # "4: ACTIVE"
            state = (folder / "state").read_text().split(":")[-1].strip()
            rate = (folder / "rate").read_text().strip()
        except OSError:
            continue
        ports.append(RdmaPort(folder.parent.parent.name, int(folder.name), state, rate))
    return tuple(ports)


def read_names(environ: Mapping[str, str] = os.environ) -> NameFacts:
    """Resolves the own name, ``localhost`` and ``MASTER_ADDR``; may block."""
    hostname = socket.gethostname()
    begun = time.monotonic()
    addresses = _resolve(hostname)
    seconds = time.monotonic() - begun
    master = environ.get("MASTER_ADDR") or None
    return NameFacts(
        hostname=hostname,
        addresses=addresses,
        seconds=seconds,
        own=tuple(a for i in list_interfaces() for a in i.addresses),
        localhost=_resolve("localhost"),
        master=master,
        master_addresses=_resolve(master) if master else (),
    )


def read_ports(environ: Mapping[str, str] = os.environ) -> PortFacts:
    """Tries to listen on the ports that a launch would use."""
    master = environ.get("MASTER_PORT") or None
    number = _port(master)
    free = None
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    return PortFacts(
        default_free=_can_listen(DEFAULT_PORT),
        free=free,
        master=master,
        master_free=None if number is None else _can_listen(number),
        inside_job="RANK" in environ and "WORLD_SIZE" in environ,
    )


def judge_network(facts: NetworkFacts, nodes: int | None, *, nccl: bool) -> list[Verdict]:
    """Judges what gloo and NCCL would use.

    Args:
        facts: Of this node.
        nodes: Nodes of the run; None where not known.
        nccl: Whether this torch has NCCL and there is a GPU to use it.
    """
    verdicts = [_judge_choice("gloo", GLOO_VARIABLE, facts.gloo, facts, nodes)]
    if nccl:
        verdicts.append(_judge_choice("nccl", NCCL_VARIABLE, facts.nccl, facts, nodes))
    else:
        verdicts.append(not_applicable("nccl-interface", "Interface of NCCL: NCCL is not used."))
    return [*verdicts, _judge_rdma(facts.rdma)]


def _judge_choice(
    backend: str, variable: str, choice: Choice, facts: NetworkFacts, nodes: int | None
) -> Verdict:
    id = f"{backend}-interface"
    name = {"gloo": "gloo", "nccl": "NCCL"}[backend]
    if choice.problem is not None:
        return error(id, choice.problem, choice.remedy)
    if not choice.interfaces:
        return warning(id, f"{name} finds no interface with an address.", "Bring up an interface.")
    reachable = reachable_interfaces(facts.interfaces)
    shown = ", ".join(
        f"{interface} {address or '?'}{_describe(facts.states.get(interface))}"
        for interface, address in zip(choice.interfaces, choice.addresses, strict=True)
    )
    what = f"{name} would use {shown} (from {choice.chosen_by})."
    others = [n for n in reachable if n not in choice.interfaces and not n.startswith(_VIRTUAL)]
    advice = f"Set {variable}={others[0]}" if others else "Bring up an interface"
    down = [n for n in choice.interfaces if n in facts.states and not facts.states[n].up]
    if down:
        return warning(id, f"{what} {down[0]} is down.", f"{advice}, or bring it up.")
    advice = f"{advice}, or let the hostname resolve to an address that the others reach."
    if all(is_loopback(address) for address in choice.addresses):
        if nodes == 1:
            return ok(id, what)
        says, prefix = (warning, "On several nodes: ") if nodes is None else (error, "")
        return says(
            id,
            f"{what} Other nodes cannot reach it"
            + ("; on a single node it is right." if nodes is None else "."),
            (prefix + (advice[0].lower() + advice[1:] if prefix else advice)),
        )
    virtual = [n for n in choice.interfaces if n.startswith(_VIRTUAL)]
    if virtual and nodes != 1:
        return warning(
            id, f"{what} {virtual[0]} looks like a bridge or tunnel of this node.", advice
        )
    if nodes == 1:
        return ok(id, what)
    rates = [facts.states[n].speed_mbit for n in choice.interfaces if n in facts.states]
    faster = [
        n
        for n in others
        if n in facts.states and facts.states[n].speed_mbit > max(rates, default=0)
    ]
    if faster and min(rates, default=0) > 0:
        best = max(faster, key=lambda n: facts.states[n].speed_mbit)
        return warning(
            id,
            f"{what} {best} is faster ({_rate(facts.states[best].speed_mbit)}).",
            f"If the other nodes reach it, set {variable}={best}.",
        )
    return ok(id, what)


def _judge_rdma(ports: Sequence[RdmaPort]) -> Verdict:
    if not ports:
        return not_applicable("rdma", "InfiniBand and RoCE: no adapter.")
    down = [port for port in ports if port.state != "ACTIVE"]
    shown = ", ".join(f"{p.device} port {p.port} {p.rate} {p.state}" for p in ports)
    if down:
        return warning(
            "rdma",
            f"{len(down)} of {len(ports)} ports of InfiniBand or RoCE are not active: {shown}.",
            "Look at cable, switch and subnet manager, or leave it out with NCCL_IB_HCA.",
        )
    return ok("rdma", f"InfiniBand or RoCE: {shown}.")


def judge_names(facts: NameFacts, nodes: int | None) -> list[Verdict]:
    """Judges how the own name and the meeting place resolve.

    Args:
        facts: Of this node.
        nodes: Nodes of the run; None where not known.
    """
    verdicts = [_judge_hostname(facts, nodes)]
    if not facts.localhost:
        verdicts.append(
            error(
                "localhost",
                "localhost does not resolve; torchrun --standalone meets there.",
                "Add '127.0.0.1 localhost' to /etc/hosts.",
            )
        )
    if facts.master is None:
        verdicts.append(not_applicable("master-address", "MASTER_ADDR is not set."))
        return verdicts
    found = facts.master_addresses
    if not found:
        verdicts.append(
            error(
                "master-address",
                f"MASTER_ADDR={facts.master} does not resolve here.",
                "Name node 0 by an address or by a name that each node resolves.",
            )
        )
    elif (nodes or 1) > 1 and all(is_loopback(address) for address in found):
        verdicts.append(
            error(
                "master-address",
                f"MASTER_ADDR={facts.master} is {found[0]}: each of {nodes} nodes would look for "
                "the others on itself.",
                "Set it to an address of node 0 that the others reach.",
            )
        )
    else:
        here = set(found) & set(facts.own) or is_loopback(found[0])
        where = "this node" if here else "another node"
        verdicts.append(ok("master-address", f"MASTER_ADDR={facts.master} is {found[0]}, {where}."))
    return verdicts


def _judge_hostname(facts: NameFacts, nodes: int | None) -> Verdict:
    id, name, found = "hostname", facts.hostname, facts.addresses
    entry = "Give it this node's address in DNS or /etc/hosts"
    if not found and nodes == 1:
        return ok(id, f"The hostname {name} does not resolve; a single node does without.")
    if not found:
        return warning(
            id,
            f"The hostname {name} does not resolve: gloo then uses loopback, which other nodes "
            "cannot reach.",
            f"{entry}, or set {GLOO_VARIABLE}.",
        )
    shown = ", ".join(found[:3])
    if facts.seconds > _SLOW_NAMES_S:
        return warning(
            id,
            f"The hostname {name} took {facts.seconds:.1f} s to resolve ({shown}).",
            "Put it into /etc/hosts, or look at the name servers in /etc/resolv.conf.",
        )
    if all(is_loopback(address) for address in found) and nodes != 1:
        return warning(
            id,
            f"The hostname {name} resolves to {shown}: on several nodes ranks would offer "
            "loopback to each other.",
            f"{entry}, or set {GLOO_VARIABLE}."
            + (" A single node needs nothing." if nodes is None else ""),
        )
    if not any(address in facts.own or is_loopback(address) for address in found):
        return warning(
            id,
            f"The hostname {name} resolves to {shown}, which is no address of this node.",
            f"{entry}, or set {GLOO_VARIABLE}.",
        )
    return ok(id, f"The hostname {name} resolves to {shown}.")


def judge_ports(facts: PortFacts) -> list[Verdict]:
    """Judges whether a launch can listen."""
    free = f"--master-port={facts.free}" if facts.free else "--master-port=0"
    if facts.inside_job:
        verdicts = [not_applicable("port", "Ports: this runs inside a job, which listens itself.")]
    elif facts.default_free:
        verdicts = [ok("port", f"Port {DEFAULT_PORT} is free.")]
    else:
        verdicts = [
            warning(
                "port",
                f"Port {DEFAULT_PORT}, where torchrun meets, is in use: a second launch fails.",
                f"Give the launch {free}, or --standalone on a single node.",
            )
        ]
    if facts.master is None or facts.inside_job:
        return verdicts
    number = _port(facts.master)
    if number is None:
        return [
            *verdicts,
            error(
                "master-port",
                f"MASTER_PORT={facts.master} is no port (1 to 65535).",
                f"Unset it, or set it to a free one, such as {facts.free}.",
            ),
        ]
    if not facts.master_free:
        return [
            *verdicts,
            warning(
                "master-port",
                f"MASTER_PORT={number} cannot be listened on here: it is in use, or needs root.",
                f"On node 0, set it to a free one, such as {facts.free}.",
            ),
        ]
    return [*verdicts, ok("master-port", f"MASTER_PORT={number} is free.")]


def _describe(state: LinkState | None) -> str:
    if state is None:
        return ""
    rate = f", {_rate(state.speed_mbit)}" if state.speed_mbit else ""
    return f"{rate}, MTU {state.mtu_bytes}"


def _rate(mbit: int) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def _resolve(name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _port(text: str | None) -> int | None:
    if text is None or not text.isdecimal() or not 0 < int(text) < 65536:
        return None
    return int(text)


def _can_listen(port: int) -> bool:
    """Tells whether the store of a launch could listen on a port of this node."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As torch's store does: connections that linger do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as problem:
            if family == socket.AF_INET6 and not _has_ipv6(problem):
                continue
            return False
    return True


def _has_ipv6(problem: OSError) -> bool:
    """Tells a port in use from a system without IPv6."""
    return problem.errno in (errno.EADDRINUSE, errno.EACCES)

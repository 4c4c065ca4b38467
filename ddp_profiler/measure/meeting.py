"""How ranks find each other: one store, a bounded wait, and the names of those who stay away.

``torch.distributed``'s own ``env://`` start waits for all ranks inside the store, which counts
them and cannot say who is missing. Here each rank announces itself; only then does the process
group start. As there, the store is the launcher's agent's where it offers one
(``TORCHELASTIC_USE_AGENT_STORE``), else rank 0's own, at MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from ddp_profiler.errors import DdpProfilerError, InputError, UsageError
from ddp_profiler.measure.bounded import BoundedStore, NoAnswerError, within
from ddp_profiler.measure.failures import phase_key
from ddp_profiler.measure.interfaces import GLOO_VARIABLE, NCCL_VARIABLE, Route, is_loopback
from ddp_profiler.measure.topology import Topology
from ddp_profiler.naming import name_ranks

_PREFIX = "ddp_profiler"
_HEARSAY_S = 3.0
"""Rank 0 decides who is missing; the others wait this much longer for its word."""
_FAREWELL_S = 1.0
"""Rank 0 may hold the store: it stays until the others have read its word."""
_PAUSES_S = (0.002, 0.25)


@dataclass(frozen=True)
class Presence:
    """What a rank says of itself when it comes.

    Attributes:
        rank: Global rank.
        host: Its node's name.
        stack: Ranks with equal values share a loopback interface.
        route: What its backend uses to reach others.
        others: Interfaces of the node that other hosts may reach.
        side_route: What gloo uses beside another backend; None where gloo is the backend.
    """

    rank: int
    host: str
    stack: str
    route: Route
    others: tuple[str, ...] = ()
    side_route: Route | None = None


@dataclass(frozen=True)
class Meeting:
    """All ranks have come.

    Attributes:
        store: The raw store, for the process group.
        board: The same for what ranks tell each other, with a prefix of ours.
        address: Where the store is.
        members: All ranks, by rank.
        second_store: Opens another connection to the store, within so many seconds.
    """

    store: Any
    board: BoundedStore
    address: str
    members: tuple[Presence, ...]
    second_store: Callable[[float], Any]


def meet(
    topology: Topology,
    own: Presence,
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
) -> Meeting:
    """Waits until all ranks are here, and not longer than the timeout.

    Args:
        topology: This rank's place; more than one rank.
        own: What this rank says of itself.
        timeout_s: Seconds.
        environ: Environment variables.

    Raises:
        UsageError: Ranks are missing, the address cannot be reached, the port is in use, or a
            rank would talk to other hosts over its loopback interface.
    """
    deadline = time.monotonic() + timeout_s
    address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    addresses: tuple[str, ...] = ()
    if not _holds(topology, environ):
        addresses = _resolve(topology, own, deadline, timeout_s, environ)
    # A launcher that starts ranks again keeps its store, and in it what they said before.
    attempt = f"attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    raw = dist.PrefixStore(  # type: ignore[attr-defined]
        attempt, _connect(topology, own, addresses, address, deadline, timeout_s, environ)
    )
    # Who has the store says by itself, and sooner, what is wrong with its name.
    addresses = addresses or _resolve(topology, own, deadline, timeout_s, environ)
    # A rank that is only slow is waited for elsewhere; an answer of the store takes no time.
    board = BoundedStore(
        dist.PrefixStore(_PREFIX, raw),  # type: ignore[attr-defined]
        timeout_s,
        f"{address} ({_holder(environ)})",
    )
    # Before the rank is here: whoever knows of a rank can ask what it does.
    board.set(phase_key(own.rank), "start-up")
    board.set(f"here/{own.rank}", msgspec.json.encode(own))
    members = gather(board, topology, deadline, timeout_s, address, environ)
    try:
        check_loopback(members)
    except UsageError:
        if _holds(topology, environ):
            time.sleep(_FAREWELL_S)
        raise

    def second_store(limit_s: float) -> Any:
        host, problem = reach(addresses, int(environ["MASTER_PORT"]), time.monotonic() + limit_s)
        if host is None:
            raise InputError(f"The store at {board.where} cannot be reached: {problem}.")
        timeout = timedelta(seconds=timeout_s)
        client = within(limit_s, lambda: _client(host, timeout, environ))
        both = dist.PrefixStore(attempt, client)  # type: ignore[attr-defined]
        return dist.PrefixStore(_PREFIX, both)  # type: ignore[attr-defined]

    return Meeting(raw, board, address, members, second_store)


def gather(
    board: Any,
    topology: Topology,
    deadline: float,
    timeout_s: float,
    address: str,
    environ: Mapping[str, str],
) -> tuple[Presence, ...]:
    """Returns what all ranks said of themselves; rank 0 decides when the wait is over.

    Raises:
        UsageError: Ranks are missing.
    """
    ranks = range(topology.world_size)
    keys = [f"here/{rank}" for rank in ranks]
    if topology.rank == 0:
        if _until(lambda: board.check(keys), deadline):
            members = b"[" + b",".join(board.multi_get(keys)) + b"]"
            board.set("members", members)
            return msgspec.json.decode(members, type=tuple[Presence, ...])
        error = _missing(board, topology, timeout_s, address, environ)
        board.set("missing", str(error))
        time.sleep(_FAREWELL_S)
        raise error

    def decided() -> bool:
        return bool(board.check(["members"]) or board.check(["missing"]))

    if not _until(decided, deadline + _HEARSAY_S):
        raise _missing(board, topology, timeout_s, address, environ)
    if board.check(["members"]):
        return msgspec.json.decode(board.get("members"), type=tuple[Presence, ...])
    raise UsageError(*board.get("missing").decode().split("\n", 1))


def check_loopback(members: Sequence[Presence]) -> None:
    """Checks that no rank would use its loopback interface to talk to other hosts.

    Raises:
        UsageError: One would.
    """
    for member in members:
        far = next((other for other in members if other.stack != member.stack), None)
        for name, address in zip(member.route.interfaces, member.route.addresses, strict=True):
            if far is None or not is_loopback(address):
                continue
            other = member.others[0] if member.others else "NAME"
            nccl = member.route.chosen_by == NCCL_VARIABLE
            raise UsageError(
                f"Rank {member.rank} on {member.host} would use interface {name} ({address}, "
                f"from {member.route.chosen_by}), which rank {far.rank} on {far.host} cannot "
                "reach.",
                f"Set {NCCL_VARIABLE}={other} on {member.host}, or unset it."
                if nccl
                else f"Set {GLOO_VARIABLE}={other} on {member.host}, or let its hostname resolve "
                "to an address that the other nodes reach.",
            )


def side_problem(members: Sequence[Presence]) -> str:
    """Says why gloo, beside another backend, cannot connect the nodes; empty if it may.

    The run itself does not need it.
    """
    try:
        check_loopback([replace(m, route=m.side_route or m.route) for m in members])
    except UsageError as error:
        return error.message.removesuffix(".")
    return ""


def _missing(
    board: Any, topology: Topology, timeout_s: float, address: str, environ: Mapping[str, str]
) -> UsageError:
    """Says who is missing, who is here, and where they were waited for."""
    absent = [r for r in range(topology.world_size) if not board.check([f"here/{r}"])]
    absent_set = set(absent)
    here = [r for r in range(topology.world_size) if r not in absent_set]
    if not absent:
        # All came, and rank 0 did not say so.
        absent, here = [0], here[1:]
    shown = here[:64]
    hosts: dict[str, None] = {}
    for raw in board.multi_get([f"here/{r}" for r in shown]) if shown else []:
        hosts.setdefault(msgspec.json.decode(raw, type=Presence).host)
    names = list(hosts)
    on = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = name_ranks(absent)
    return UsageError(
        f"{text[0].upper()}{text[1:]} of {topology.world_size}{_nodes_of(absent, environ)} did "
        f"not come to {address} ({_holder(environ)}) within {timeout_s:g} s; here: "
        f"{name_ranks(here) if here else 'nobody'}{f' ({on})' if on else ''}."
        f"{_slurm_nodes(environ)}",
        "Check that each node was started with this address and can reach it; --timeout S waits "
        "longer.",
    )


def _nodes_of(ranks: Sequence[int], environ: Mapping[str, str]) -> str:
    """Names the nodes of ranks, where the launcher numbers them node by node."""
    try:
        per_node = int(environ["LOCAL_WORLD_SIZE"])
        nodes = int(environ["GROUP_WORLD_SIZE"])
        if nodes < 2 or per_node * nodes != int(environ["WORLD_SIZE"]):
            return ""
    except (KeyError, ValueError):
        return ""
    found = sorted({rank // per_node for rank in ranks})
    return f" (on {name_ranks(found).replace('rank', 'node', 1)})"


def _slurm_nodes(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return f" Slurm's nodes: {nodes}." if nodes else ""


def _agent_holds(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _holds(topology: Topology, environ: Mapping[str, str]) -> bool:
    """Tells whether this process has the store."""
    return topology.rank == 0 and not _agent_holds(environ)


def _holder(environ: Mapping[str, str]) -> str:
    return "torchrun on node 0" if _agent_holds(environ) else "rank 0"


def _connect(
    topology: Topology,
    own: Presence,
    addresses: Sequence[str],
    address: str,
    deadline: float,
    timeout_s: float,
    environ: Mapping[str, str],
) -> Any:
    """Opens the store: rank 0 its own, where no agent has one; the others a connection."""
    name, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    holds = _holds(topology, environ)
    host: str | None = name
    who = f"Rank {topology.rank} on {own.host}"
    if not holds:
        # Torch's client takes twice its timeout and prints traces of C++.
        host, problem = reach(addresses, port, deadline)
        if host is None:
            raise UsageError(
                f"{who} could not reach {_holder(environ)} at {address} within {timeout_s:g} s: "
                f"{problem}.{_slurm_nodes(environ)}",
                "Check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are its own "
                "and open to the other nodes.",
            )
    left = max(1.0, deadline - time.monotonic())
    try:
        if not holds:
            return within(left, lambda: _client(str(host), timeout, environ))
        return within(
            left,
            lambda: dist.TCPStore(  # type: ignore[attr-defined]
                name,
                port,
                None,
                True,
                timeout,
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=environ.get("USE_LIBUV", "1") == "1",
            ),
        )
    except NoAnswerError:
        where = "its own store, at" if holds else f"{_holder(environ)} at"
        raise UsageError(
            f"{who} could not reach {where} {address} within {timeout_s:g} s.",
            "Check that MASTER_ADDR is an address of the node of rank 0.",
        ) from None
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise explain_start(error, address) from error


def explain_start(error: Exception, address: str) -> DdpProfilerError:
    """Turns an error of torch at the start into one for the user."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return UsageError(
            f"Port {address.rpartition(':')[2]} is in use by another process.",
            "Choose another --master-port, or start torchrun with --standalone.",
        )
    return InputError(f"The process group could not be started at {address}: {text}", "")


def _client(host: str, timeout: timedelta, environ: Mapping[str, str]) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(environ["MASTER_PORT"]),
        None,
        False,
        timeout,
        wait_for_workers=False,
        use_libuv=environ.get("USE_LIBUV", "1") == "1",
    )


def _resolve(
    topology: Topology,
    own: Presence,
    deadline: float,
    timeout_s: float,
    environ: Mapping[str, str],
) -> tuple[str, ...]:
    """Returns the addresses of the host that has the store; asked once, since it may block.

    A name server that does not answer is no reason to miss the deadline, and one that is gone
    when a run is lost must not hold up its report.
    """
    name = environ["MASTER_ADDR"]
    problem = "the name was not resolved in time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            found = within(left, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
            return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
        except NoAnswerError:
            break
        except (OSError, UnicodeError):
            # A job may start before its hosts are known.
            problem = f"the name {name} is not known here"
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    raise UsageError(
        f"Rank {topology.rank} on {own.host} could not reach {_holder(environ)} at "
        f"{name}:{environ['MASTER_PORT']} within {timeout_s:g} s: {problem}."
        f"{_slurm_nodes(environ)}",
        "Check that MASTER_ADDR names the node of rank 0, and that this node can resolve it.",
    )


def reach(addresses: Sequence[str], port: int, deadline: float) -> tuple[str | None, str]:
    """Tries to open a connection to one of a host's addresses until the deadline.

    Returns:
        The address that answered, or None and why none did.
    """
    problem = "no time was left"
    while time.monotonic() < deadline:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                socket.create_connection((address, port), timeout=min(left, 3.0)).close()
            except TimeoutError:
                problem = "no answer"
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            else:
                return address, ""
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    return None, problem


def _until(condition: Callable[[], bool], deadline: float) -> bool:
    """Asks more and more rarely until the answer is yes or the deadline has passed."""
    pause, longest = _PAUSES_S
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True

"""Network interfaces of a node: which of them a backend would use, checked before ranks meet."""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ddp_profiler.errors import UsageError

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
_MOST_SHOWN = 6


@dataclass(frozen=True)
class Interface:
    """A network interface of this node.

    Attributes:
        name: As the system names it.
        addresses: Its IP addresses, IPv4 first; empty where it has none.
    """

    name: str
    addresses: tuple[str, ...]

    @property
    def loopback(self) -> bool:
        """Whether only this node can reach it."""
        return any(is_loopback(address) for address in self.addresses)


@dataclass(frozen=True)
class Route:
    """What a backend uses to reach other ranks.

    Attributes:
        interfaces: Names of the interfaces, in the order in which the backend takes them; empty
            where it chooses by itself.
        addresses: The address of each; None where it is not known.
        chosen_by: The variable or the rule that chose.
    """

    interfaces: tuple[str, ...]
    addresses: tuple[str | None, ...]
    chosen_by: str

    def __str__(self) -> str:
        pairs = zip(self.interfaces, self.addresses, strict=True)
        named = ", ".join(f"{name} {address or '?'}" for name, address in pairs)
        return f"{named} (from {self.chosen_by})" if named else "what NCCL chooses"


def list_interfaces() -> tuple[Interface, ...]:
    """Returns this node's interfaces, also those without an address."""
    ip = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(name, tuple(a.address for family in ip for a in entries if a.family == family))
        for name, entries in psutil.net_if_addrs().items()
    )


def is_loopback(address: str | None) -> bool:
    """Tells whether an IP address reaches no other host."""
    try:
        return ipaddress.ip_address((address or "").split("%")[0]).is_loopback
    except ValueError:
        return False


def find_route(
    backend: str,
    environ: Mapping[str, str] = os.environ,
    interfaces: Sequence[Interface] | None = None,
    hostname: str | None = None,
    bindable: Callable[[str], str | None] | None = None,
) -> Route:
    """Tells which interface a backend will use on this node.

    Gloo takes exact names, separated by commas, in ``GLOO_SOCKET_IFNAME``; a value of one
    character counts as not set. Without it, it takes the first address of the hostname that
    can be bound, else the loopback address. NCCL takes prefixes in ``NCCL_SOCKET_IFNAME``;
    ``=`` before them asks for exact names, ``^`` for all others. (Gloo: tried with torch
    2.13; NCCL: its user guide.)

    Args:
        backend: ``gloo`` or ``nccl``.
        environ: Environment variables.
        interfaces: Of this node; None: looked up.
        hostname: Of this node; None: looked up.
        bindable: First address of a name that can be bound here, or None; None: looked up.

    Raises:
        UsageError: The variable names what is not there.
    """
    found = list_interfaces() if interfaces is None else tuple(interfaces)
    host = hostname or socket.gethostname()
    if backend == "nccl":
        return _nccl_route(environ.get(NCCL_VARIABLE, ""), found, host)
    value = environ.get(GLOO_VARIABLE, "")
    if len(value) > 1:
        return _gloo_route(value, found, host)
    address = (bindable or _bindable)(host)
    if address is None:
        loopback = next((i.name for i in found if "127.0.0.1" in i.addresses), "lo")
        return Route((loopback,), ("127.0.0.1",), "hostname, which has no address of this node")
    name = next((i.name for i in found if address in i.addresses), "")
    if not name and is_loopback(address):
        # All of 127.0.0.0/8 is the loopback interface's, whatever address it lists.
        name = next((i.name for i in found if i.loopback), "")
    return Route((name or "?",), (address,), "hostname")


def describe(backend: str) -> dict[str, Any]:
    """Describes the route of a backend on this node, for the record; never raises."""
    try:
        route = find_route(backend)
    except (UsageError, OSError) as error:
        return {"interfaces": None, "addresses": None, "chosen_by": str(error).splitlines()[0]}
    return {
        "interfaces": list(route.interfaces) or None,
        "addresses": list(route.addresses) or None,
        "chosen_by": route.chosen_by,
    }


def reachable_interfaces(interfaces: Sequence[Interface] | None = None) -> tuple[str, ...]:
    """Returns names of the interfaces that have an address which other hosts may reach."""
    found = list_interfaces() if interfaces is None else interfaces
    return tuple(i.name for i in found if i.addresses and not i.loopback)


def _gloo_route(value: str, interfaces: tuple[Interface, ...], host: str) -> Route:
    # As gloo's caller splits it: an empty last part is dropped, blanks are kept.
    names = value.split(",")
    names = names[:-1] if names[-1] == "" else names
    known = {i.name: i for i in interfaces}
    for name in names:
        if name in known and known[name].addresses:
            continue
        if not name:
            problem = "has an empty name in it"
        elif name != name.strip():
            problem = f"has a blank in {name!r}; gloo keeps blanks"
        elif name in known:
            problem = f"names {name}, which has no IP address"
        elif any(character in name for character in "*?[]^=!"):
            problem = "is a pattern; gloo takes exact names, separated by commas"
        else:
            problem = f"names {name!r}, and there is no such interface"
        raise UsageError(
            f"{GLOO_VARIABLE}={value!r} on {host} {problem}. {_inventory(interfaces)}",
            _remedy(GLOO_VARIABLE, name, interfaces),
        )
    return Route(tuple(names), tuple(known[n].addresses[0] for n in names), GLOO_VARIABLE)


def _nccl_route(value: str, interfaces: tuple[Interface, ...], host: str) -> Route:
    if not value:
        return Route((), (), "NCCL")
    excludes = value.startswith("^")
    text = value[1:] if excludes else value
    exact = text.startswith("=")
    patterns = [p.split(":")[0] for p in (text[1:] if exact else text).split(",") if p]
    chosen = []
    for interface in interfaces:
        name = interface.name
        matches = any(name == p if exact else name.startswith(p) for p in patterns)
        if matches != excludes and interface.addresses:
            chosen.append(interface)
    if not chosen:
        raise UsageError(
            f"{NCCL_VARIABLE}={value!r} on {host} matches no interface with an IP address. "
            f"{_inventory(interfaces)}",
            _remedy(NCCL_VARIABLE, "", interfaces),
        )
    return Route(
        tuple(i.name for i in chosen), tuple(i.addresses[0] for i in chosen), NCCL_VARIABLE
    )


def _inventory(interfaces: Sequence[Interface]) -> str:
    """Says which interfaces there are: those with an address first, and not more than a few."""
    ordered = sorted(interfaces, key=lambda i: (not i.addresses, i.loopback))
    shown = [
        f"{i.name} ({i.addresses[0] if i.addresses else 'no address'})"
        for i in ordered[:_MOST_SHOWN]
    ]
    more = len(ordered) - len(shown)
    return f"There is {', '.join(shown) or 'none'}{f' and {more} more' if more > 0 else ''}."


def _remedy(variable: str, wanted: str, interfaces: Sequence[Interface]) -> str:
    names = reachable_interfaces(interfaces)
    stem = wanted.strip(" ^=")
    close = [n for n in names if stem and (fnmatch.fnmatch(n, stem) or n.startswith(stem))]
    usable = list(names)
    if wanted.startswith("^"):
        usable = [n for n in names if not n.startswith(stem)] or usable
        close = []
    best = next(iter(close or usable), None)
    if best is None:
        return f"Unset {variable}, or bring up an interface with an address."
    return f"Set {variable}={best}, or unset it."


def _bindable(hostname: str) -> str | None:
    """Returns the first address of a name that this node can bind, as gloo looks for it."""
    try:
        entries = socket.getaddrinfo(hostname, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in entries:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None

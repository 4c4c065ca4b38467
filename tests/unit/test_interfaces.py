"""Which interface a backend would use, on made-up nodes, and what gloo itself says."""

import os
import subprocess
import sys

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.measure.interfaces import Interface, find_route, is_loopback, list_interfaces

NODE = (
    Interface("lo", ("127.0.0.1", "::1")),
    Interface("eth0", ("192.0.2.2", "fd00::2")),
    Interface("eth1", ("198.51.100.7",)),
    Interface("ib0", ()),
)


def route(backend="gloo", variable=None, address="192.0.2.2", interfaces=NODE):
    environ = {} if variable is None else {f"{backend.upper()}_SOCKET_IFNAME": variable}
    return find_route(backend, environ, interfaces, "node7", lambda _: address)


@pytest.mark.parametrize(
    ("value", "names", "addresses"),
    [
        ("eth0", ("eth0",), ("192.0.2.2",)),
        ("eth1,eth0", ("eth1", "eth0"), ("198.51.100.7", "192.0.2.2")),
        ("eth0,", ("eth0",), ("192.0.2.2",)),
    ],
)
def test_exact_names_are_taken(value, names, addresses):
    found = route(variable=value)
    assert (found.interfaces, found.addresses) == (names, addresses)
    assert found.chosen_by == "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("value", "problem", "remedy"),
    [
        ("eth*", "is a pattern", "=eth0"),
        ("^eth0", "is a pattern", "=eth1"),
        ("=eth1", "is a pattern", "=eth1"),
        ("eth", "names 'eth', and there is no such interface", "=eth0"),
        ("enp3s0", "names 'enp3s0', and there is no such interface", "=eth0"),
        ("ib0", "names ib0, which has no IP address", "=eth0"),
        ("eth0,nope", "names 'nope', and there is no such interface", "=eth0"),
        ("eth0, eth1", "has a blank in ' eth1'", "=eth1"),
        (",eth0", "has an empty name", "=eth0"),
    ],
)
def test_anything_else_is_named_with_value_node_and_interfaces(value, problem, remedy):
    with pytest.raises(UsageError) as caught:
        route(variable=value)
    line = caught.value.message
    assert f"GLOO_SOCKET_IFNAME={value!r} on node7 {problem}" in line
    for part in ("eth0 (192.0.2.2)", "eth1 (198.51.100.7)", "lo (127.0.0.1)", "ib0 (no address)"):
        assert part in line
    assert "\n" not in line
    assert f"GLOO_SOCKET_IFNAME{remedy}," in caught.value.remedy


def test_many_interfaces_are_not_all_listed():
    many = tuple(Interface(f"veth{k}", (f"10.0.0.{k}",)) for k in range(50))
    with pytest.raises(UsageError, match=r"and 44 more\."):
        route(variable="nope", interfaces=many)


@pytest.mark.parametrize("value", [None, "", "e"])
def test_without_a_name_gloo_takes_the_hostname(value):
    found = route(variable=value)
    assert (found.interfaces, found.addresses) == (("eth0",), ("192.0.2.2",))
    assert found.chosen_by == "hostname"


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", None])
def test_hostname_of_the_loopback_interface(address):
    found = route(address=address)
    assert found.interfaces == ("lo",)
    assert found.addresses == (address or "127.0.0.1",)
    assert is_loopback(found.addresses[0])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ("eth0", "eth1")),
        ("=eth1", ("eth1",)),
        ("=eth0,eth1", ("eth0", "eth1")),
        ("^lo", ("eth0", "eth1")),
        ("^=eth0,lo", ("eth1",)),
        ("lo", ("lo",)),
    ],
)
def test_nccl_takes_prefixes(value, names):
    assert route("nccl", value).interfaces == names


@pytest.mark.parametrize("value", ["enp", "=eth", "ib", "^lo,eth"])
def test_nccl_with_nothing_that_matches(value):
    with pytest.raises(UsageError, match=r"on node7 matches no interface with an IP address"):
        route("nccl", value)


def test_each_backend_heeds_its_own_variable():
    environ = {"GLOO_SOCKET_IFNAME": "nope", "NCCL_SOCKET_IFNAME": "nope"}
    for backend in ("gloo", "nccl"):
        other = {k: v for k, v in environ.items() if not k.startswith(backend.upper())}
        find_route(backend, other, NODE, "node7", lambda _: "192.0.2.2")
        with pytest.raises(UsageError):
            find_route(backend, environ, NODE, "node7", lambda _: "192.0.2.2")


GLOO = """
import os, sys, torch.distributed as dist
for value in sys.argv[1:]:
    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        print("taken")
    except RuntimeError:
        print("refused")
"""


def test_gloo_itself_agrees():
    """The truth is gloo's own word: what it refuses is an error here, and the other way round."""
    loopback = next(i.name for i in list_interfaces() if i.loopback)
    bare = [i.name for i in list_interfaces() if not i.addresses][:1]
    values = [loopback, f"{loopback},", f"{loopback},{loopback}", "x", "", *bare]
    values += [f"{loopback}*", f"^{loopback}", f"={loopback}", f"{loopback}, {loopback}"]
    values += [f",{loopback}", "nosuch0", f"{loopback},nosuch0", loopback[:1] + "?"]
    done = subprocess.run(
        [sys.executable, "-c", GLOO, *values],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    )
    for value, verdict in zip(values, done.stdout.split(), strict=True):
        try:
            find_route("gloo", {"GLOO_SOCKET_IFNAME": value})
        except UsageError:
            assert verdict == "refused", value
        else:
            assert verdict == "taken", value

"""Compares the clocks of a script's hosts, over connections of its own.

Nothing of the script is used: no process group, no collective. Before the script begins, the
first rank of each other clock opens a connection to rank 0, where a thread answers with the
time; so a rank can compare whenever it likes, and rank 0's training goes on meanwhile. The
bounds are those of :mod:`ddp_profiler.measure.clock_sync`: they hold for certain, however long
an answer takes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_profiler.measure import interfaces
from ddp_profiler.measure.clock_sync import LocalClock, compared
from ddp_profiler.measure.scripts.board import ScriptBoard
from ddp_profiler.schema import ClockReading

_OPENING_S = 10.0
"""How long hosts may take to find a way to rank 0."""
_TRY_S = 2.0
"""How long one address may take to answer."""
_COMPARING_S = 2.0
"""How long a comparison may hold up the training of one rank."""
_MOST_READINGS = 256
_ANSWER = struct.Struct("<qq")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Service:
    """Where rank 0 tells the time."""

    leaders: tuple[int, ...]
    addresses: tuple[str, ...]
    port: int
    token: str


class ScriptClocks:
    """One rank's part in comparing clocks.

    Args:
        board: Makes values known between the ranks.
        world_size: Number of ranks.
        clock: This rank's clocks.

    Attributes:
        readings: This rank's comparisons so far; none on rank 0's clock.
    """

    def __init__(self, board: ScriptBoard, world_size: int, clock: LocalClock) -> None:
        self.readings: list[ClockReading] = []
        self._board = board
        self._world_size = world_size
        self._clock = clock
        self._connection: socket.socket | None = None
        self._leaders: tuple[int, ...] = (0,)

    def open(self) -> str:
        """Connects the hosts; all ranks call it alike, before the script begins.

        Returns:
            On rank 0, why some clocks cannot be compared; empty if all can.

        Raises:
            DdpProfilerError: A rank did not say which clock it reads.
        """
        board, rank = self._board, self._board.rank
        board.publish(f"clock domain/{rank}", self._clock.domain)
        if rank != 0:
            service: _Service = board.learn("clock service", _Service)
            if rank in service.leaders:
                board.publish(f"clock problem/{rank}", self._connect(service))
            return ""
        first: dict[str, int] = {}
        for other in range(self._world_size):
            first.setdefault(board.learn(f"clock domain/{other}", str), other)
        self._leaders = tuple(first.values())
        if len(self._leaders) == 1:
            board.publish("clock service", _Service(self._leaders, (), 0, ""))
            return ""
        token = secrets.token_hex(_TOKEN_BYTES)
        with _listen() as listener:
            port = listener.getsockname()[1]
            addresses = _own_addresses(os.environ, interfaces.list_interfaces())
            board.publish("clock service", _Service(self._leaders, addresses, port, token))
            return self._accept(listener, token.encode())

    def compare(self) -> None:
        """Compares this rank's clock with rank 0's, if it leads a clock, and makes it known.

        What goes wrong ends it for good; what was found before stays.
        """
        if self._connection is None:
            return
        try:
            self.readings.append(self._ask(self._connection))
            if len(self.readings) > _MOST_READINGS:
                # Over a long run every second one does, the first and the last among them.
                self.readings[:] = [*self.readings[:-1:2], self.readings[-1]]
            self._board.publish(f"clocks/{self._board.rank}", tuple(self.readings))
        except OSError:
            self.close()

    def found(self) -> tuple[ClockReading, ...]:
        """Returns, on rank 0, the comparisons that are known so far, in order of time."""
        readings: list[ClockReading] = []
        for leader in self._leaders[1:]:
            readings += self._board.find(f"clocks/{leader}", tuple[ClockReading, ...]) or ()
        return tuple(readings)

    def close(self) -> None:
        """Ends the connection; rank 0's thread for it ends as well."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # Loader workers that were forked hold the connection too: closing alone ends nothing.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # -- rank 0 -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, token: bytes) -> str:
        """Takes the connections of all leaders; returns what went wrong."""
        deadline = time.monotonic() + _OPENING_S
        waiting = set(self._leaders[1:])
        problems = []
        while waiting and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                threading.Thread(
                    target=self._answer,
                    args=(connection, token),
                    daemon=True,
                    name="ddp-profiler-clock",
                ).start()
            for leader in sorted(waiting):
                problem = self._board.find(f"clock problem/{leader}", str)
                if problem is not None:
                    waiting.discard(leader)
                    problems += [problem] if problem else []
        if waiting:
            ranks = ", ".join(map(str, sorted(waiting)))
            problems.append(f"rank {ranks} did not connect to rank 0 within {_OPENING_S:g} s")
        return "; ".join(problems)

    def _answer(self, connection: socket.socket, token: bytes) -> None:
        """Tells one leader the time, as often as it asks."""
        clock = self._clock
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_TRY_S)
            _no_delay(connection)
            if not secrets.compare_digest(_receive(connection, len(token)), token):
                return
            connection.sendall(token)
            connection.settimeout(None)
            while connection.recv(1):
                connection.sendall(_ANSWER.pack(clock.monotonic(), clock.real()))

    # -- the first rank of another clock ------------------------------------------------------

    def _connect(self, service: _Service) -> str:
        """Opens the connection and compares for the first time; returns what went wrong."""
        token = service.token.encode()
        deadline = time.monotonic() + _OPENING_S
        problem = "it has no address"
        for address in service.addresses:
            left = min(_TRY_S, deadline - time.monotonic())
            if left <= 0:
                break
            try:
                connection = socket.create_connection((address, service.port), timeout=left)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
                continue
            try:
                _no_delay(connection)
                connection.sendall(token)
                # An address such as a bridge's of containers may exist on this host as well.
                if _receive(connection, len(token)) == token:
                    self._connection = connection
                    self.compare()
                    return "" if self.readings else "rank 0 does not answer"
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            connection.close()
        where = ", ".join(service.addresses)
        return (
            f"rank {self._board.rank} on {socket.gethostname()} cannot reach rank 0 at {where}, "
            f"port {service.port} ({problem})"
        )

    def _ask(self, connection: socket.socket) -> ClockReading:
        deadline = time.monotonic() + _COMPARING_S

        def exchange() -> tuple[int, int]:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(b"?")
            there, real = _ANSWER.unpack(_receive(connection, _ANSWER.size))
            return there, real

        return compared(self._board.rank, self._clock, exchange)


def _listen() -> socket.socket:
    """Opens a port that all interfaces listen on, over IPv6 too where there is any."""
    try:
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
        )
    except (OSError, ValueError):
        listener = socket.create_server(("", 0), backlog=128)
    listener.settimeout(0.02)
    return listener


def _own_addresses(
    environ: Mapping[str, str], found: Sequence[interfaces.Interface]
) -> tuple[str, ...]:
    """Returns this host's addresses that others may reach, those that were chosen first."""
    chosen = [
        name
        for variable in (interfaces.GLOO_VARIABLE, interfaces.NCCL_VARIABLE)
        for name in environ.get(variable, "").split(",")
    ]
    usable = [interface for interface in found if not interface.loopback]
    usable.sort(key=lambda i: chosen.index(i.name) if i.name in chosen else len(chosen))
    addresses = [
        address
        for interface in usable
        for address in interface.addresses
        # A link-local address means nothing without the other side's interface.
        if "%" not in address and not address.lower().startswith("fe80:")
    ]
    return tuple(addresses)


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receives so many bytes.

    Raises:
        OSError: They did not come.
    """
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other side has ended the connection")
        data += part
    return data

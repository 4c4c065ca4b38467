"""Brings the files of ranks that rank 0 cannot see to rank 0, over a process group.

Values go through the store, bytes through a group of gloo: under NCCL as well, since a
transfer that gets stuck there would end the process, and the files are not on the GPU anyway.
The files stay where they are; a collection that fails loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.measure.session import PATIENCE_S, Session

CHUNK_BYTES = 4 * 2**20
HEARTBEAT = "collecting"
"""Moves with every chunk: ranks whose turn comes late do not give up."""

_LONGEST_MEETING = timedelta(seconds=60)
"""For a group of gloo beside NCCL, which may know no way between the nodes."""

_LOST = (DdpProfilerError, RuntimeError)
"""What a lost connection raises, in the store and in gloo."""


@dataclass(frozen=True)
class Offer:
    """A file that a rank is ready to send: its size in bytes and its SHA-256.

    Attributes:
        size: Bytes.
        sha256: Hexadecimal digest.
        problem: Why there is nothing to send; empty if there is.
    """

    size: int
    sha256: str
    problem: str = ""


class Carrier(Protocol):
    """Carries values between all ranks, and bytes between rank 0 and the ranks that send."""

    @property
    def rank(self) -> int:
        """Global rank."""
        ...

    @property
    def problem(self) -> str:
        """Why bytes cannot be carried; empty if they can."""
        ...

    def publish(self, key: str, value: object) -> None:
        """Makes a value known to all ranks."""
        ...

    def learn(
        self, key: str, kind: Any = Any, heartbeat: str | None = None, *, patience_s: float = 0.0
    ) -> Any:
        """Waits for a value, longer by ``patience_s``, and returns it as ``kind``."""
        ...

    def beat(self, heartbeat: str) -> None:
        """Tells waiting ranks that things move."""
        ...

    def send(self, data: bytes) -> None:
        """Sends bytes to rank 0."""
        ...

    def receive(self, size: int, source: int) -> bytes:
        """Receives as many bytes from a rank."""
        ...


class Taker(Protocol):
    """Takes one file on rank 0. Each of its methods may raise OSError or DdpProfilerError."""

    def write(self, data: bytes) -> None:
        """Takes the next bytes."""
        ...

    def finish(self) -> None:
        """Checks what came, and keeps it under its name."""
        ...

    def discard(self) -> None:
        """Leaves nothing behind; does nothing after :meth:`finish`."""
        ...


class GroupCarrier:
    """A carrier over a session's store and a gloo group.

    All ranks make it alike, before they measure: a group that is made when the network has
    just gone hangs for longer than its timeout (torch 2.13).

    Args:
        session: This rank's part in the launch.
        senders: The ranks that send to rank 0.
        own_group: Make a group of gloo; else the session's own group is one.
    """

    def __init__(self, session: Session, senders: Sequence[int], own_group: bool) -> None:
        self.rank = session.rank
        self.publish = session.publish
        self.learn = session.learn
        self.beat = session.beat
        self.problem = ""
        self._group: Any = None
        if own_group:
            self.problem = session.side_problem
        if own_group and not self.problem:
            timeout = min(session.timeout, _LONGEST_MEETING)
            try:
                # Not with use_local_synchronization: it hangs where ranks are members of
                # different numbers of groups, since the group's name then differs (torch 2.13).
                self._group = dist.new_group(sorted({0, *senders}), timeout=timeout, backend="gloo")
            except RuntimeError as error:
                self.problem = f"gloo cannot connect the nodes: {_reason(error)}"

    def send(self, data: bytes) -> None:
        """Sends bytes to rank 0."""
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    def receive(self, size: int, source: int) -> bytes:
        """Receives as many bytes from a rank."""
        chunk = torch.empty(size, dtype=torch.uint8)
        dist.recv(chunk, source, group=self._group)
        data: bytes = chunk.numpy().tobytes()
        return data


def hand_over(carrier: Carrier, path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Sends this rank's file to rank 0 when that asks for it; the file stays here too.

    Args:
        carrier: This rank's carrier.
        path: The file.
        read: Given it, returns the bytes to send. It may raise OSError.

    Returns:
        Why rank 0 cannot be reached any more; empty if it can. What else goes wrong, rank 0
        knows and tells.
    """
    data = b""
    try:
        data = read(path)
        offer = Offer(len(data), hashlib.sha256(data).hexdigest())
        if carrier.problem:
            offer = Offer(0, "", carrier.problem)
    except OSError as error:
        offer = Offer(0, "", f"{path.name} cannot be read: {error.strerror or error}")
    try:
        carrier.publish(f"part/{carrier.rank}", offer)
        # Rank 0 may wait for another rank that is gone, and then still says so.
        if not offer.problem and carrier.learn(
            f"part/{carrier.rank}/go", bool, HEARTBEAT, patience_s=PATIENCE_S
        ):
            for begin in range(0, len(data), CHUNK_BYTES):
                carrier.send(data[begin : begin + CHUNK_BYTES])
    except _LOST as error:
        return _reason(error)
    return ""


def collect(
    carrier: Carrier,
    senders: Sequence[int],
    take: Callable[[int, int, str], Taker],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, str]:
    """Takes the files of other ranks on rank 0, one after the other.

    Waiting ends when nothing has come for the timeout. After a lost connection or a disk
    that takes no more the rest is left where it is, and the ranks are told so.

    Args:
        carrier: Rank 0's carrier.
        senders: The ranks to collect from; each calls :func:`hand_over`.
        take: Given rank, size in bytes and SHA-256, returns what takes that rank's file.
        tell: Told the bytes that have come, and all that are to come.

    Returns:
        The ranks whose files did not come, each with the reason; empty if all did.
    """
    failed: dict[int, str] = {}
    kept: set[int] = set()
    asked: set[int] = set()

    def leave_the_rest(reason: str) -> None:
        for rank in senders:
            if rank not in kept:
                failed.setdefault(rank, reason)

    try:
        offers = {}
        for rank in senders:
            carrier.beat(HEARTBEAT)
            offers[rank] = carrier.learn(f"part/{rank}", Offer)
        done, total = 0, sum(offer.size for offer in offers.values())
        for rank, offer in offers.items():
            if offer.problem:
                failed[rank] = offer.problem
                continue
            if carrier.problem:
                leave_the_rest(carrier.problem)
                break
            error: Exception | None = None
            try:
                taker = take(rank, offer.size, offer.sha256)
            except (DdpProfilerError, OSError) as refusal:
                leave_the_rest(_reason(refusal))
                break
            asked.add(rank)
            carrier.publish(f"part/{rank}/go", True)
            try:
                for begin in range(0, offer.size, CHUNK_BYTES):
                    size = min(CHUNK_BYTES, offer.size - begin)
                    data = carrier.receive(size, rank)
                    carrier.beat(HEARTBEAT)
                    done += size
                    tell(done, total)
                    # After an error the rest still comes: the sender knows nothing of it.
                    error = error or _attempt(taker.write, data)
                error = error or _attempt(taker.finish)
            finally:
                taker.discard()
            if error is None:
                kept.add(rank)
                continue
            failed[rank] = _reason(error)
            if isinstance(error, OSError):  # A disk that refuses one file refuses the next.
                leave_the_rest(_reason(error))
                break
    except _LOST as error:
        leave_the_rest(f"the connection was lost: {_reason(error)}")
    for rank in senders:
        if rank not in asked:
            with contextlib.suppress(*_LOST):
                carrier.publish(f"part/{rank}/go", False)
    return failed


def _attempt(action: Callable[..., None], *arguments: object) -> Exception | None:
    """Runs something of a taker; returns what went wrong, if anything did."""
    try:
        action(*arguments)
    except (DdpProfilerError, OSError) as error:
        return error
    return None


def _reason(error: Exception) -> str:
    """Returns one line without a full stop."""
    if isinstance(error, FileExistsError):
        return f"{error.filename} is in the way; remove it"
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'} cannot be written: {error.strerror or error}"
    text = error.message if isinstance(error, DdpProfilerError) else str(error)
    return text.splitlines()[0].removesuffix(".") if text else type(error).__name__

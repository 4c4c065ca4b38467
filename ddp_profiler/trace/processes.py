"""Work on files in several processes, which an interrupt or a death of one never leaves waiting."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from ddp_profiler.errors import InputError

_TOLD_EVERY_S = 0.2

Item = TypeVar("Item")
Result = TypeVar("Result")

Work = Callable[[Item, Callable[[int], None]], Result]
"""Takes an item and a function that is told how much of it is done."""


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    place: int


def map_in_processes(
    work: Work[Item, Result],
    items: Sequence[Item],
    processes: int,
    tell: Callable[[int, int], None],
) -> list[Result]:
    """Calls a function for each item, in processes that are started anew.

    Each process has a pipe of its own, without threads and locks that are shared: whichever ends
    in the middle of what it does, and wherever Ctrl-C comes, nobody waits for what never comes.

    Args:
        work: Can be pickled, and so can its items and results. It raises nothing.
        items: What to work on, in the order in which to begin.
        processes: Most processes at once, at least 1.
        tell: Called with an item's place and how much of it is done, from time to time.

    Returns:
        The results, in the order of the items.

    Raises:
        InputError: A process ended before its work was done.
    """
    results: dict[int, Result] = {}
    waiting = iter(range(len(items)))
    workers: list[_Worker] = []
    # Starting it unblocks signals, so it has to be there before processes are started.
    resource_tracker.ensure_running()
    try:
        for place in _first(waiting, processes):
            with _interrupts_held():
                workers.append(_start(work, place))
            _give(workers[-1], items[place])
        while workers:
            connections = {worker.connection: worker for worker in workers}
            for ready in wait(list(connections)):
                assert isinstance(ready, Connection)
                worker = connections[ready]
                message = _receive(worker)
                if not isinstance(message, _Done):
                    tell(worker.place, message)
                    continue
                results[worker.place] = message.result
                following = next(waiting, None)
                if following is None:
                    # It ends when its pipe does.
                    worker.connection.close()
                    worker.process.join()
                    workers.remove(worker)
                else:
                    worker.place = following
                    _give(worker, items[following])
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.connection.close()
    return [results[place] for place in range(len(items))]


def _first(places: Iterator[int], number: int) -> Iterator[int]:
    for _, place in zip(range(number), places, strict=False):
        yield place


def _start(work: Work[Any, Any], place: int) -> _Worker:
    # Not forked: this process may have threads.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    # With the only other end in the process, its death ends the pipe.
    theirs.close()
    return _Worker(process, ours, place)


def _give(worker: _Worker, item: Any) -> None:
    try:
        worker.connection.send(item)
    except OSError as error:
        raise _ended(worker) from error


def _receive(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _ended(worker) from error


def _ended(worker: _Worker) -> InputError:
    worker.process.join()
    code = worker.process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
    return InputError(
        f"A process that read traces ended before it was done ({how}): it was killed, perhaps "
        "because memory ran out, or could not start.",
        "Read one at a time, with --jobs 1.",
    )


def _serve(work: Work[Any, Any], connection: Connection) -> None:
    """The life of a process: takes items until its pipe ends."""
    # Ctrl-C goes to all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = 0.0

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _TOLD_EVERY_S:
            last = now
            connection.send(done)

    try:
        while True:
            connection.send(_Done(work(connection.recv(), tell)))
    except (EOFError, OSError):
        # The first one is done, or is no more.
        return


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keeps Ctrl-C back while a process starts.

    Blocked, so that the new process inherits that and shows no trace; and noted, since a signal
    that another thread takes would still be raised here, with the process started and unknown.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    blocked = None
    if hasattr(signal, "pthread_sigmask"):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)

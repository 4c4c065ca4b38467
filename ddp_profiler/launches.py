"""Launches a training script once for each dp, one after the other, each with ports of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from ddp_profiler.errors import InputError, UsageError

_END_S = 7.0
"""How long ranks may take to end by themselves, before they are killed."""
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?[A-Za-z_][\w.]*(?:Error|Exception): ")


@dataclass(frozen=True)
class Launch:
    """One launch of a script.

    Attributes:
        dp: Number of ranks.
        folder: Its run folder.
        log: What it prints.
        command: What is run.
    """

    dp: int
    folder: Path
    log: Path
    command: tuple[str, ...]


def plan_launches(
    dps: Sequence[int],
    out: Path,
    script: Sequence[str],
    options: Sequence[str],
    keep_global_batch: str | None,
) -> tuple[Launch, ...]:
    """Plans a launch for each dp, from small to large.

    Args:
        dps: Data-parallel sizes.
        out: Folder of the study; launches are kept below it.
        script: The script and its arguments, as for dp = 1.
        options: Options of the worker.
        keep_global_batch: The script's own argument for its batch on a rank or its
            accumulation: it is divided by dp, so that the global batch stays. None: it grows.

    Raises:
        UsageError: The script does not have that argument, or its value cannot be divided.
    """
    launches = []
    for dp in sorted(set(dps)):
        folder = out / "launches" / f"dp{dp}"
        command = (
            sys.executable,
            *("-m", "ddp_profiler.loopback", f"--nproc_per_node={dp}"),
            *("-m", "ddp_profiler.run", *options, "--out", str(folder)),
            *divided(script, keep_global_batch, dp),
        )
        launches.append(Launch(dp, folder, out / "launches" / f"dp{dp}.log", command))
    return tuple(launches)


def divided(script: Sequence[str], argument: str | None, dp: int) -> tuple[str, ...]:
    """Returns a script's words with the value of one argument divided by dp.

    Of an argument that is given several times the last one counts, as for argparse.

    >>> divided(["train.py", "--batch-size", "64", "--lr=1"], "--batch-size", 4)
    ('train.py', '--batch-size', '16', '--lr=1')
    >>> divided(["train.py", "--accumulate=8"], "--accumulate", 2)
    ('train.py', '--accumulate=4')
    >>> divided(["train.py", "--bs", "7", "--bs=8"], "--bs", 2)
    ('train.py', '--bs', '7', '--bs=4')

    Raises:
        UsageError: There is no such argument, or its value is no multiple of dp.
    """
    words = list(script)
    if argument is None:
        return tuple(words)
    for place in range(len(words) - 1, 0, -1):
        name, equals, value = words[place].partition("=")
        if name != argument:
            continue
        at = place if equals else place + 1
        text = value if equals else words[at] if at < len(words) else ""
        if not text.isdecimal():
            raise UsageError(
                f"--keep-global-batch {argument}: its value {text!r} is not a whole number.",
                "Give it to the script as for dp = 1.",
            )
        if int(text) % dp:
            raise UsageError(
                f"--keep-global-batch {argument}: {text} cannot be divided by dp {dp}.",
                f"Choose a multiple of every dp, such as {-(-int(text) // dp) * dp}.",
            )
        share = str(int(text) // dp)
        words[at] = f"{name}={share}" if equals else share
        return tuple(words)
    raise UsageError(
        f"--keep-global-batch {argument}: the script is not given that argument.",
        f"Add it to the script's arguments with its value for dp = 1, such as {argument} 64.",
    )


def run_launch(launch: Launch, environ: Mapping[str, str]) -> None:
    """Runs a launch to its end; what it prints goes to its log.

    Raises:
        InputError: It ended with another code than 0; the log's last lines are in the message.
        KeyboardInterrupt: It was interrupted; its processes are gone then.
    """
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("wb") as log:
        process = subprocess.Popen(
            launch.command, stdout=log, stderr=subprocess.STDOUT, env=dict(environ)
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code:
        cause = _cause(launch.log.read_text(errors="replace").splitlines())
        raise InputError(
            f"The launch at dp {launch.dp} ended with {code}: {cause}",
            f"All that it printed is in {launch.log}.",
        )


def _cause(lines: Sequence[str]) -> str:
    """Returns the line of a log that says most: an exception, else our word, else the first."""
    for wanted in (_EXCEPTION.match, lambda line: line.startswith("ddp_profiler.run: ")):
        for line in lines:
            if wanted(line) and "ChildFailedError" not in line:
                return line.strip()
    return lines[0].strip() if lines else "no output"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launch: torchrun passes the signal on to its ranks, which it waits for 30 s."""
    there: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        there = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in there:
        with contextlib.suppress(psutil.Error):
            # Does nothing to another process that was given the same number.
            rank.kill()


class Told(SystemExit):
    """This process was told to end by a signal."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end what is inside as Ctrl-C does: in order, with all it started.

    Raises:
        Told: Such a signal came; its code is 128 and the signal's number.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise Told(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(largest_dp: int, tell: Callable[[str], None]) -> dict[str, str]:
    """Returns the environment of all launches: the same threads a rank at every dp.

    torchrun gives each rank one thread where there are several, and all cores where there is
    one: without this, dp = 1 would have more to compute with than the rest.
    """
    environ = dict(os.environ)
    if "OMP_NUM_THREADS" not in environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = max(1, cores // largest_dp)
        environ["OMP_NUM_THREADS"] = str(threads)
        tell(f"{threads} thread{'s' if threads > 1 else ''} a rank (OMP_NUM_THREADS chooses)")
    if sys.platform == "linux":
        # One machine: nobody else need reach the ranks.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ.setdefault(name, "lo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    return environ

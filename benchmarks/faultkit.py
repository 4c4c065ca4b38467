"""Runs a launch in which something is planted to go wrong, and judges how it ended.

What the product promises of a lost run is checked from outside: by its exit code, its words, its
files and what is left of it. The files are also read by a few lines of our own, which know only
how an Arrow stream is framed, so that what the product's reader leaves out would be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from benchkit import ROOT

STEP = 0
"""Number of the spans that are whole steps; checked by a test against the schema."""
_MARK = "DDP_PROFILER_FAULT_ID"
_CONTINUED = b"\xff\xff\xff\xff"
_GONE_S = 2.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Ended:
    """How a launch ended.

    Attributes:
        code: Exit code of the launcher; None where it had to be killed.
        seconds: From its start to its end.
        out: What it printed.
        err: What it printed on stderr.
        folder: Its run folder.
        left: What was left behind: processes, shared memory, files.
        after_s: From the fault, where somebody says when it was, to the end.
    """

    code: int | None
    seconds: float
    out: str
    err: str
    folder: Path
    left: list[str] = field(default_factory=list)
    after_s: float | None = None

    @property
    def ours(self) -> str:
        """What we printed on stderr, without the launcher's own words."""
        lines = self.err.splitlines()
        taken: list[str] = []
        inside = False
        for line in lines:
            if line.startswith(("ddp_profiler.run: ", "ddp-profiler: ")):
                inside = True
            elif re.match(r"[EWI]\d{4} |Traceback|=====|\[rank\d+\]", line):
                inside = False
            if inside:
                taken.append(line)
        return "\n".join(taken)


def launch(
    words: Sequence[str | Path],
    folder: Path,
    *,
    limit_s: float,
    ranks: int = 2,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    act: Callable[[subprocess.Popen[bytes], Path], float | None] | None = None,
    command: Sequence[str | Path] | None = None,
    within: Path | None = None,
) -> Ended:
    """Starts ranks with torchrun and waits for their end.

    Args:
        words: What each rank runs.
        folder: The run folder that the words name.
        limit_s: After so many seconds all that is left of it is killed.
        ranks: How many.
        options: Of torchrun.
        env: More environment variables.
        cwd: Where to start it.
        act: Does something to the launch from outside; returns when (monotonic s), if it did.
        command: What to start instead of torchrun.
        within: Folder of a cgroup that the launch runs in.
    """
    mark = uuid.uuid4().hex
    before = _shared_memory()
    with tempfile.TemporaryDirectory() as temporary:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", _MARK: mark}
        environ |= {"TMPDIR": temporary, "OMP_NUM_THREADS": "1", **(env or {})}
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
        start += [f"--nproc_per_node={ranks}", *map(str, words)]

        def prepare() -> None:
            # As at a terminal, whatever started us: SIGINT is heard.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if within is not None:
                (within / "cgroup.procs").write_text(str(os.getpid()))

        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            begin = time.monotonic()
            process = subprocess.Popen(
                start if command is None else [*map(str, command)],
                env=environ,
                cwd=cwd or ROOT,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,
                start_new_session=True,
            )
            at = act(process, folder) if act is not None else None
            try:
                code: int | None = process.wait(max(1.0, limit_s - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                code = None
            end = time.monotonic()
            left = _left(mark, None if code is None else end + _GONE_S)
            for stream in (out, err):
                stream.seek(0)
            ended = Ended(
                code,
                end - begin,
                out.read().decode(errors="replace"),
                err.read().decode(errors="replace"),
                folder,
                left,
                None if at is None else end - at,
            )
        ended.left += [f"temporary file {name}" for name in _temporary(Path(temporary))]
    ended.left += [f"shared memory {name}" for name in sorted(_shared_memory() - before)]
    if folder.is_dir():
        ended.left += [f"file {p.name}" for p in folder.iterdir() if p.name.startswith(".")]
    return ended


@contextlib.contextmanager
def memory_limited_to(nbytes: int) -> Iterator[Path | None]:
    """Makes a memory cgroup for the length of a block; yields None where this one may not.

    Args:
        nbytes: Its limit, in bytes.
    """
    from ddp_profiler.measure.cgroups import own_groups
    from ddp_profiler.measure.out_of_memory import LIMITS

    folder = None
    for around, version in own_groups("memory"):
        there = around / f"ddp-profiler-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            there.mkdir()
            try:
                (there / LIMITS[version]).write_text(str(nbytes))
            except OSError:
                there.rmdir()
                continue
            folder = there
            break
    try:
        yield folder
    finally:
        if folder is not None:
            folder.rmdir()


def processes(mark: str) -> list[psutil.Process]:
    """Returns the processes that carry a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _left(mark: str, patience_until: float | None) -> list[str]:
    """Returns the processes of a launch that are still there, and what they listen on; ends them.

    Args:
        mark: Of the launch.
        patience_until: Until when they may go by themselves; None: what is there now counts.
    """
    while there := processes(mark):
        if patience_until is None or time.monotonic() > patience_until:
            break
        time.sleep(0.05)
    left = []
    for process in there:
        with contextlib.suppress(psutil.Error, OSError):
            ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            rank = process.environ().get("RANK", "none")
            left.append(f"process {process.name()} of rank {rank} with ports {ports}")
        with contextlib.suppress(psutil.Error, OSError):
            process.kill()
    return left


def _shared_memory() -> set[str]:
    """Returns names in shared memory as torch, multiprocessing and gloo choose them."""
    try:
        names = {path.name for path in SHARED_MEMORY.iterdir()}
    except OSError:
        return set()
    return {name for name in names if name.startswith(("torch_", "psm_", "sem.", "gloo", "nccl"))}


def _temporary(folder: Path) -> list[str]:
    """Returns what was left in the temporary folder, but for the launcher's own empty logs."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).parts[0].startswith("torchelastic_")
    ]


# -- reading without the product's reader ------------------------------------------------------


def steps_on_disk(path: Path) -> int:
    """Counts the steps in the whole record batches of a stream, which may be cut anywhere."""
    data = path.read_bytes()
    at, steps = 0, 0
    schema: pa.Schema | None = None
    while at + 8 <= len(data) and data[at : at + 4] == _CONTINUED:
        (length,) = struct.unpack_from("<i", data, at + 4)
        if length == 0:
            break
        end = at + 8 + length
        if end > len(data):
            break
        body = _body_length(data[at + 8 : end])
        if end + body > len(data):
            break
        message = pa.ipc.read_message(data[at : end + body])
        at = end + body
        if schema is None:
            schema = pa.ipc.read_schema(message)
            continue
        batch = pa.ipc.read_record_batch(message, schema)
        steps += sum(kind == STEP for kind in batch.column("kind").to_pylist())
    return steps


def _body_length(metadata: bytes) -> int:
    """Returns ``bodyLength`` of a flatbuffer ``Message``, its fourth field."""
    (table,) = struct.unpack_from("<I", metadata, 0)
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    place = 4 + 2 * 3
    if place >= size:  # Left out, as a value of 0 is.
        return 0
    (offset,) = struct.unpack_from("<H", metadata, table - back + place)
    if offset == 0:
        return 0
    (length,) = struct.unpack_from("<q", metadata, table + offset)
    return int(length)


@dataclass(frozen=True)
class Kept:
    """What a lost run left.

    Attributes:
        info: ``run.json``.
        on_disk: Steps in whole batches, by our own count.
        readable: The same by the product's reader.
        code: Exit code of ``analyze``.
        partial: Whether ``analyze`` marks the run as partial.
        shown_steps: Whether ``analyze`` shows figures.
        text: What ``analyze`` said.
    """

    info: Mapping[str, Any]
    on_disk: int
    readable: int
    code: int
    partial: bool
    shown_steps: bool
    text: str


def kept(folder: Path) -> Kept:
    """Reads what a run left, by our own reader and by the product's command."""
    from ddp_profiler.errors import InputError
    from ddp_profiler.record import paths
    from ddp_profiler.record.reader import read_rank

    files = paths.rank_files(folder)
    on_disk = sum(steps_on_disk(path) for path in files.values())
    readable = 0
    for rank, path in files.items():
        try:
            readable += int((read_rank(folder, rank).columns["kind"] == STEP).sum())
        except InputError:
            # A record that was claimed and never begun holds nothing that could be lost.
            if path.stat().st_size:
                raise
    shown = subprocess.run(
        [sys.executable, "-m", "ddp_profiler.cli", "analyze", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    try:
        info = json.loads(paths.run_file(folder).read_text())
    except (OSError, ValueError):
        info = {}
    return Kept(
        info,
        on_disk,
        readable,
        shown.returncode,
        "PARTIAL" in shown.stdout,
        "step" in shown.stdout,
        shown.stdout + shown.stderr,
    )

"""The disk is full, read-only or gone, or the folder is another run's: the loss is stated once."""

import contextlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.keeper import RunKeeper
from ddp_profiler.record import paths
from tests.integration.conftest import environment, run_command, unaborted
from tests.unit.test_record import run_info

SCRIPT = Path(__file__).parent / "scripts" / "on_a_disk.py"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root"
)


@contextlib.contextmanager
def small_disk(where, size, *options):
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", where],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def alone(port):
    return {**ALONE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(*argv, port):
    return subprocess.Popen(
        [sys.executable, *map(str, argv)], env=environment(alone(port)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def free_ports(count):
    import socket

    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def observed(what, folder, port):
    worker = ("-m", "ddp_profiler.run", "--warmup", "4", "--steps", "4", "--out", folder)
    return start(*worker, SCRIPT, what, folder, port=port)


@needs_mount
@pytest.mark.distributed
def test_training_goes_on_when_the_disk_is_full_or_gone(tmp_path):
    ports = iter(free_ports(8))
    plain = unaborted(
        lambda: run_command([SCRIPT, "nothing", tmp_path], env=alone(next(ports)), timeout=120)
    )
    with contextlib.ExitStack() as disks:
        full, gone, small = (
            disks.enter_context(small_disk(tmp_path / name, size))
            for name, size in (("full", "64k"), ("gone", "1m"), ("small", "24k"))
        )
        # The study's disk fills up by itself; the scripts' is filled by the script.
        running = {
            "full": observed("full", full / "run", next(ports)),
            "gone": observed("gone", gone / "run", next(ports)),
            # A study, whose record does not fit: that is what it is run for.
            "study": start(
                *("-m", "ddp_profiler.run", "--model", "timed", "--steps", 4, "--warmup", 2),
                *("--allreduce-max-mb", 1, "--out", small / "study"),
                port=next(ports),
            ),
        }
        ended = {
            name: (*one.communicate(timeout=120), one.returncode) for name, one in running.items()
        }
    digest = plain.out
    assert re.fullmatch(r"[0-9a-f]{64}\n", digest)
    assert plain.code == 7
    for name in ("full", "gone"):
        out, err, code = ended[name]
        assert (out, code) == (digest, 7), name
        assert "Traceback" not in err
        said = [line for line in err.splitlines() if "observing rank 0 has failed" in line]
        assert len(said) == 1, err
        assert "training goes on" in said[0]
        assert ("No space left" if name == "full" else "No such file") in said[0]
    out, err, code = ended["study"]
    assert code == 3, err
    assert "Traceback" not in err
    assert err.count("No space left on device") == 1, err
    assert "the run folder takes no more" in err
    assert "Make room" in err


@needs_mount
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    with small_disk(tmp_path / "ro", "64k", "ro") as disk:
        with pytest.raises(UsageError, match="cannot be used: Read-only file system"):
            paths.claim_folder(disk / "run")
        with pytest.raises(UsageError, match="cannot be used: Read-only"):
            paths.claim_default_folder("a", datetime(2026, 1, 1), disk)


@needs_mount
def test_a_disk_that_is_full_at_the_start_is_refused_and_nothing_is_left(tmp_path):
    info = run_info()
    with small_disk(tmp_path / "disk", "16k") as disk:
        (disk / "filler").write_bytes(b"x" * 16384)
        (disk / "run").mkdir()
        for claim in (
            lambda keeper: keeper.claim(disk / "run", info),
            lambda keeper: keeper.claim_default("a", datetime(2026, 1, 1), info, disk),
        ):
            with pytest.raises(UsageError, match="cannot be used: No space left on device"):
                claim(RunKeeper(0))
        assert not list(disk.glob("**/run.json"))


def test_runs_that_start_in_the_same_second_share_nothing(tmp_path):
    now = datetime(2026, 1, 1)
    with ThreadPoolExecutor(16) as pool:
        claims = [pool.submit(paths.claim_default_folder, "a", now, tmp_path) for _ in range(32)]
    folders = {claim.result() for claim in claims}
    assert len(folders) == 32
    assert all(paths.run_file(folder).is_file() for folder in folders)


def test_a_folder_that_is_taken_is_left_as_it_is(tmp_path):
    paths.claim_folder(tmp_path / "run")
    paths.run_file(tmp_path / "run").write_text("of another run")
    with pytest.raises(UsageError, match="already holds a run"):
        paths.claim_folder(tmp_path / "run")
    assert paths.run_file(tmp_path / "run").read_text() == "of another run"

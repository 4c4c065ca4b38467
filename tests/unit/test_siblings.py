"""Ends of other processes of the same launcher, real ones, and what is planted for tests."""

import dataclasses
import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.measure import planted_fate
from ddp_profiler.measure.planted_fate import Fates
from ddp_profiler.measure.siblings import SiblingEnd, Siblings
from ddp_profiler.workload.plant import PlantedFate, parse_plants

LAUNCH = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "3"}
ENDS = {
    1: "import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)",
    2: "import sys; input(); sys.exit(7)",
    5: "input()",  # Of another launch.
}


def until(condition, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_ends_of_others_are_told_with_their_signals():
    ends = queue.Queue()
    children = {
        rank: subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            env={
                **os.environ,
                **LAUNCH,
                "RANK": str(rank),
                "MASTER_PORT": "2" if rank == 5 else "1",
            },
        )
        for rank, code in ENDS.items()
    }
    watch = Siblings(0, 2, {**LAUNCH, "RANK": "0"})
    watch._parent = os.getpid()  # As if this process were the launcher and its own child.
    watch.listen(ends.put)
    watch.begin()
    try:
        until(lambda: len(watch._pids) == 2)
        assert set(watch._pids) == {1, 2}
        children[1].send_signal(signal.SIGSTOP)
        until(watch.stopped)
        assert watch.stopped() == {1: children[1].pid}
        watch.resume_stopped()
        # In turns: a process that is waited for has nothing left to be read in /proc.
        for rank, code, name in ((1, -9, "SIGKILL"), (2, 7, "")):
            children[rank].stdin.write(b"\n")
            children[rank].stdin.flush()
            end = ends.get(timeout=60)
            assert (end.rank, end.code, end.signal) == (rank, code, name)
        assert watch.ended().code in (-9, 7)
    finally:
        watch.stop()
        for child in children.values():
            child.kill()
            child.wait()
    watch.join(timeout=30)
    assert not watch.is_alive()


def test_words():
    assert SiblingEnd(1, 9, -15).words == "was killed by SIGTERM (process 9)"
    assert SiblingEnd(1, 9, 3).words == "ended with exit code 3 (process 9)"
    assert SiblingEnd(1, 9, None).words.startswith("has died (process 9")


def test_planted_fate():
    (fate,) = parse_plants(["fate=raise,rank=1,phase=warmup,after_ms=2.5"])
    assert fate == PlantedFate("raise", 1, "warmup", 2.5)
    for wrong in ("fate=BITE,rank=1,phase=x", "fate=KILL,phase=x", "fate=KILL,rank=1"):
        with pytest.raises(UsageError, match="fate="):
            parse_plants([wrong])


def test_a_fate_comes_once_on_its_rank_in_its_phase_and_attempt():
    planted = [PlantedFate("raise", 1, "warmup")]
    before = signal.getsignal(signal.SIGUSR1)
    try:
        Fates(planted, 0).phase_begins("level dp2, warmup block 0")
        Fates(planted, 1, {"TORCHELASTIC_RESTART_COUNT": "1"}).phase_begins("warmup")
        fates = Fates(planted, 1, {})
        fates.phase_begins("building the model")
        with pytest.raises(ValueError, match="planted exception"):
            fates.phase_begins("level dp2, warmup block 0")
        fates.phase_begins("level dp2, warmup block 0")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fate_notes_the_phase_it_comes_in(tmp_path):
    (fate,) = parse_plants([f"fate=KILL,rank=0,phase=warmup,note={tmp_path / 'note'}"])
    fates = Fates([dataclasses.replace(fate, fate="raise")], 0, {})
    before = signal.getsignal(signal.SIGUSR1)
    try:
        fates.phase_begins("start-up")
        assert not (tmp_path / "note").exists()
        with pytest.raises(ValueError, match="planted exception"):
            fates.phase_begins("level dp2, warmup block 0")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "note").read_text() == "level dp2, warmup block 0"


@pytest.mark.parametrize("limit", [None, 1 << 60])
def test_memory_is_not_filled_without_a_limit(monkeypatch, limit):
    monkeypatch.setattr(planted_fate, "limit_bytes", lambda: limit)
    with pytest.raises(UsageError, match="nothing limits it"):
        Fates([PlantedFate("fill", 0, "warmup")], 0, {})
    Fates([PlantedFate("fill", 0, "warmup")], 1, {})

"""Ctrl-C and SIGTERM, restarts by torchrun, and scripts: what was measured is kept and shown."""

import shutil
import signal
import sys
import time

import pytest

from tests.faults.conftest import (
    LIMIT_S,
    check_end,
    check_kept,
    faultkit,
    study,
)

pytestmark = pytest.mark.distributed

GONE_S = 10


def when_it_measures(number, record):
    """Sends a signal to the launch once a rank has recorded something."""

    def act(process, _folder):
        deadline = time.monotonic() + LIMIT_S / 2
        while time.monotonic() < deadline and process.poll() is None:
            if record.exists() and record.stat().st_size > 8000:
                process.send_signal(number)
                return time.monotonic()
            time.sleep(0.02)
        raise AssertionError("it did not come to measure")

    return act


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_told_to_end(tmp_path, number):
    folder = tmp_path / "run"
    act = when_it_measures(number, folder / "rank-00001.arrows")
    ended = study(folder, "--steps", "300", act=act)
    check_end(ended)
    assert ended.after_s < GONE_S
    assert f"was told to end ({number.name}) in level dp2, " in ended.ours
    assert ended.ours.count("was told to end") == 1
    # What there is is shown at once, and again later.
    assert "PARTIAL" in ended.out
    assert f"what was measured is kept: ddp-profiler analyze {folder}" in ended.ours
    check_kept(faultkit.kept(folder))


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
# Torch itself mixes attempts: its keys of the first one are still in the launcher's store.
store = dist.TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", store=dist.PrefixStore(attempt, store), rank=rank, world_size=world_size
)
model = DDP(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
for step in range(int(sys.argv[1])):
    if step == 12 and "kill" in sys.argv and first and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.005)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_study_of_launches_is_told_to_end(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "study"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ddp_profiler.cli", "study", "--dp", "2", "--steps", "1000"]
    record = folder / "launches" / "dp2" / "rank-00001.arrows"
    ended = faultkit.launch(
        [],
        folder,
        limit_s=LIMIT_S,
        command=[*command, "--out", folder, "--", script, "100000"],
        act=when_it_measures(signal.SIGTERM, record),
    )
    check_end(ended)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.after_s < GONE_S
    kept = folder / "launches" / "dp2"
    assert f"recorded is kept: ddp-profiler analyze {kept}" in ended.ours
    check_kept(faultkit.kept(kept))


def test_a_scripts_rank_is_killed_and_torchrun_starts_again(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    ours = ("-m", "ddp_profiler.run", "--steps", "10", "--warmup", "4", "--out", folder)
    first, second = folder, tmp_path / "run-attempt2"
    # Torchrun ends the other rank within a tenth of a second. On a busy machine that may not get
    # to a word in so little (seen once); not three times.
    for _ in range(3):
        ended = faultkit.launch(
            [*ours, script, "60", "kill"], folder, limit_s=LIMIT_S, options=["--max-restarts=1"]
        )
        assert ended.code == 0, ended.err[-3000:]
        assert ended.left == []
        if "rank 1 " in ended.ours:
            break
        for attempt in (first, second):
            shutil.rmtree(attempt)
    assert "rank 1 " in ended.ours
    assert "was killed by SIGKILL" in ended.ours
    assert f"kept: ddp-profiler analyze {first}" in ended.ours
    one, two = faultkit.kept(first), faultkit.kept(second)
    check_kept(one)
    check_kept(two, partial=False)
    assert one.info["status"] == "failed"
    assert [(f["rank"], f["signal"]) for f in one.info["failures"]] == [(1, "SIGKILL")]
    assert (two.info["status"], two.info["failures"]) == ("complete", [])
    assert one.info["run_id"] != two.info["run_id"]
    # 12 steps and what the other rank was in; then all that were asked for.
    assert one.on_disk < two.on_disk == 2 * (4 + 2 * 10)
    shutil.rmtree(second)


def test_a_study_is_started_again_by_torchrun(tmp_path):
    folder = tmp_path / "run"
    ended = study(folder, "--plant", "fate=KILL,rank=0,phase=warmup", options=["--max-restarts=1"])
    assert ended.code == 0, ended.err[-3000:]
    assert ended.left == []
    one, two = faultkit.kept(folder), faultkit.kept(tmp_path / "run-attempt2")
    check_kept(one)
    check_kept(two, partial=False)
    assert (one.info["status"], two.info["status"]) == ("failed", "complete")
    assert [f["rank"] for f in one.info["failures"]] == [0]
    assert two.info["failures"] == []

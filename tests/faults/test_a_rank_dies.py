"""A rank dies in each phase: the run ends, says who, of what and where, and keeps what it had."""

import re

import pytest

from tests.faults.conftest import check_end, check_kept, faultkit, study

pytestmark = pytest.mark.distributed

KILLED = "was killed by SIGKILL (process "
CASES = {
    "start-up": ("KILL", 1, "start-up", KILLED, ["start-up"]),
    "warm-up": ("raise", 1, "warmup", "ValueError: planted exception", ["warmup"]),
    "baseline": ("memory", 0, "no_sync", "can't allocate memory", ["no_sync"]),
    "measured": ("KILL", 1, "instrumented", KILLED, ["instrumented"]),
    "AllReduce": ("TERM", 1, "allreduce", "was told to end (SIGTERM)", ["AllReduce"]),
    # The next phase may have begun where it is read.
    "gathering": ("KILL", 0, "collecting", KILLED, ["collecting", "closing"]),
    "writing": ("KILL", 0, "writing", KILLED, ["writing"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_dies(tmp_path, name):
    fate, rank, phase, cause, phases = CASES[name]
    folder = tmp_path / "run"
    ended = study(folder, "--plant", f"fate={fate},rank={rank},phase={phase}")
    check_end(ended)
    told = [line for line in ended.ours.splitlines() if cause in line]
    assert len(told) == 1, ended.err
    assert told[0].startswith(f"ddp_profiler.run: rank {rank} "), told
    assert any(text in told[0] for text in phases), told
    if name == "start-up":
        # Nothing was recorded: the folder is given back, or says so.
        assert not list(folder.glob("rank-*"))
        return
    kept = faultkit.kept(folder)
    measured = name in ("gathering", "writing")
    check_kept(kept, partial=not (measured and kept.info["status"] == "complete"))
    if name != "writing":
        first = kept.info["failures"][0]
        assert first["rank"] == rank
        assert cause in first["message"]
        assert any(text in first["phase"] for text in phases)
        assert "alive" in ended.ours  # The other one, in the table of all ranks.
        assert f"Rank {rank} failed in" in kept.text
    if name in ("measured", "AllReduce", "gathering", "writing"):
        # Warm-up and at least a block were whole before.
        assert kept.on_disk > 2 * 3


def test_the_kernel_ends_a_rank_for_lack_of_memory(tmp_path):
    folder, note = tmp_path / "run", tmp_path / "note"
    with faultkit.memory_limited_to(2 << 30) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here: it takes root and a delegated cgroup")
        spec = f"fate=fill,rank=1,phase=instrumented,note={note}"
        # A busy machine may take longer to hand out 2 GB than the other rank waits by default here.
        ended = study(folder, "--plant", spec, "--timeout", "60", within=group)
    check_end(ended)
    assert note.read_text() == "level dp2, instrumented block 2"
    killed = (
        r"^ddp_profiler\.run: rank 1 on \S+ was killed by SIGKILL \(process \d+\), out of memory: "
        r"the kernel has just enforced the limit of 2\.1 GB of its cgroup in level dp2, instr"
        r".*\nGive the job more memory"
    )
    assert re.search(killed, ended.ours, re.MULTILINE), ended.ours
    assert "mostly comes from" not in ended.ours
    kept = faultkit.kept(folder)
    check_kept(kept)
    assert "out of memory" in kept.info["failures"][0]["message"]

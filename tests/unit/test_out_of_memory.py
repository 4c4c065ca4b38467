"""What the kernel counts of kills for lack of memory, in files as both versions of cgroups have."""

import pytest

from ddp_profiler.measure.out_of_memory import MemoryKills, limit_bytes
from ddp_profiler.measure.siblings import SiblingEnd


def make(root, version, *, limit, killed, on_host=0, inner="job"):
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / inner
    folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    line = "4:memory:/" if version == 1 else "0::/"
    (root / "proc/self/cgroup").write_text(f"{line}{inner}\n")
    (root / "proc/vmstat").write_text(f"pgfault 7\noom_kill {on_host}\n")
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text(f"{limit or 2**63 - 4096}\n")
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}\n"
        (folder / "memory.oom_control").write_text(text)
    else:
        (folder / "memory.max").write_text(f"{limit or 'max'}\n")
        text = f"low 0\noom {killed}\noom_kill {killed}\noom_group_kill 0\n"
        (folder / "memory.events").write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_cgroup_names_its_limit(tmp_path, version):
    make(tmp_path, version, limit=2 * 10**9, killed=3, on_host=3)
    kills = MemoryKills(tmp_path)
    assert kills.words() == ""
    make(tmp_path, version, limit=2 * 10**9, killed=4, on_host=4)
    assert "enforced the limit of 2.0 GB of its cgroup" in kills.words()


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_elsewhere_on_the_host(tmp_path, version):
    make(tmp_path, version, limit=None, killed=0, on_host=5)
    assert limit_bytes(tmp_path) is None
    kills = MemoryKills(tmp_path)
    make(tmp_path, version, limit=None, killed=0, on_host=6)
    assert "ended a process of this host" in kills.words()


def test_limits_of_outer_cgroups_count(tmp_path):
    make(tmp_path, 2, limit=None, killed=0, inner="outer/job")
    (tmp_path / "sys/fs/cgroup/outer/memory.max").write_text("1000\n")
    assert limit_bytes(tmp_path) == 1000


def test_nothing_is_known_without_the_files(tmp_path):
    assert limit_bytes(tmp_path) is None
    assert MemoryKills(tmp_path).words() == ""


def test_words_of_an_end_carry_it():
    end = SiblingEnd(1, 9, -9, "out of memory: X")
    assert end.words == "was killed by SIGKILL (process 9), out of memory: X"

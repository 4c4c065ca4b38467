"""What the machine gives a rank, from trees of /proc and /sys made by hand."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_profiler.measure import machine
from ddp_profiler.measure.machine import MachineWatch, compact
from ddp_profiler.schema import GpuUse, MachineUse


class Clock:
    """Nanoseconds that move only when told to."""

    def __init__(self):
        self.ms = 0

    def __call__(self):
        return self.ms * 1_000_000


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """This process may use cores 1 and 2, whatever the machine has."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {1, 2}, raising=False)


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_stat(root, **ticks):
    """Each core by its fields user nice system idle iowait irq softirq steal guest guest_nice."""
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
    lines += [f"{name} {' '.join(map(str, values))}" for name, values in ticks.items()]
    write(root, "proc/stat", "\n".join([*lines, "intr 1 2 3", "cpu9 broken"]) + "\n")


def write_threads(root, **threads):
    for name, (ran, waited, times) in threads.items():
        write(root, f"proc/self/task/{name[1:]}/schedstat", f"{ran} {waited} {times}\n")


def watch(root, **keywords):
    return MachineWatch(3, 4, root=root, **keywords)


def test_time_and_cores(tmp_path):
    clock = Clock()
    watched = watch(tmp_path, clock=clock)
    for _ in range(2):
        watched.begin()
        clock.ms += 150
        watched.end()
        clock.ms += 1000  # between blocks
    use = watched.use()
    assert (use.rank, use.wall_ms, use.cores, use.affinity, use.threads) == (3, 300, 2, "1-2", 4)


def test_run_delay_is_that_of_all_threads(tmp_path):
    watched = watch(tmp_path)
    write_threads(tmp_path, t10=(0, 5_000_000, 1), t11=(0, 7_000_000, 1), t12=(0, 1_000_000, 1))
    watched.begin()
    write_threads(tmp_path, t10=(0, 25_000_000, 9), t11=(0, 8_000_000, 9))
    (tmp_path / "proc/self/task/12/schedstat").unlink()  # ended
    write_threads(tmp_path, t13=(0, 2_000_000, 1))  # began
    watched.end()
    assert watched.use().run_delay_ms == 20 + 1 + 2


def test_a_kernel_that_does_not_count_run_delay(tmp_path):
    write_threads(tmp_path, t10=(0, 0, 0), t11=(0, 0, 0))
    watched = watch(tmp_path)
    watched.begin()
    watched.end()
    assert watched.use().run_delay_ms is None


def test_steal_is_that_of_the_cores_it_may_use(tmp_path):
    zero = [0] * 10
    watched = watch(tmp_path)
    write_stat(tmp_path, cpu0=zero, cpu1=zero, cpu2=zero)
    watched.begin()
    # Guest time is part of user time; core 0 belongs to others.
    write_stat(
        tmp_path,
        cpu0=[0, 0, 0, 0, 0, 0, 0, 100, 0, 0],
        cpu1=[50, 0, 10, 20, 5, 0, 0, 15, 50, 0],
        cpu2=[0, 0, 0, 100, 0, 0, 0, 0, 0, 0],
    )
    watched.end()
    use = watched.use()
    assert use.steal_fraction == pytest.approx(15 / 200)
    assert use.busy_fraction == pytest.approx(60 / 200)


V2 = "nr_periods {}\nnr_throttled {}\nthrottled_usec {}\n"
V1 = "nr_periods {}\nnr_throttled {}\nthrottled_time {}\n"


@pytest.mark.parametrize(
    ("cgroup", "file", "form", "unit"),
    [
        ("0::/job/rank", "sys/fs/cgroup/job/rank/cpu.stat", V2, 1000),
        ("0::/job/rank", "sys/fs/cgroup/job/cpu.stat", V2, 1000),  # the limit is further up
        ("0::/not/seen/here", "sys/fs/cgroup/cpu.stat", V2, 1000),  # in a container
        ("0::/../outside", "sys/fs/cgroup/cpu.stat", V2, 1000),
        ("1:name=systemd:/\n4:cpu,cpuacct:/job", "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", V1, 1),
        ("2:cpuacct:/x\n1:cpu:/job", "sys/fs/cgroup/cpu/job/cpu.stat", V1, 1),
    ],
)
def test_throttling(tmp_path, cgroup, file, form, unit):
    write(tmp_path, "proc/self/cgroup", cgroup + "\n")
    write(tmp_path, "sys/fs/cgroup/usage/cpu.stat", "usage_usec 5\n")
    write(tmp_path, file, form.format(100, 10, 7 * 10**6 // unit))
    watched = watch(tmp_path)
    watched.begin()
    write(tmp_path, file, form.format(120, 15, 307 * 10**6 // unit))
    watched.end()
    use = watched.use()
    assert (use.throttled_ms, use.throttled_fraction) == (300, 0.25)


def test_the_tightest_limit_counts(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/job/rank\n")
    for folder in ("job", "job/rank"):
        write(tmp_path, f"sys/fs/cgroup/{folder}/cpu.stat", V2.format(0, 0, 0))
    watched = watch(tmp_path)
    watched.begin()
    write(tmp_path, "sys/fs/cgroup/job/cpu.stat", V2.format(10, 5, 200_000))
    write(tmp_path, "sys/fs/cgroup/job/rank/cpu.stat", V2.format(10, 1, 3_000))
    watched.end()
    assert (watched.use().throttled_ms, watched.use().throttled_fraction) == (200, 0.5)


def test_a_cgroup_without_limit(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 5\nuser_usec 3\n")
    watched = watch(tmp_path)
    watched.begin()
    watched.end()
    assert watched.use().throttled_ms is None


CPUINFO = "processor\t: 0\ncpu MHz\t\t: 900\n\nprocessor\t: 1\ncpu MHz\t\t: 1000.5\n\n"


def test_clock_of_the_cores_it_may_use(tmp_path):
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    for core, khz in enumerate((800_000, 2_000_000, 3_000_000)):
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{khz}\n")
    watched = watch(tmp_path)
    watched.begin()
    watched.end()
    assert watched.use().cpu_mhz == 2500


def test_clock_without_cpufreq(tmp_path):
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    watched = watch(tmp_path)
    for _ in range(2):
        watched.begin()
        watched.end()
    assert watched.use().cpu_mhz == 1000


def test_what_is_unreadable_in_one_block_is_unknown(tmp_path):
    """A sum over some of the blocks, over the time of all, would be a wrong rate."""
    write_threads(tmp_path, t10=(0, 0, 1))
    watched = watch(tmp_path)
    for waited in (10_000_000, None):
        watched.begin()
        if waited is None:
            (tmp_path / "proc/self/task/10/schedstat").write_text("?")
        else:
            write_threads(tmp_path, t10=(0, waited, 2))
        watched.end()
    assert watched.use().run_delay_ms is None
    assert watched.use().user_ms is not None


def test_nothing_there(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(machine.os, "sched_getaffinity", refuse)
    monkeypatch.setattr(machine.resource, "getrusage", refuse)
    watched = MachineWatch(0, None, root=tmp_path / "missing", clock=Clock())
    assert watched.use() == MachineUse(rank=0, wall_ms=0)
    watched.end()  # none was begun
    watched.begin()
    watched.end()
    assert watched.use() == MachineUse(rank=0, wall_ms=0)


def test_a_gpu_that_fails_costs_nothing(tmp_path):
    class Broken:
        def read(self):
            raise RuntimeError("lost")

        condense = read

    watched = watch(tmp_path, gpu=Broken())
    watched.begin()
    watched.end()
    assert watched.use().gpu is None


FILES = (
    "proc/stat",
    "proc/cpuinfo",
    "proc/self/cgroup",
    "proc/self/task/1/schedstat",
    "sys/fs/cgroup/cpu.stat",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq",
)
GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [b"cpu1 ", b"cpu2 -1", b" 1 2 3", b" 99999999999999999999", b"\n", b"0::/", b"nan",
             b"4:cpu:/\0", b"processor : 1", b"cpu MHz : ", b"nr_periods ", b"nr_throttled 5",
             b"throttled_usec 1e9", b"\xff", b"inf", b":", b"-"]
        ),
        max_size=12,
    ).map(b"".join),
)  # fmt: skip
TREE = st.fixed_dictionaries({}, optional=dict.fromkeys(FILES, GARBAGE))


@given(before=TREE, after=TREE)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_never_raises(before, after):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, content in before.items():
            write(root, name, "")
            (root / name).write_bytes(content)
        watched = watch(root)
        watched.begin()
        for name, content in after.items():
            write(root, name, "")
            (root / name).write_bytes(content)
        watched.end()
        use = watched.use()
    # It goes through the store and run.json, where NaN and infinity do not exist.
    assert msgspec.json.decode(msgspec.json.encode(use), type=MachineUse) == use
    for share in (use.steal_fraction, use.busy_fraction, use.throttled_fraction):
        assert share is None or share >= 0


def test_this_machine():
    """The real files: what this process computes itself must be found."""
    watched = MachineWatch(0, 1)
    watched.begin()
    total = sum(i * i for i in range(1_000_000))
    watched.end()
    use = watched.use()
    assert total > 0
    assert 0 < use.user_ms <= use.wall_ms * 1.2


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 6], "0-2,5-7"), ([1, 3], "1,3")]
)
def test_compact(numbers, text):
    assert compact(numbers) == text


def test_a_record_is_small():
    """1,000 ranks of a level must stay below a megabyte."""
    use = MachineUse(
        *(999, 123456.7, 123456.7, 12345.6, 12345.6, 123456, 1234, 0.1234, 0.9876, 12345.6),
        *(0.1234, 2600.0, 128, "0-63,128-191", 16),
        GpuUse(1980.0, 1980.0, {"power cap": 0.5}, 690.1, 700.0, 65, 5, 5, 16, 16),
    )
    assert len(msgspec.json.encode(use)) < 700

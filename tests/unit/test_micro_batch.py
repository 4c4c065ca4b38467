"""Finding the micro-batch: the search, agreement of ranks, memory, and what is made of it."""

import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_profiler.analysis.micro_batch import curve
from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import InputError, UsageError
from ddp_profiler.measure import memory
from ddp_profiler.measure.memory import Allowance
from ddp_profiler.measure.micro_batch import (
    Company,
    MeasuredTrials,
    find_micro_batch,
    is_slower,
    search,
)
from ddp_profiler.report import console
from ddp_profiler.report.micro_batch import micro_batch_lines, micro_batch_table
from ddp_profiler.schema import MicroBatchSearch, MicroBatchTrial, TrialOutcome

from .ranks_as_threads import at_once
from .test_console import make_level, make_summary

CPU = torch.device("cpu")
FITS, NO_MEMORY = TrialOutcome.FITS, TrialOutcome.OUT_OF_MEMORY
OVER, NOT_TRIED = TrialOutcome.OVER_LIMIT, TrialOutcome.NOT_TRIED


class Fake:
    """Trials of a model whose memory and time are known."""

    def __init__(self, need, per_sample_ns=lambda m: 10**6, hard=None, smallest=1, takes_s=0.0):
        self.need, self.per_sample_ns, self.hard = need, per_sample_ns, hard
        self.smallest, self.takes_s = smallest, takes_s
        self.elapsed_s = 0.0
        self.tried = []

    def begin(self):
        return self.smallest

    def measure(self, micro_batch):
        self.tried.append(micro_batch)
        self.elapsed_s += self.takes_s
        if self.hard is not None and self.need(micro_batch) > self.hard:
            return MicroBatchTrial(micro_batch, NO_MEMORY, None)
        step = micro_batch * self.per_sample_ns(micro_batch)
        return MicroBatchTrial(micro_batch, FITS, self.need(micro_batch), micro_step_ns=(step,) * 3)


def found_by(fake, nbytes, *, soft):
    trials, ended = search(fake, Allowance(nbytes, "", soft))
    return curve(MicroBatchSearch(1, ended, nbytes, "limit", "source", trials)), trials


@given(st.integers(1, 50), st.integers(0, 500), st.integers(50, 20_000), st.booleans())
def test_the_largest_that_fits_is_found(per_sample, fixed, limit, soft):
    def need(m):
        return fixed + per_sample * m

    fake = Fake(need, lambda m: 10, hard=None if soft else limit)
    result, _ = found_by(fake, limit, soft=soft)
    true = (limit - fixed) // per_sample
    if true < 1:
        assert result.largest_micro_batch is None
        return
    largest, unfit = result.largest_micro_batch, result.smallest_unfit_micro_batch
    assert largest <= true < unfit
    assert unfit - largest <= max(1, largest / 8)
    if soft and len(fake.tried) > 2:
        # Once there is a line, nothing that does not fit is tried: no process is killed for it.
        assert max(fake.tried[2:]) <= true


def test_a_limit_that_nothing_enforces_is_not_tried_beyond():
    result, trials = found_by(Fake(lambda m: 100 + 10 * m), 1000, soft=True)
    assert [(t.micro_batch, t.outcome) for t in trials[6:]] == [
        (64, FITS),
        (128, NOT_TRIED),
        (96, NOT_TRIED),
        (80, FITS),
        (88, FITS),
    ]
    assert trials[7].expected_bytes == 1380
    assert trials[7].peak_bytes is None
    assert result.bytes_per_sample == pytest.approx(10)
    assert result.fixed_bytes == pytest.approx(100)


def test_memory_that_jumps_ends_it_all_the_same():
    # No line tells it: beyond 8 it takes ten times as much.
    result, trials = found_by(Fake(lambda m: m if m <= 8 else 100 * m), 500, soft=True)
    assert OVER in [t.outcome for t in trials]
    assert (result.largest_micro_batch, result.smallest_unfit_micro_batch) == (8, 9)
    assert not any(t.micro_step_ns for t in trials if t.outcome is not FITS)


def test_it_ends_where_samples_get_slower():
    fake = Fake(lambda m: m, lambda m: 1000 * (1 + 4 / m) if m <= 32 else 2000)
    result, _ = found_by(fake, 10**9, soft=True)
    assert fake.tried == [1, 2, 4, 8, 16, 32, 64, 64]
    assert (result.ended, result.largest_micro_batch) == ("slower", 64)
    assert result.efficient_micro_batch == 32
    assert result.smallest_unfit_micro_batch is None


def trials_of(*speeds):
    return [
        MicroBatchTrial(2**k, FITS, 1, micro_step_ns=(int(2**k * 1e9 / speed),))
        for k, speed in enumerate(speeds)
    ]


def test_a_size_that_was_disturbed_is_measured_again():
    calls = []

    def disturbed(m):
        calls.append(m)
        return 5000 if m == 4 and calls.count(4) == 1 else 1000 + 1000 // m

    result, trials = found_by(Fake(lambda m: 100 * m, disturbed), 1700, soft=True)
    assert calls.count(4) == 2
    assert (result.ended, result.largest_micro_batch) == ("memory", 16)
    assert statistics.median(trials[2].micro_step_ns) == 4 * 1250


def test_one_size_that_is_a_little_slower_may_be_chance():
    assert not is_slower(trials_of(100.0))
    assert not is_slower(trials_of(100.0, 90.0))
    assert not is_slower(trials_of(50.0, 100.0, 90.0))
    assert not is_slower(trials_of(50.0, 100.0, 90.0, 101.0))
    assert is_slower(trials_of(50.0, 100.0, 90.0, 94.0))
    assert is_slower(trials_of(50.0, 100.0, 79.0))
    assert not is_slower(trials_of(50.0, 100.0, 97.0, 97.0, 97.0))


def test_it_ends_in_time():
    result, _ = found_by(Fake(lambda m: m, takes_s=25.0), 10**9, soft=True)
    assert (result.ended, result.largest_micro_batch) == ("time", 4)
    slow = Fake(lambda m: m, lambda m: 2 * 10**9)
    found_by(slow, 10**9, soft=True)
    # 2 s a micro-step of 1, 4 s of 2: one of 4, tried six times, would take more than is left.
    assert slow.tried == [1, 2, 4][: len(slow.tried)]
    assert len(slow.tried) < 4


def test_where_nothing_fits():
    result, trials = found_by(Fake(lambda m: 100 * m, hard=10), 10, soft=False)
    assert [t.micro_batch for t in trials] == [1]
    assert (result.largest_micro_batch, result.efficient_micro_batch) == (None, None)
    assert "not even the smallest fits in" in micro_batch_lines(result)[0]


def test_the_curve():
    trials = (
        MicroBatchTrial(1, FITS, 1100, None, (20_000_000, 10_000_000, 10_000_000)),
        MicroBatchTrial(4, FITS, 1400, None, (16_000_000,) * 3),
        MicroBatchTrial(2, FITS, 1200, None, (10_000_000,) * 3),
        MicroBatchTrial(8, FITS, 1800, None, (31_000_000,) * 3),
        MicroBatchTrial(16, NO_MEMORY, None),
    )
    found = curve(MicroBatchSearch(2, "memory", 2000, "limit", "source", trials))
    # All ranks of the level work at once.
    assert [p.samples_per_s for p in found.points] == [
        *(pytest.approx(200), pytest.approx(400), pytest.approx(500)),
        *(pytest.approx(2 * 8 / 0.031), None),
    ]
    assert found.efficient_micro_batch == 4
    assert found.largest_micro_batch == 8
    assert (found.bytes_per_sample, found.fixed_bytes) == (pytest.approx(100), pytest.approx(1000))
    assert found.micro_step_ms(6) == pytest.approx(23.5)
    assert found.micro_step_ms(9) is None
    assert curve(None) is None


def test_the_table_reads_well():
    result, _ = found_by(Fake(lambda m: 10**8 + 10**7 * m), 10**9, soft=True)
    table = micro_batch_table(result)
    assert next(column.header for column in table.columns) == "micro-batch at dp 1"
    assert table.row_count == len(result.points)
    first, second, third = micro_batch_lines(result)
    assert "micro-batch: 1 is the smallest within 5 % of the best speed" in first
    assert f"{result.largest_micro_batch} is the largest that was seen to fit" in second
    assert "1.0 GB a rank (limit)" in second
    assert "10.0 MB a sample and 100.0 MB beside" in third
    text = console.render(replace(make_summary(make_level()), micro_batches=result))
    assert max(map(len, text.splitlines())) <= 80
    # 110 MB at 1 sample; the table is followed by what it says.
    row = next(line.split() for line in text.splitlines() if "110.0 MB" in line)
    assert row == ["1", "110.0", "MB", "1.00", "1000", "yes"]
    assert text.index("micro-batch at dp 1") < text.index("micro-batch: 1 is the smallest")


class Model:
    """What a run is to the search, with a forward of one's own."""

    def __init__(self, micro_step, modules=()):
        self.micro_step, self.modules = micro_step, modules
        self.workload = SimpleNamespace(dataset=torch.arange(5))
        self.optimizer = SimpleNamespace(zero_grad=lambda: None)
        self.synced = 0

    def try_micro_step(self, batch, *, sync=False):
        self.synced += sync
        self.micro_step(len(batch))

    def try_optimizer(self):
        pass


ALONE = Company(1, list)


def find(model, nbytes, *, meter=None, ranks=ALONE):
    return find_micro_batch(
        model,
        ranks,
        meter or memory.open_meter(CPU),
        Allowance(nbytes, "limit", soft=True),
        CPU,
        lambda trial: None,
    )


PLANTED_MEMORY = """
import json, time, torch
from ddp_profiler.analysis.micro_batch import curve
from ddp_profiler.measure import memory
from ddp_profiler.measure.memory import Allowance
from ddp_profiler.measure.micro_batch import MeasuredTrials, search
from ddp_profiler.schema import MicroBatchSearch
from tests.unit.test_micro_batch import ALONE, CPU, Model

now = [0]

def hungry(samples):
    kept = torch.ones(samples, 10_000_000)
    # Long enough to be seen by looking every now and then.
    time.sleep(0.01)
    del kept
    # New memory costs time that is not steady: a sample takes 100 ms by this clock.
    now[0] += 100_000_000 * samples

limit = Allowance(300_000_000, "limit", soft=True)
meter = memory.HostMemory()
trials = MeasuredTrials(Model(hungry), ALONE, meter, CPU, clock=lambda: now[0])
done, ended = search(trials, limit)
found = curve(MicroBatchSearch(1, ended, limit.nbytes, "limit", meter.source, done))
sampled = memory.SampledMemory()
sampled.begin()
hungry(2)
print(json.dumps([ended, found.largest_micro_batch, found.bytes_per_sample, found.fixed_bytes]))
print(json.dumps(sampled.peak_bytes()))
"""


def test_planted_memory_is_found():
    # In a process of its own, where nothing was freed before that an allocator may keep.
    done = subprocess.run(
        [sys.executable, "-c", PLANTED_MEMORY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (ended, largest, per_sample, fixed), sampled = map(json.loads, done.stdout.splitlines())
    assert ended == "memory"
    assert per_sample == pytest.approx(40e6, rel=0.05)
    # What is imported on the way counts, as it would in training.
    assert largest == (300e6 - fixed) // 40e6
    assert sampled == pytest.approx(80e6, rel=0.2)


class Little:
    """A meter of something that takes no memory."""

    source = "nothing"

    def begin(self):
        pass

    def peak_bytes(self):
        return 1


def test_planted_slowness_is_found():
    def knee(samples):
        time.sleep(0.008 + (0.002 * samples if samples <= 8 else 0.006 * samples))

    found = curve(find(Model(knee), 10**9, meter=Little()))
    assert found.ended == "slower"
    assert (found.largest_micro_batch, found.efficient_micro_batch) == (16, 8)


def test_a_model_that_needs_two_samples_begins_at_two():
    def norm(samples):
        if samples < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        time.sleep(0.001 if samples < 4 else 0.02 * samples)

    assert min(trial.micro_batch for trial in find(Model(norm), 1000, meter=Little()).trials) == 2


def test_another_error_is_not_taken_for_a_lack_of_memory():
    def broken(samples):
        if samples > 2:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        find(Model(broken), 1000, meter=Little())


def test_a_model_that_talks_to_other_ranks_is_refused():
    def talking(_):
        raise RuntimeError("the model issues a collective of its own (c10d.allreduce_)")

    with pytest.raises(InputError, match="--find-micro-batch cannot be used"):
        find(Model(talking), 1000, meter=Little())


def test_synchronised_norms_normalise_alone_and_are_as_before():
    norm = nn.SyncBatchNorm(3)
    seen = []

    def forward(samples):
        seen.append(tuple(norm(torch.randn(samples + 1, 3)).shape))
        time.sleep(0.001 if samples < 4 else 0.02 * samples)

    find(Model(forward, (norm,)), 1000, meter=Little())
    assert seen
    assert "forward" not in norm.__dict__


def company_of(count):
    """Ranks as threads: each gives numbers, and gets the largest of each."""
    values, barrier = {}, threading.Barrier(count, timeout=10)

    def most_of(rank):
        def most(own):
            values[rank] = list(own)
            barrier.wait()
            found = [max(column) for column in zip(*values.values(), strict=True)]
            barrier.wait()
            return found

        return most

    return [Company(count, most_of(rank)) for rank in range(count)]


def test_ranks_agree_where_one_alone_runs_out_of_memory():
    def model(rank):
        def step(samples):
            time.sleep(0.001 * samples + 0.002)
            if rank == 1 and samples > 11:
                torch.empty(1 << 46, dtype=torch.uint8)

        return Model(step)

    models = [model(rank) for rank in range(3)]
    limits = (10**9, 10**9, 10**8)

    def run(rank, ranks):
        trials = MeasuredTrials(models[rank], ranks, Little(), CPU)
        return search(trials, Allowance(limits[rank], "", soft=True))

    found = at_once(*(lambda r=r, c=c: run(r, c) for r, c in enumerate(company_of(3))))
    assert not [result for result in found if isinstance(result, BaseException)], found
    assert found[0] == found[1] == found[2]
    outcomes = {trial.micro_batch: trial.outcome for trial in found[0][0]}
    assert outcomes == {
        **dict.fromkeys((1, 2, 4, 8, 10, 11), FITS),
        **dict.fromkeys((12, 16), NO_MEMORY),
    }
    # The slowest rank of each counts, and each took part in the steps with reductions.
    assert min(found[0][0][0].micro_step_ns) >= 3_000_000
    assert [model.synced for model in models] == [2, 2, 2]


def test_what_says_that_memory_is_used_up():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 46, dtype=torch.uint8)
    for error in (
        real.value,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("std::bad_alloc"),
    ):
        assert memory.is_out_of_memory(error), error
    for error in (
        RuntimeError("shape '[2]' is invalid"),
        ValueError("out of memory"),
        KeyError("memory"),
    ):
        assert not memory.is_out_of_memory(error), error


@pytest.mark.skipif(not memory.sys.platform.startswith("linux"), reason="a limit of Linux")
def test_a_process_is_held_to_its_limit_and_then_no_more():
    with memory.held_to(Allowance(50_000_000, "limit", soft=True), CPU):
        torch.ones(5_000_000)
        with pytest.raises(RuntimeError) as refused:
            torch.ones(200_000_000)
    assert memory.is_out_of_memory(refused.value)
    torch.empty(200_000_000)


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_cgroup_leaves_less_than_the_host(tmp_path):
    second = tree(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": "3000\n",
            "sys/fs/cgroup/job/memory.current": "2000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1500\ninactive_file 400\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "9\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
    )
    assert memory.available_bytes(second) == 1400
    first = tree(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "4:memory:/host/only\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "800\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "300\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100\n",
        },
    )
    assert memory.available_bytes(first) == 600
    assert memory.available_bytes(tmp_path / "none") > 10**6


def test_ranks_of_a_host_share_what_it_has():
    one, two = (memory.allowance(CPU, ranks, None) for ranks in (1, 2))
    assert two.nbytes == pytest.approx(one.nbytes / 2, rel=0.1)
    assert "shared by 2 ranks" in two.source
    stated = memory.allowance(CPU, 2, 1.5)
    assert (stated.nbytes, stated.source, stated.soft) == (1_500_000_000, "--memory-limit-gb", True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_limit_gb": 1.0}, "Add --find-micro-batch"),
        ({"memory_limit_gb": 0.0, "find_micro_batch": True}, "--memory-limit-gb 0"),
        ({"memory_limit_gb": float("nan"), "find_micro_batch": True}, "--memory-limit-gb nan"),
    ],
)
def test_settings_that_are_refused(settings, words):
    with pytest.raises(UsageError) as refused:
        StudyConfig(**settings)
    assert words in str(refused.value)

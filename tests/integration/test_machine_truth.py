"""Planted machine causes: a rank that shares its only core, a cgroup's limit."""

import contextlib
import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from ddp_profiler.analysis.machine import explain, foreign_fraction, run_delay_ms_per_s
from ddp_profiler.record.reader import read_run_info
from tests.integration.conftest import ROOT, Looks, timed, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

SMALL = ("--model", "gpt-tiny", "--steps", "10", "--warmup", "2", "--allreduce-max-mb", "0.1")
HERE = ROOT / "tests" / "integration"


def usable_cores():
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def uses_of(folder, level=0):
    return read_run_info(folder).facts[level].machine


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    """Two ranks; the second may use one core, on which three other processes run.

    On a machine on which the first rank starves too there is nothing to tell apart: another look.
    """
    if len(usable_cores()) < 2:
        pytest.skip("needs two cores")

    def measure():
        folder = tmp_path_factory.mktemp("starved") / "run"
        argv = ("--out", folder, "--dp", "2", "--threads-per-rank", "1", *SMALL)
        env = {"STARVED_RANK": "1", "STARVED_CORE": str(usable_cores()[0])}
        done = torchrun(2, HERE / "starved_rank.py", *argv, env=env)
        assert done.code == 0, done.err[-3000:]
        return folder

    return Looks(measure)


@timed
def test_a_rank_that_shares_its_only_core_is_explained(starved):
    uses = uses_of(starved)
    said = explain(1, uses)
    core = usable_cores()[0]
    others = len(usable_cores())
    assert f"may use 1 core: {core} (others {others})" in said
    (delay,) = [phrase for phrase in said if "without a core" in phrase]
    assert "other processes used" in delay
    # Nothing of the kind is said of the other one, whatever else runs on this machine.
    assert not [p for p in explain(0, uses) if "without a core" in p or "may use" in p]


@timed
def test_the_size_of_it_is_right(starved):
    """Four that want one core get a quarter each: ready for thrice as long as running, or more."""
    starved_use = uses_of(starved)[1]
    cpu_ms = starved_use.user_ms + starved_use.system_ms
    assert starved_use.run_delay_ms > 1.5 * cpu_ms
    assert run_delay_ms_per_s(starved_use) > 300
    assert foreign_fraction(starved_use) > 0.4


@timed
def test_the_record_covers_the_instrumented_steps(starved):
    summary = json.loads((starved / "summary.json").read_text())
    (level,) = summary["levels"]
    for rank, use in zip(level["ranks"], uses_of(starved), strict=True):
        assert rank["machine"] == msgspec.to_builtins(use)
        assert use.rank == rank["rank"]
        steps_ms = rank["steps"] * rank["step_ms"]
        assert steps_ms <= use.wall_ms <= steps_ms + 0.2 * steps_ms + 100


@pytest.fixture
def limit():
    """Environment of a cgroup that may use a sixth of a core: less than even a busy machine gives.

    It is empty and gone in the end.
    """
    name = f"ddp-profiler-test-{os.getpid()}"
    first = Path("/sys/fs/cgroup/cpu") / name / "cpu.cfs_quota_us", "15000", "-1"
    second = Path("/sys/fs/cgroup") / name / "cpu.max", "15000 90000", "max 90000"
    made = None
    for file, limited, unlimited in (first, second):
        folder = file.parent
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if file.name == "cpu.cfs_quota_us":
                (folder / "cpu.cfs_period_us").write_text("90000")
            # Where version 2 does not hand the processor on to groups, there is no such file.
            if file.exists():
                file.write_text(unlimited)
                made = {"THROTTLED_BY": str(file), "LIMIT": limited, "UNLIMITED": unlimited}
                break
        except OSError:
            pass
        folder.rmdir()
    if made is None:
        pytest.skip("no cgroup with a limit on processor time can be made here")
    try:
        yield made
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


@pytest.fixture
def throttled(limit, tmp_path_factory):
    def measure():
        folder = tmp_path_factory.mktemp("throttled") / "run"
        argv = ("--out", folder, "--threads-per-rank", "1", *SMALL, "--steps", "4")
        done = torchrun(1, HERE / "throttled_rank.py", *argv, env=limit)
        assert done.code == 0, done.err[-3000:]
        return folder

    return Looks(measure)


@timed
def test_a_limit_of_the_cgroup_is_a_finding(throttled):
    (use,) = uses_of(throttled)
    # It wants a whole core and gets a sixth of one.
    assert use.throttled_fraction > 0.5
    assert use.throttled_ms > 0.3 * use.wall_ms
    findings = json.loads((throttled / "summary.json").read_text())["findings"]
    assert "cpu-throttled" in {finding["id"] for finding in findings}

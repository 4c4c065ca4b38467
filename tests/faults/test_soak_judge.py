"""The judge of benchmarks/soak.py: what it must not let pass."""

import pytest

from tests.integration.conftest import load_benchmark

soak = load_benchmark("soak")
judge = soak.judge

SOUND = {
    "kind": "KILL",
    "rank": 1,
    "came_in": "level dp2, no_sync block 3",
    "code": 1,
    "said": "Rank 1 on vm was killed by SIGKILL in level dp2, no_sync block 3.",
    "left": [],
    "trace": False,
    "status": "failed",
    "failures": [{"rank": 1, "phase": "level dp2, no_sync block 3, step 20"}],
    "on_disk": 7,
    "readable": 7,
    "analyze": 0,
    "partial": True,
}


def wrong(verdict):
    return {name for name, held in verdict.items() if not held} - {"missed"}


def test_a_run_that_was_lost_as_promised():
    assert wrong(judge(SOUND)) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"code": None}, "in_time"),
        ({"said": "Rank 0 was killed by SIGKILL in no_sync block 3"}, "named_rank"),
        ({"said": "Rank 1 has ended in level dp2, no_sync block 3"}, "named_cause"),
        ({"said": "Rank 1 was killed by SIGKILL in AllReduce"}, "named_phase"),
        ({"failures": [{"rank": 0, "phase": "level dp2, no_sync block 3"}]}, "kept"),
        ({"failures": [{"rank": 1, "phase": "closing"}]}, "kept"),
        ({"failures": []}, "kept"),
        ({"readable": 6}, "all_readable"),
        ({"partial": False}, "marked"),
        ({"analyze": 3}, "analyzed"),
        ({"left": ["process python"]}, "clean"),
        ({"trace": True}, "clean"),
    ],
)
def test_what_was_not_kept_is_seen(changes, name):
    assert name in wrong(judge(SOUND | changes))


def test_no_failure_is_due_after_all_was_measured():
    after = {"status": "complete", "failures": [], "partial": False}
    assert wrong(judge(SOUND | after)) == set()


def test_a_fault_that_came_after_the_end_is_no_fault():
    assert judge(SOUND | {"code": 0}) == {"missed": True}


def test_the_table_counts_what_was_due_in_run_json():
    runs = [SOUND, SOUND | {"failures": []}, SOUND | {"status": "complete"}]
    rest = {"phase": "baseline", "after_ms": 1, "seconds": 8}
    judged = [run | judge(run) | rest for run in runs]
    total = next(line for line in soak.table(judged).splitlines() if line.startswith("| all |"))
    # First in run.json, then steps: three runs, of which two have a failure to keep.
    assert "| 1/2 | 21/21 |" in total

"""benchmarks/worker_costs.py and gathering.py: figures from what was seen, by hand."""

import pytest

from tests.integration.conftest import load_benchmark

worker_costs = load_benchmark("worker_costs")
gathering = load_benchmark("gathering")
MACHINE = {"cores": 2, "load_before": 0.1, "load_after": 0.2, "python": "3.11", "kernel": "6"}


def seen(percent, *, rank=1, begin_s=10.0, end_s=20.0):
    """Samples of a rank that uses so much of a core in the level, and all of it before."""
    cpu, samples = 0.0, []
    for tenth in range(round((end_s + 2) * 10)):
        at = tenth / 10
        cpu += 0.1 * (percent / 100 if begin_s + 0.4 < at < end_s - 0.4 else 1.0)
        samples.append([at, rank, cpu])
    return samples


def raw(samples):
    level = {"id": "dp1", "dp": 1, "ranks": [0], "begin_s": 10.0, "end_s": 20.0}
    return {
        "machine": MACHINE,
        "torch": "2.13",
        "ranks": 2,
        "took_s": 30.0,
        "levels": [{**level, "start_up_ms": 2000.0}],
        "samples": samples,
    }


@pytest.mark.parametrize("percent", [0.5, 40.0])
def test_what_a_waiting_rank_uses_is_that_within_the_level(percent):
    """Not of the rank that is measured, nor of the time on the way into the level and out."""
    given = raw(seen(percent) + seen(90.0, rank=0))
    found = worker_costs.idle_percent(given, given["levels"][0])
    assert found == {1: pytest.approx(percent)}
    goal = "met" if percent < 1 else "missed"
    lines = worker_costs.render(given).splitlines()
    assert lines[-1] == f"Goal: a rank that waits uses below 1 % of a core: {goal}"
    assert max(map(len, lines)) <= 80


def test_a_level_with_all_ranks_has_none_that_waits():
    given = raw(seen(0.5))
    given["levels"][0]["ranks"] = [0, 1]
    assert worker_costs.idle_percent(given, given["levels"][0]) == {}
    assert "Goal" not in worker_costs.render(given)


def test_gathering_is_told_with_its_first_time_apart():
    rows = [
        {"way": way, "took_s": took, "bytes": size, "failed": 0}
        for way, size, times in (
            ("whole", 14_870_000, (0.8, 0.5, 0.4, 0.6)),
            ("condensed", 740_000, (1.7, 0.2, 0.3, 0.1)),
        )
        for took in times
    ]
    given = {"machine": MACHINE, "torch": "2.13", "ranks": 8, "steps": 1000, "gathered": rows}
    lines = gathering.render(given).splitlines()
    assert lines[-2].split() == ["whole", "14.87", "800", "3", "500", "600"]
    assert lines[-1].split() == ["condensed", "0.74", "1700", "3", "200", "300"]
    assert max(map(len, lines)) <= 80
    rows[3]["failed"] = 2
    assert gathering.render(given).splitlines()[-1] == "2 files did not come"

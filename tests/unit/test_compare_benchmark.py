"""The benchmark of comparisons: its order of launches, and its arithmetic on launches of ours."""

import itertools
import json

import numpy as np
import pytest

from tests.integration.conftest import ROOT, load_benchmark, run_command
from tests.unit.test_compare_statistics import launch


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("compare")


def pools(benchmark, planted_ms, real_sd=0.17):
    random = np.random.default_rng(0)
    found = {}
    for pool in benchmark.POOLS:
        sd = real_sd if pool.name == "real" else 0.01
        part = benchmark.PARTS.get(pool.name.removeprefix("timed "))
        planted = {part: planted_ms} if part else None
        found[pool.name] = [
            launch(random, random.lognormal(0, sd), planted=planted) for _ in range(pool.launches)
        ]
    return found


def test_pools_are_spread_over_time(benchmark):
    order = list(benchmark.order())
    assert len(order) == sum(pool.launches for pool in benchmark.POOLS)
    for pool in benchmark.POOLS:
        places = [place for place, one in enumerate(order) if one is pool]
        assert len(places) == pool.launches
        gaps = [after - before for before, after in itertools.pairwise(places)]
        assert max(gaps) <= 2.5 * len(order) / pool.launches


def test_what_is_planted_is_counted(benchmark):
    caught, named, failed, same = benchmark.judge(pools(benchmark, 13.0), 40, 1)
    assert (caught.count, named.count, failed.count) == (40, 40, 40)
    assert (caught.of, same.of) == (40, 40)
    assert same.count <= 2
    caught, named, failed, _ = benchmark.judge(pools(benchmark, 0.0), 40, 1)
    assert max(caught.count, named.count, failed.count) <= 3


def test_pools_that_are_too_small_are_not_judged(benchmark):
    few = {name: figures[:4] for name, figures in pools(benchmark, 13.0).items()}
    assert {tally.of for tally in benchmark.judge(few, 40, 1)} == {0}


def test_a_file_of_figures_is_shown_again(benchmark, tmp_path):
    launches = [
        {
            "pool": name,
            "load": 1.0,
            "step_ms": one.step_ms,
            "parts_ms": one.parts_ms,
            "late": [1, "data"],
        }
        for name, figures in pools(benchmark, 13.0).items()
        for one in figures
    ]
    file = tmp_path / "figures.json"
    kept = {
        "format_version": benchmark.FORMAT_VERSION,
        "machine": {"cores": 2},
        "torch": "2",
        "launches": launches,
    }
    file.write_text(json.dumps(kept))
    script = ROOT / "benchmarks" / "compare.py"
    done = run_command([script, "--read", file])
    assert done.code == 0, done.err
    assert "planted 10 %: called slower                  20 of 20" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    file.write_text("{}")
    assert run_command([script, "--read", file]).code == 2

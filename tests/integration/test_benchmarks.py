"""The benchmarks run and give all that they promise; no figure of theirs is judged here."""

import itertools
import json
import re

import numpy as np
import pytest

from tests.integration.conftest import ROOT, load_benchmark, run_command

SCRIPT = ROOT / "benchmarks" / "overhead.py"


@pytest.fixture(scope="module")
def overhead():
    return load_benchmark("overhead")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    file = tmp_path_factory.mktemp("benchmark") / "figures.json"
    done = run_command([SCRIPT, "--quick", "--peers", "--json", file])
    assert done.code == 0, done.err[-3000:]
    return done, file


@pytest.mark.distributed
def test_quick_run_measures_every_case_and_variant(quick):
    figures = json.loads(quick[1].read_text())
    assert [case["buckets"] for case in figures["cases"]] == [8, 8, 1]
    assert len(figures["ranks"]) == 2
    for blocks in figures["ranks"]:
        seen = {(b["case"], b["round"], b["variant"]) for b in blocks}
        variants = figures["variants"]
        assert {*variants} >= {"plain", "instrumented", "plain_again", "torch.profiler"}
        assert len(seen) == len(blocks) == 3 * len(variants) * figures["plan"]["rounds"]
        assert all(len(b["steps_us"]) == figures["plan"]["block_steps"] for b in blocks)


@pytest.mark.distributed
def test_quick_run_gives_no_verdict(quick):
    verdicts = json.loads(quick[1].read_text())["result"]["verdicts"]
    assert [v["shown"] for v in verdicts] == [None, None, None]
    assert quick[0].out.count("too few rounds") == 3


@pytest.mark.distributed
def test_table_fits_80_columns_and_can_be_shown_again(quick):
    done, file = quick
    assert max(map(len, done.out.splitlines())) <= 80
    assert run_command([SCRIPT, "--read", file]).out == done.out


def test_help_needs_no_torch_and_explains_the_table():
    done = run_command(["-X", "importtime", SCRIPT, "--help"])
    assert done.code == 0
    assert "How to read the table" in done.out
    assert "| torch" not in done.err


@pytest.mark.parametrize("options", [("--rounds", "0"), ("--read", "nowhere.json")])
def test_wrong_usage(options):
    done = run_command([SCRIPT, *options])
    assert done.code == 2
    assert "Traceback" not in done.err


def raw_times(overhead, *, per_step, per_bucket, rounds=36, noise=50, peers=None):
    """Times as ranks would measure them if the cost were known; of peers, by step and bucket."""
    random = np.random.default_rng(0)
    costs = {"plain": (0, 0), "instrumented": (per_step, per_bucket), **(peers or {})}
    costs["plain_again"] = (0, 0)
    blocks = []
    for case in overhead.CASES:
        for round_ in range(rounds):
            for variant, (fixed, each) in costs.items():
                cost = fixed + each * case.buckets
                steps = case.step_ms * 1000 + cost + random.normal(0, noise, 10)
                blocks.append(
                    {
                        "case": case.name,
                        "round": round_,
                        "variant": variant,
                        "steps_us": list(steps),
                        "cpu_us": 2 * cost,
                        "flush_us": 1.0,
                    }
                )
    plan = {"rounds": rounds, "block_steps": 10, "warmup": 3}
    return {
        "plan": plan,
        "cases": overhead._asdicts(overhead.CASES),
        "variants": list(costs),
        "versions": dict.fromkeys(peers or (), "1.2.3"),
        "missing": [],
        "ranks": [blocks, blocks],
    }


def test_planted_costs_are_found(overhead):
    result = overhead.analyze(raw_times(overhead, per_step=100, per_bucket=30))
    short, long, single = result.cases
    assert short.cost_us.value == pytest.approx(340, abs=25)
    assert long.cost_percent.value == pytest.approx(340 / 1080, abs=0.03)
    assert single.bucket_us.value == pytest.approx(130, abs=25)
    assert result.slope_us.value == pytest.approx(30, abs=6)
    assert result.fixed_us.value == pytest.approx(100, abs=30)
    assert result.cpu_slope_us.value == pytest.approx(60)
    assert [v.shown for v in result.verdicts] == [True, True, True]


def test_ours_is_compared_with_others_on_the_same_rounds(overhead):
    raw = raw_times(
        overhead, per_step=100, per_bucket=30, peers={"dear": (500, 60), "cheap": (100, 10)}
    )
    dear, cheap = overhead.analyze(raw).peers
    assert [found.value for found in dear.cost_us] == pytest.approx([980, 980, 560], abs=30)
    assert [found.value for found in dear.less_us] == pytest.approx([-640, -640, -430], abs=40)
    assert dear.slope_us.value == pytest.approx(60, abs=6)
    assert cheap.slope_less_us.value == pytest.approx(20, abs=8)
    raw |= {"machine": {"cores": 2, "load_before": 1, "python": "3.11.9"}, "torch": "2.13.0"}
    raw["missing"] = ["other: not installed"]
    text = overhead.render(overhead.analyze(raw), raw)
    assert "less in 3 of 3 cases; per bucket below" in text
    assert "less in no case; per bucket not below" in text
    assert text.endswith("not measured: other: not installed")


def test_a_goal_that_is_missed_or_not_resolved_is_not_shown(overhead):
    missed = overhead.analyze(raw_times(overhead, per_step=0, per_bucket=200))
    assert [v.shown for v in missed.verdicts] == [False, False, False]
    unclear = overhead.analyze(raw_times(overhead, per_step=0, per_bucket=0, noise=20_000))
    assert not any(v.shown for v in unclear.verdicts)


@pytest.mark.parametrize("noise", [50, 20_000, 5_000_000])
def test_table_fits_whatever_the_machine_does(overhead, noise):
    raw = raw_times(overhead, per_step=100, per_bucket=-3000, noise=noise)
    raw |= {
        "machine": {"cores": 2, "load_before": 123.4, "python": "3.11.9"},
        "torch": "2.13.0+cpu",
    }
    text = overhead.render(overhead.analyze(raw), raw)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"cost, % of step +-?\d+(\.\d+)? \[", text)


@pytest.mark.parametrize("number", [3, 4, 5, 6])
def test_orders_balance_place_and_predecessor(overhead, number):
    made = overhead.orders(number)
    times = len(made) // number
    for place in range(number):
        assert sorted(order[place] for order in made) == sorted([*range(number)] * times)
    follows = sorted(pair for order in made for pair in itertools.pairwise(order))
    pairs = [(a, b) for a in range(number) for b in range(number) if a != b]
    assert follows == sorted(pairs * times)


@pytest.mark.distributed
def test_gathering_brings_all_files_both_ways(tmp_path):
    file = tmp_path / "figures.json"
    words = ["--ranks", "3", "--steps", "20", "--rounds", "2", "--json", file]
    done = run_command([ROOT / "benchmarks" / "gathering.py", *words])
    assert done.code == 0, done.err[-3000:]
    found = json.loads(file.read_text())["gathered"]
    assert [row["way"] for row in found] == ["whole", "condensed"] * 2
    assert not any(row["failed"] for row in found)
    sizes = {
        way: {row["bytes"] for row in found if row["way"] == way} for way in ("whole", "condensed")
    }
    (whole,), (condensed,) = sizes["whole"], sizes["condensed"]
    assert whole > 4 * condensed > 0

"""The benchmark of scripts runs, and finds what is planted in its figures."""

import json

import numpy as np
import pytest

from tests.integration.conftest import ROOT, load_benchmark, run_command

SCRIPT = ROOT / "benchmarks" / "scripts.py"


@pytest.fixture(scope="module")
def scripts():
    return load_benchmark("scripts")


def launches(plan, *, plain=0, instrumented=0, after=0, between=0):
    """Launches whose steps take what the model says and so many us more; round 1 is slow."""
    random = np.random.default_rng(0)
    variants = ["WARMUP"] * 5 + ["PLAIN"] * 5 + 2 * ["INSTRUMENTED"] * 5 + ["PLAIN"] * 5
    found = []
    for round_ in range(plan.rounds):
        for step_ms in plan.steps_ms:
            for observed in (True, False):
                slow = 500 if round_ == 1 else 0
                steps = step_ms * 1000 + slow + random.normal(0, 20, plan.window + plan.after)
                if observed:
                    cost = {"WARMUP": 0, "PLAIN": plain, "INSTRUMENTED": instrumented}
                    steps[: plan.window] += [cost[name] for name in variants]
                    steps[plan.window :] += after
                    steps[[5, 10, 20]] += between
                found.append(
                    {
                        "round": round_,
                        "step_ms": step_ms,
                        "observed": observed,
                        "steps_us": list(steps),
                        "variants": variants if observed else [],
                    }
                )
    return found


def test_planted_costs_are_found(scripts):
    plan = scripts.Plan(rounds=12, steps=10, after=20)
    found = launches(plan, plain=40, instrumented=700, after=15, between=4000)
    short, long = scripts.analyze_cost(found, plan)
    assert (short.step_ms, long.step_ms) == (36, 108)
    for cost in (short, long):
        assert cost.plain.value == pytest.approx(40, abs=15)
        assert cost.instrumented.value == pytest.approx(700, abs=15)
        assert cost.after.value == pytest.approx(15, abs=15)
        assert cost.window.value == pytest.approx((10 * 40 + 10 * 700 + 3 * 4000) / 20, abs=15)


def test_differences_to_the_own_loop_are_found(scripts):
    parts = dict.fromkeys(scripts.PARTS, 10.0)
    found = [
        {
            "round": round_,
            "kind": kind,
            "parts_ms": {**parts, "step": 60.0 + round_ + (2.5 if kind == "trainer" else 0)},
            "observed": 16 if kind != "torch" or round_ else 12,
            "collectives": 8.0,
            "gradient_bytes": 4096,
        }
        for round_ in range(6)
        for kind in scripts.KINDS
    ]
    by_kind = {result.kind: result for result in scripts.analyze_agreement(found)}
    assert by_kind["trainer"].less_loop.value == pytest.approx(2500)
    assert by_kind["accelerate"].less_loop.value == pytest.approx(0)
    assert by_kind["trainer"].parts_ms["step"] == pytest.approx(65.0)
    assert (by_kind["loop"].observed, by_kind["torch"].observed) == (16, None)


@pytest.mark.distributed
def test_quick_run_answers_both_questions(tmp_path):
    file = tmp_path / "figures.json"
    done = run_command([SCRIPT, "--quick", "--json", file])
    assert done.code == 0, done.err[-3000:]
    assert max(map(len, done.out.splitlines())) <= 80
    raw = json.loads(file.read_text())
    with_us, without = (
        next(x for x in raw["cost"] if x["observed"] is which) for which in (True, False)
    )
    assert len(with_us["steps_us"]) == len(without["steps_us"]) == 5 + 8 + 8
    assert with_us["variants"].count("INSTRUMENTED") == with_us["variants"].count("PLAIN") == 4
    for result in raw["result"]["agreement"]:
        assert (result["observed"], result["collectives"]) == (16, 8)
        assert result["gradient_bytes"] == 8 * 65536 * 4
    assert run_command([SCRIPT, "--read", file]).out == done.out

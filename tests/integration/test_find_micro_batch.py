"""--find-micro-batch on two ranks: planted memory, one rank that runs out of it, what follows."""

import json

import pytest

from tests.integration.conftest import run_command, timed
from tests.integration.hungry_model import ELEMENTS, MOST_ON_RANK_1

pytestmark = [pytest.mark.distributed, pytest.mark.alone]


@pytest.fixture(scope="module")
def found(look):
    return look(
        2,
        *("--model", "tests.integration.hungry_model:make", "--dp", "2", "--find-micro-batch"),
        *("--memory-limit-gb", "1", "--steps", "2", "--warmup", "2", "--allreduce-max-mb", "0"),
        # Memory of ranks is looked at, so they are processes of their own.
    )


@timed
def test_the_curve_is_that_of_the_model(found):
    curve = found.summary["micro_batches"]
    outcomes = {point["micro_batch"]: point["outcome"] for point in curve["points"]}
    assert outcomes == {
        **dict.fromkeys((1, 2, 4, 8, 10, 11), "fits"),
        **dict.fromkeys((12, 16), "out_of_memory"),
    }
    assert curve["ended"] == "memory"
    assert curve["largest_micro_batch"] == MOST_ON_RANK_1
    peaks = {point["micro_batch"]: point["peak_bytes"] for point in curve["points"]}
    assert peaks[11] > 2 * 4 * 11 * ELEMENTS
    assert peaks[12] is peaks[16] is None
    assert curve["limit_bytes"] == 10**9
    # 30 ms a micro-step and 5 ms a sample: larger ones are faster by far.
    assert curve["efficient_micro_batch"] in (10, 11)
    assert curve["dp"] == 2


@timed
def test_the_levels_use_what_was_found(found):
    (level,) = found.summary["levels"]
    assert level["micro_batch"] == found.summary["micro_batches"]["efficient_micro_batch"]
    assert level["batch_check"]["ok"] is True
    assert found.run_info["levels"][0]["micro_batch"] == level["micro_batch"]


@timed
def test_the_table_says_which_to_use(found):
    assert "micro-batch at dp 2" in found.out
    assert "no: out of memory" in found.out
    flat = " ".join(found.out.split())
    assert f"{MOST_ON_RANK_1} is the largest that was seen to fit in 1.0 GB a rank" in flat
    table = found.out.split("Run folder")[0].splitlines()
    assert max(len(line) for line in table if "/" not in line[:3]) <= 80


@timed
def test_a_plan_takes_memory_and_times_from_the_run(found):
    done = run_command(
        [
            *("-m", "ddp_profiler.cli", "plan", "--samples", "1000", "--epochs", "2", "--json"),
            *("--global-batch", "80", "--dp", "2", "--run", found.folder),
        ]
    )
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    ways = [plan, *plan["alternatives"]]
    by_size = {way["micro_batch"]: way for way in ways}
    assert by_size[40]["fits"] is False
    assert ways[-1]["micro_batch"] in (20, 40)
    # 10 samples in each of 4 micro-steps are faster than 1 in each of 40: 30 ms less each.
    assert (plan["micro_batch"], plan["accumulation"], plan["fits"]) == (10, 4, True)
    assert by_size[1]["training_time_s"] > plan["training_time_s"]
    low, high = plan["training_time_interval_s"]
    assert low <= plan["training_time_s"] <= high
    assert plan["total_optimizer_steps"] == 26
    # 4 micro-steps of 80 ms.
    assert plan["step_time"]["ms"] > 320

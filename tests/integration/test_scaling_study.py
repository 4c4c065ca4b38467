"""Weak and strong scaling against planted truth; the batch identity, right and wrong."""

import pytest

from tests.integration.conftest import Looks, run_command, timed, torchrun

pytestmark = pytest.mark.distributed

TIMED = ("--model", "timed:layers=4", "--steps", "4", "--warmup", "2", "--threads-per-rank", "1")
STRONG = ("--global-batch", "32", "--micro-batch", "4")
ACCUMULATED = ("--global-batch", "16", "--micro-batch", "4")


def near(planted, floor_ms=3.0):
    """The goal is 10 %; the floor is for a machine that does other work as well."""
    return pytest.approx(planted, abs=planted * 0.1 + floor_ms)


@pytest.fixture(scope="module", params=["weak", "strong"])
def planted(look, request):
    """Twenty ms of data wait a micro-step and 40 ms of copying a step, at dp 2 only."""
    batch = ACCUMULATED if request.param == "strong" else ()
    return look(
        2,
        *(*TIMED, *batch),
        *("--plant", "part=data,ms=20,level_dp=2", "--plant", "part=copy,ms=40,level_dp=2"),
    )


@pytest.mark.alone
@timed
def test_waterfall_terms_are_what_was_planted(planted):
    level = planted.summary["levels"][-1]
    falls = level["waterfall_ms"]
    assert falls["data"] == near(20 * level["accumulation"])
    assert falls["exposed_copy"] == near(40)
    # Four layers of 5 and 10 ms.
    assert falls["bare"] == near(60 * level["accumulation"])
    for term in ("slower_compute", "contention", "optimizer", "other", "forward_comm"):
        assert abs(falls[term]) < 6, term


@pytest.mark.alone
@timed
def test_waterfall_ends_at_the_measured_step_with_a_small_residual(planted):
    for level in planted.summary["levels"]:
        falls = dict(level["waterfall_ms"])
        measured = falls.pop("measured")
        assert measured == level["step_ms"]["mean"]
        assert sum(falls.values()) == pytest.approx(measured, rel=1e-6)
        assert abs(falls["residual"]) <= 0.02 * measured + 3


@pytest.mark.alone
def test_pop_factors_multiply_to_the_global_efficiency(planted):
    for level in planted.last.summary["levels"]:
        factors = dict(level["pop"])
        product = 1.0
        total = factors.pop("global_efficiency")
        for value in factors.values():
            product *= value
        assert product == pytest.approx(total, rel=1e-9)


@pytest.fixture(scope="module")
def quick(look):
    return look(2, *TIMED)


@pytest.mark.alone
def test_an_input_bound_job_has_low_input_and_unchanged_communication_efficiency(look, quick):
    def claim(looks):
        before, after = (one.level("dp2")["pop"] for one in looks)
        assert after["input_efficiency"] == pytest.approx(0.4, abs=0.08)
        assert before["input_efficiency"] > 0.95
        assert after["communication_efficiency"] == pytest.approx(
            before["communication_efficiency"], abs=0.08
        )
        # The timed layers sleep, so without the wait for data no roof is near.
        bounds = [one.level("dp2")["roofline"]["bound"] for one in looks]
        assert bounds == ["none", "input"]
        limits = [f["message"] for f in looks[1].summary["findings"] if f["id"] == "limit"]
        assert all("limited by input" in message for message in limits)

    Looks.show_both(quick, look(2, *TIMED, "--plant", "part=data,ms=90"), claim)


@pytest.mark.parametrize("model", ["gpt-tiny:layers=2,width=64"])
def test_strong_scaling_keeps_the_global_batch(study, model):
    done = study(4, "--model", model, *STRONG, "--steps", "2", "--warmup", "2")
    assert done.code == 0, done.err[-3000:]
    levels = done.summary["levels"]
    assert [(lv["dp"], lv["accumulation"]) for lv in levels] == [(1, 8), (2, 4), (4, 2)]
    for level in levels:
        check = level["batch_check"]
        assert check["observed"] == 32
        assert check["ranks_agree"] is True
        assert check["gradient_max_rel_error"] <= 1e-5
        assert check["gradient_factor"] == pytest.approx(1, abs=1e-5)
        assert check["gradient_factor_name"] is None


@pytest.mark.parametrize(
    ("fault", "level", "factor", "name"),
    [
        ("accumulation", "dp2-acc3", 3, "accumulation"),
        ("dp", "dp2-acc3", 2, "dp"),
    ],
)
def test_a_loss_divided_wrongly_gives_the_factor_and_its_name(study, fault, level, factor, name):
    done = study(
        2,
        *("--model", "mlp:width=64", "--accumulate", "3", "--micro-batch", "5", "--dp", "2"),
        *("--steps", "1", "--warmup", "2", "--plant", f"loss={fault}"),
    )
    assert done.code == 0, done.err[-3000:]
    check = done.level(level)["batch_check"]
    assert check["gradient_factor"] == pytest.approx(factor, rel=1e-4)
    assert name in check["gradient_factor_name"]
    errors = [f for f in done.summary["findings"] if f["severity"] == "error"]
    assert [f["id"] for f in errors] == ["gradient-scale"]
    assert name in errors[0]["message"]


def test_micro_batch_against_accumulation_at_one_global_batch(study):
    done = study(
        1,
        *("--model", "mlp:width=64", "--global-batch", "32", "--accumulate", "1,4"),
        *("--steps", "3", "--warmup", "2"),
    )
    levels = done.summary["levels"]
    assert [(lv["micro_batch"], lv["accumulation"]) for lv in levels] == [(32, 1), (8, 4)]
    found = [f for f in done.summary["findings"] if f["id"] == "accumulation-cost"]
    assert len(found) == 1
    # More, or no measurable difference: as the intervals allow.
    assert "per sample" in found[0]["message"]


@pytest.fixture(scope="module")
def repeated(look):
    return look(2, "--model", "mlp:width=64", "--steps", "2", "--warmup", "2", "--repeat", "3")


@pytest.mark.alone
@timed
def test_repetitions_are_the_unit_of_the_interval(repeated):
    done = repeated
    assert "3 repetitions" in done.summary["run"]["statistics_unit"]
    for level in done.summary["levels"]:
        assert level["repetitions"] == 3
        assert level["steps"] == 6
        for rank in level["ranks"]:
            # The machine is watched in all repetitions, and in instrumented steps only.
            covered, steps_ms = rank["machine"]["wall_ms"], rank["steps"] * rank["step_ms"]
            assert steps_ms <= covered <= 2 * steps_ms + 100, rank


@pytest.mark.alone
def test_allreduce_in_isolation(quick):
    found = quick.last.level("dp2")["allreduce"]
    assert [size["bytes"] for size in found["sizes"]] == [4096, 16384, 65536]
    for size in found["sizes"]:
        assert size["p10_ms"] <= size["time_ms"] <= size["p90_ms"]
        # n = 2: 2(n-1)/n = 1.
        assert size["busbw_gb_per_s"] == pytest.approx(size["algbw_gb_per_s"])
        assert size["algbw_gb_per_s"] == pytest.approx(size["bytes"] / size["time_ms"] / 1e6)
    assert [b["bytes"] for b in found["buckets"]] == [4 * 65536 * 4]
    link = found["link"]
    assert (link["name"], link["kind"], link["source"], link["ranks"]) == (
        "within node0",
        "within_node",
        "measured",
        [0, 1],
    )
    for size in (*found["sizes"], *found["buckets"]):
        bound_ms = size["bytes"] * 8 / (link["gbit_per_s"] * 1e9) * 1e3
        assert size["ring_bound_ms"] == pytest.approx(bound_ms)
    assert quick.last.level("dp1")["allreduce"] is None


@pytest.mark.alone
@timed
def test_gradients_are_ready_from_the_last_layer_to_the_first(quick):
    ready = quick.level("dp2")["gradient_ready"]
    times = [parameter["ready_ms"] for parameter in ready]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)
    assert times[0] - times[-1] == near(30)


WORLD = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        (
            7,
            ("--global-batch", "256", "--micro-batch", "2", "--accumulate", "18", "--dp", "7"),
            ("256", "2 x 18 x 7 = 252", "2 x 16 x 8 = 256"),
        ),
        (3, ("--global-batch", "32", "--micro-batch", "4", "--dp", "3"), ("4 x 3 x 3 = 36",)),
        (2, ("--scaling", "strong"), ("--global-batch",)),
        (2, ("--scaling", "weak", "--global-batch", "8"), ("grow",)),
        (2, ("--scaling", "sideways"), ("weak, strong",)),
        (1, ("--repeat", "0"), ("--repeat 0",)),
        (1, ("--plant", "loss=nonsense"), ("nonsense",)),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_timing(
    tmp_path, world, options, words
):
    env = WORLD | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    done = run_command(["-m", "ddp_profiler.run", "--out", tmp_path / "run", *options], env=env)
    assert done.code == 2, done.err
    assert len(done.err.strip().splitlines()) <= 2
    for word in words:
        assert word in done.err
    assert not (tmp_path / "run").exists()


def test_an_unmet_expectation_ends_with_exit_1_and_keeps_the_run(tmp_path):
    argv = ["-m", "ddp_profiler.run", "--model", "mlp:width=64", "--steps", "1", "--warmup", "2"]
    done = run_command([*argv, "--out", tmp_path / "a", "--expect-global-batch", "9"])
    assert done.code == 1, done.err
    assert "not 9 samples" in done.err
    assert (tmp_path / "a" / "summary.json").exists()
    assert '"status": "complete"' in (tmp_path / "a" / "run.json").read_text()
    done = torchrun(1, *argv, "--out", tmp_path / "b", "--expect-global-batch", "8")
    assert done.code == 0, done.err

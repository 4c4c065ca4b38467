"""The plan: the identity, epochs as torch makes them, times, alternatives, the command."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ddp_profiler import cli
from ddp_profiler.analysis.micro_batch import curve
from ddp_profiler.analysis.model import StepCosts
from ddp_profiler.analysis.results import Distribution
from ddp_profiler.batch import Batch
from ddp_profiler.errors import UsageError
from ddp_profiler.predict.parallel import Parallel, nearest_legal, solve_parallel
from ddp_profiler.predict.plan import PlanRequest, RunKnowledge, knowledge_of, make_plan
from ddp_profiler.predict.step_time import StepTime, re_expressed
from ddp_profiler.report import plan as report
from ddp_profiler.schema import MicroBatchSearch, MicroBatchTrial, TrialOutcome

from .test_console import make_level, make_summary

# What a micro-step costs 10 ms, and a step beside 7 ms.
COSTS = StepCosts(1.0, 3.0, 5.0, 1.0, 2.0, 0.0, 0.0, 1.0, 3.0, 0.0, 1.0)


def plan(samples, epochs=1, *, step_ms=None, run=None, **options):
    return make_plan(PlanRequest(samples, epochs, **options), run, step_ms)


def refused(samples=1000, **options):
    with pytest.raises(UsageError) as error:
        plan(samples, **options)
    assert "\n" not in error.value.message + error.value.remedy
    assert error.value.remedy
    return str(error.value)


def summary_of(*levels, micro_batches=None):
    return replace(make_summary(*levels), micro_batches=micro_batches)


def run_of(*levels, **changes):
    return knowledge_of(summary_of(*levels, **changes), "runs/x")


def level(dp, micro_batch, accumulation=1, mean=17.0, **changes):
    return make_level(
        id=f"dp{dp}-acc{accumulation}",
        dp=dp,
        micro_batch=micro_batch,
        accumulation=accumulation,
        step_ms=Distribution(mean, 0.9 * mean, mean, mean, (0.8 * mean, mean)),
        costs_ms=replace(COSTS, accumulation=accumulation),
        **changes,
    )


def micro_batches(*steps_ns, dp=2, unfit=None):
    """A curve whose micro-batches 1, 2, 4, ... take these times."""
    trials = [
        MicroBatchTrial(2**k, TrialOutcome.FITS, 1000 + 100 * 2**k, None, (t,) * 3)
        for k, t in enumerate(steps_ns)
    ]
    if unfit:
        trials.append(MicroBatchTrial(unfit, TrialOutcome.OUT_OF_MEMORY, None))
    return MicroBatchSearch(dp, "memory", 10**6, "limit", "source", tuple(trials))


def test_the_example_of_accumulation():
    once = plan(1000, global_batch=10, accumulation=1)
    twice = plan(1000, global_batch=10, accumulation=2)
    assert (once.micro_batch, once.micro_steps_per_epoch, once.optimizer_steps_per_epoch) == (
        10,
        100,
        100,
    )
    assert (twice.micro_batch, twice.micro_steps_per_epoch, twice.optimizer_steps_per_epoch) == (
        5,
        200,
        100,
    )
    assert once.rounding == twice.rounding == ()


def test_more_devices_shorten_the_epoch_in_steps():
    for dp, steps in ((1, 554), (2, 277), (4, 139)):
        found = plan(88492, 3, micro_batch=160, dp=dp)
        assert found.optimizer_steps_per_epoch == found.micro_steps_per_epoch == steps
        assert found.total_optimizer_steps == 3 * steps


def test_ten_samples_on_four_ranks():
    padded = plan(10, micro_batch=1, dp=4)
    assert (padded.samples_processed, padded.samples_repeated, padded.samples_dropped) == (12, 2, 0)
    assert padded.rounding == ("the sampler repeats 2 (3 a rank)",)
    cut = plan(10, micro_batch=1, dp=4, drop_last="sampler")
    assert (cut.samples_processed, cut.samples_repeated, cut.samples_dropped) == (8, 0, 2)
    assert plan(10, micro_batch=1, dp=4, drop_last="both").samples_processed == 8
    # The loader alone drops nothing here: it gets 3 for each rank.
    assert plan(10, micro_batch=1, dp=4, drop_last="loader").samples_processed == 12


def test_what_is_not_whole_is_refused_with_all_numbers():
    text = refused(global_batch=256, micro_batch=2, accumulation=18, dp=7)
    assert "Global batch 256 is not" in text
    assert "2 x 18 x 7 = 252" in text
    assert "2 x 16 x 8 = 256; 2 x 18 x 7 = 252; 2 x 19 x 7 = 266" in text
    assert "2 x 18 x 7 = 252" in refused(global_batch=256, micro_batch=2, accumulation=18)
    open_micro = refused(global_batch=256, accumulation=3, dp=8)
    assert "8 x 4 x 8 = 256; 10 x 3 x 8 = 240; 11 x 3 x 8 = 264" in open_micro
    both_open = refused(global_batch=256, dp=7)
    assert "32 x 1 x 8 = 256; 36 x 1 x 7 = 252; 37 x 1 x 7 = 259" in both_open
    # More ranks than samples of a batch.
    assert "1 x 1 x 4 = 4" in refused(global_batch=4, dp=7)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30))
def test_each_of_the_four_is_solved(micro_batch, accumulation, dp):
    total = micro_batch * accumulation * dp
    whole = {
        "global_batch": total,
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "dp": dp,
    }
    for name in whole:
        left = {key: value for key, value in whole.items() if key != name}
        found = plan(100, **left)
        assert {key: getattr(found, key) for key in whole} == whole


def test_the_world_is_solved():
    assert solve_parallel(16, 4, None, 2) == Parallel(4, 2, 2)
    assert solve_parallel(16, 4, 1, None) == Parallel(4, 1, 4)
    assert solve_parallel(16, None, None, None) == Parallel(16)
    assert solve_parallel(None, 3, 2, None).world_size == 6
    found = plan(1000, global_batch=32, world_size=16, tp=2, accumulation=2)
    assert (found.dp, found.tp, found.pp, found.world_size) == (8, 2, 1, 16)
    assert found.micro_batch == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 16, "dp": 3, "tp": 2, "pp": 2}, "3 x 2 x 2 = 12"),
        ({"world_size": 16, "tp": 3}, "8 x 2 x 1 = 16; 5 x 3 x 1 = 15; 6 x 3 x 1 = 18"),
        ({"world_size": 16, "dp": 4}, "--tp 4 (4 x 4 x 1), or --pp 4 (4 x 1 x 4)"),
        ({"world_size": 16, "dp": 5}, "World size 16 is not dp x tp x pp: 5 x 1 x 1 = 5."),
        ({"world_size": 2, "tp": 4}, "2 x"),
    ],
)
def test_worlds_that_are_refused(options, words):
    assert words in refused(micro_batch=1, **options)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_worlds_that_are_suggested_are_legal(world_size, dp, tp, pp):
    for found in nearest_legal(world_size, Parallel(dp, tp, pp)):
        same = (found.tp, found.pp) == (tp, pp)
        assert min(found.dp, found.tp, found.pp) >= 1
        assert found.world_size == world_size or (
            same and abs(found.world_size - world_size) <= tp * pp
        )


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 80),
    dp=st.integers(1, 4),
    micro=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    drop_last=st.sampled_from(["none", "sampler", "loader", "both"]),
    window=st.sampled_from(["short", "drop", "carry"]),
    epochs=st.integers(1, 3),
)
def test_a_plan_is_what_torch_makes_of_it(
    samples, dp, micro, accumulation, drop_last, window, epochs
):
    steps, used, handed_out, unused = 0, 0, [], 0
    waiting = [[] for _ in range(dp)]
    for epoch in range(epochs):
        loaders = []
        for rank in range(dp):
            sampler = DistributedSampler(
                range(samples), dp, rank, seed=1, drop_last=drop_last in ("sampler", "both")
            )
            sampler.set_epoch(epoch)
            handed_out += [(epoch, i) for i in sampler]
            loader = DataLoader(
                range(samples), micro, sampler=sampler, drop_last=drop_last in ("loader", "both")
            )
            loaders.append([batch.tolist() for batch in loader])
        micro_steps = len(loaders[0])
        for micro_step in range(micro_steps):
            for rank in range(dp):
                waiting[rank].append(loaders[rank][micro_step])
            short = window == "short" and micro_step == micro_steps - 1
            if len(waiting[0]) == accumulation or short:
                steps += 1
                used += sum(len(batch) for batches in waiting for batch in batches)
                waiting = [[] for _ in range(dp)]
        if window == "drop":
            unused += len(waiting[0])
            waiting = [[] for _ in range(dp)]
    options = {
        "micro_batch": micro,
        "accumulation": accumulation,
        "dp": dp,
        "drop_last": drop_last,
        "window": window,
    }
    if not steps:
        with pytest.raises(UsageError, match="make no optimizer step"):
            plan(samples, epochs, **options)
        return
    found = plan(samples, epochs, **options)
    assert found.micro_steps_per_epoch == micro_steps
    assert found.total_optimizer_steps == steps
    assert found.samples_repeated * epochs == len(handed_out) - len(set(handed_out))
    assert found.total_unused_micro_steps == unused + len(waiting[0])
    assert found.total_samples_processed == used
    assert found.total_samples_dropped == (
        epochs * (samples + found.samples_repeated) - found.total_samples_processed
    )
    left = sum(len(batch) for batches in waiting for batch in batches)
    assert found.samples_processed * epochs == used + left
    assert bool(left) == any("no step takes" in line for line in found.rounding)
    whole = found.samples_processed == samples and not left and not found.samples_repeated
    if not found.rounding:
        assert whole
        assert found.optimizer_steps_per_epoch * found.global_batch == samples


def test_windows_that_carry_over_make_broken_epochs():
    found = plan(70, 3, micro_batch=10, accumulation=2, window="carry")
    assert (found.optimizer_steps_per_epoch, found.total_optimizer_steps) == (3.5, 10)
    assert found.rounding[-1] == (
        "the end of the run leaves 1 micro-step that no step takes, of 10 samples"
    )


def test_micro_steps_that_no_step_takes_cost_time():
    options = {"micro_batch": 1, "accumulation": 100, "dp": 1}
    dropped = plan(199, 10, window="drop", step_ms=100.0, **options)
    # 1990 micro-steps of 1 ms, of which 10 steps take 1000.
    assert dropped.training_time_s == pytest.approx(1.99)
    assert dropped.training_time_terms_s["steps"] == pytest.approx(1.0)
    assert dropped.training_time_terms_s["unused_micro_steps"] == pytest.approx(0.99)
    assert dropped.total_unused_micro_steps == 990
    assert "counts as 1 / 100 of a step" in dropped.notes[-1]
    assert "unused micro-steps 0.99 s" in report.render(dropped)
    carried = plan(199, 3, window="carry", step_ms=100.0, **options)
    assert carried.training_time_s == pytest.approx(0.597)
    assert (carried.total_samples_processed, carried.total_samples_dropped) == (500, 97)
    text = report.render(carried)
    assert re.search(r"samples that steps use +199 +500\n", text)
    assert re.search(r"samples dropped +0 +97\n", text)
    assert re.search(r"micro-steps +199 +597\n +that no step takes +- +97\n", text)
    whole = plan(200, 3, window="carry", step_ms=100.0, **options)
    assert whole.training_time_terms_s["unused_micro_steps"] == 0
    assert "no step takes" not in report.render(whole)


def test_micro_steps_that_no_step_takes_add_what_is_known_of_one():
    # A micro-step adds 10 ms, a step 7: 5 micro-steps in windows of 3 leave 2 an epoch.
    run = run_of(level(1, 10, mean=17.0))
    found = plan(50, 4, micro_batch=10, accumulation=3, dp=1, window="drop", run=run)
    assert found.training_time_terms_s["steps"] == pytest.approx(4 * 0.037)
    assert found.training_time_terms_s["unused_micro_steps"] == pytest.approx(4 * 2 * 0.010)
    low, high = found.training_time_interval_s
    assert low / found.training_time_s == pytest.approx(0.8 / 0.9)
    assert high / found.training_time_s == pytest.approx(1 / 0.9)
    assert not any("counts as" in note for note in found.notes)


def test_whole_batches_dealt_out():
    assert plan(1000, micro_batch=16, dp=3, shard="batches").samples_repeated == 8
    dropped = plan(1000, micro_batch=16, dp=3, shard="batches", drop_last="both")
    assert (dropped.samples_dropped, dropped.samples_processed) == (40, 960)


def test_time_is_steps_times_step_time_and_the_terms():
    found = plan(
        1000,
        2,
        micro_batch=10,
        step_ms=50.0,
        startup_s=7.0,
        evaluation_s=3.0,
        checkpoint_s=0.5,
        checkpoint_every=60,
    )
    terms = {
        "steps": 10.0,
        "unused_micro_steps": 0.0,
        "startup": 7.0,
        "evaluation": 6.0,
        "checkpoint": 1.5,
    }
    assert found.training_time_terms_s == terms
    assert found.training_time_s == 24.5
    assert found.training_time_interval_s is None
    assert found.step_time.source == "given by --step-ms"


def test_without_a_step_time_it_is_said():
    found = plan(1000, 2, micro_batch=10, startup_s=5.0)
    assert found.training_time_s is None
    assert found.training_time_terms_s["steps"] is None
    assert "--step-ms" in found.notes[-1]
    other = plan(1000, 2, micro_batch=10, dp=4, run=run_of(level(2, 10)))
    assert other.training_time_s is None
    assert "runs/x, which has measured dp 2, does not tell a step at 10 x 1 x 4" in other.notes[-1]


def test_a_measured_level_gives_the_time_with_its_interval():
    found = plan(1000, 2, micro_batch=10, dp=2, run=run_of(level(2, 10, mean=17.0)))
    # 50 steps an epoch. A sum needs the mean; the interval of the median is moved to it.
    assert found.training_time_s == pytest.approx(100 * 0.017)
    low, high = found.training_time_interval_s
    assert low == pytest.approx(100 * 0.017 * 0.8 / 0.9)
    assert high == pytest.approx(100 * 0.017 / 0.9)
    assert found.step_time.source == "measured at dp2-acc1"
    assert found.step_time.interval_pct == 95


def test_another_accumulation_adds_micro_steps():
    source = re_expressed(make_summary(level(2, 10, mean=18.0), level(2, 10, 8, mean=90.0)))
    assert source(Batch(10, 3, 2)).ms == pytest.approx(18.0 + 2 * 10.0)
    # From the nearest one that was measured.
    assert source(Batch(10, 7, 2)).ms == pytest.approx(90.0 - 10.0)
    assert source(Batch(10, 3, 2)).source == "measured at dp2-acc1, re-expressed at accumulation 3"
    assert source(Batch(10, 3, 4)) is None
    assert source(Batch(9, 3, 2)) is None


def test_another_micro_batch_needs_a_curve_of_that_dp():
    levels = (level(2, 4, mean=18.0),)
    found = curve(micro_batches(2_000_000, 3_000_000, 5_000_000, 9_000_000))
    source = re_expressed(summary_of(*levels, micro_batches=found))
    assert source(Batch(8, 2, 2)).ms == pytest.approx(18.0 + 10.0 + 2 * (9 - 5))
    assert source(Batch(6, 1, 2)).ms == pytest.approx(18.0 + (7 - 5))
    assert "re-expressed at accumulation 2 and micro-batch 8" in source(Batch(8, 2, 2)).source
    assert source(Batch(16, 1, 2)) is None
    at_one = re_expressed(summary_of(*levels, micro_batches=replace(found, dp=1)))
    assert at_one(Batch(8, 1, 2)) is None


def test_a_shorter_last_step_takes_less_where_that_is_known():
    # 5 micro-steps an epoch in windows of 2: two steps of 2 and one of 1.
    known = plan(50, 4, micro_batch=10, accumulation=2, dp=1, run=run_of(level(1, 10, mean=17.0)))
    assert known.total_optimizer_steps == 12
    assert known.training_time_s == pytest.approx((8 * 27 + 4 * 17) / 1e3)
    assert not any("counts as a full one" in note for note in known.notes)
    given_only = plan(50, 4, micro_batch=10, accumulation=2, dp=1, step_ms=27.0)
    assert given_only.training_time_s == pytest.approx(12 * 27 / 1e3)
    assert any("counts as a full one" in note for note in given_only.notes)


def order(found):
    return [(a.micro_batch, a.accumulation, a.dp) for a in found.alternatives]


def test_alternatives_are_the_same_batch_the_largest_micro_batch_first():
    found = plan(1000, global_batch=24, dp=2, micro_batch=3)
    assert order(found) == [(12, 1, 2), (6, 2, 2), (4, 3, 2), (2, 6, 2), (1, 12, 2)]
    assert all(a.micro_batch * a.accumulation * a.dp == 24 for a in found.alternatives)
    assert {a.total_optimizer_steps for a in found.alternatives} == {42}
    assert {a.training_time_s for a in found.alternatives} == {None}


def test_with_an_open_dp_others_are_shown():
    found = plan(1000, global_batch=24, micro_batch=3)
    assert (found.micro_batch, found.accumulation, found.dp) == (3, 8, 1)
    assert {a.dp for a in found.alternatives if a.micro_batch == 3} == {2, 4, 8}


def test_an_open_dp_is_also_split_otherwise():
    found = plan(50000, 90, global_batch=256)
    assert (found.micro_batch, found.dp) == (256, 1)
    assert {(128, 1, 2), (64, 2, 2), (8, 1, 32), (1, 1, 256)} <= set(order(found))
    # What is shown at once has several dp, and of a micro-batch the largest dp first.
    assert order(found)[:3] == [(128, 1, 2), (128, 2, 1), (64, 1, 4)]
    assert {a.micro_batch * a.accumulation * a.dp for a in found.alternatives} == {256}
    assert {a.dp for a in plan(50000, global_batch=256, dp=2).alternatives} == {2}
    # No more ranks than samples, and not all divisors of a batch that has many.
    assert max(a.dp for a in plan(10, global_batch=64).alternatives) == 8
    assert len({a.dp for a in plan(10**6, global_batch=720720).alternatives}) == 12


def test_an_open_dp_is_predicted_beyond_those_measured():
    def source(batch):
        if batch.micro_batch != 8:
            return None
        words = "measured at dp4" if batch.dp == 4 else "predicted, beyond what was measured"
        return StepTime(100.0 * batch.accumulation + batch.dp, None, None, words)

    run = RunKnowledge("r", step_times=source, sizes=(4, 1))
    found = plan(50000, global_batch=512, run=run, micro_batch=8)
    assert (found.accumulation, found.dp) == (16, 4)
    timed = [a for a in found.alternatives if a.training_time_s is not None]
    # Up to 8 times 4, the shortest first.
    assert [(a.accumulation, a.dp) for a in timed] == [(2, 32), (4, 16), (8, 8), (32, 2), (64, 1)]
    assert {a.source for a in timed} == {"predicted, beyond what was measured"}
    assert max(a.dp for a in found.alternatives) == 32
    world = plan(50000, global_batch=512, run=run, world_size=8)
    assert world.dp == 8
    # Fewer replicas than the devices hold: only those whose time is known.
    assert {found for found in order(world) if found[2] != 8} == {
        (8, 16, 4),
        (8, 32, 2),
        (8, 64, 1),
    }


def test_each_step_time_is_asked_for_once():
    asked = []

    def source(batch):
        asked.append(batch)

    plan(50000, global_batch=64, run=RunKnowledge("r", step_times=source, sizes=(2,)))
    assert len(asked) == len(set(asked)) > 5


def test_alternatives_without_a_step_are_left_out():
    # At dp 2 each rank has 5 samples, which the loader drops at micro-batch 8.
    found = plan(10, global_batch=8, micro_batch=4, accumulation=1, drop_last="loader")
    assert found.dp == 2
    assert (8, 1, 1) in order(found)
    assert (1, 1, 8) in order(found)
    short = plan(5, global_batch=8, micro_batch=1, dp=1, drop_last="loader")
    assert (8, 1, 1) not in order(short)
    assert (4, 2, 1) in order(short)


def test_what_does_not_fit_comes_last_and_is_not_chosen():
    run = RunKnowledge("r", fits=lambda m: m <= 4 if m != 6 else None)
    found = plan(1000, global_batch=24, dp=2, run=run)
    assert (found.micro_batch, found.fits) == (4, True)
    assert "the largest micro-batch that fits in memory" in found.notes[0]
    assert order(found) == [(3, 4, 2), (2, 6, 2), (1, 12, 2), (6, 2, 2), (12, 1, 2)]


def test_known_times_go_before_sizes():
    times = {Batch(2, 6, 2): 90.0, Batch(6, 2, 2): 100.0, Batch(12, 1, 2): 10.0}

    def source(batch):
        ms = times.get(batch)
        return ms and StepTime(ms, (ms - 1, ms + 1), 90, "predicted")

    run = RunKnowledge("r", step_times=source, fits=lambda m: m < 12)
    found = plan(2400, global_batch=24, dp=2, run=run)
    assert (found.micro_batch, found.accumulation) == (2, 6)
    assert order(found)[0] == (6, 2, 2)
    assert found.alternatives[0].training_time_s == pytest.approx(10.0)
    assert found.alternatives[0].training_time_interval_s == pytest.approx((9.9, 10.1))
    # It is the fastest, and does not fit.
    assert order(found)[-1] == (12, 1, 2)


def test_a_run_fills_in_what_is_left_open():
    run = run_of(level(1, 8), level(4, 8), level(2, 8))
    found = plan(1000, run=run)
    assert (found.micro_batch, found.accumulation, found.dp) == (8, 1, 4)
    # The largest dp that divides the batch.
    assert plan(1000, global_batch=18, run=run, accumulation=1).dp == 2


def test_what_fits_comes_from_the_curve():
    found = curve(micro_batches(10**6, 10**6, 10**6, unfit=8))
    run = run_of(level(1, 1), micro_batches=found)
    assert [run.fits(m) for m in (1, 3, 4, 5, 7, 8, 100)] == [
        *(True, True, True),
        *(None, None),
        *(False, False),
    ]
    assert run_of(level(1, 1)).fits(1) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Neither --global-batch nor --micro-batch"),
        ({"micro_batch": 0}, "--micro-batch 0 is below 1"),
        ({"global_batch": 8, "accumulation": -1}, "--accumulate -1 is below 1"),
        ({"micro_batch": 1, "drop_last": "all"}, "--drop-last all is unknown"),
        ({"micro_batch": 1, "window": "long"}, "--window long"),
        ({"micro_batch": 1, "shard": "batches", "drop_last": "sampler"}, "nothing to act on"),
        ({"micro_batch": 1, "step_ms": 0.0}, "--step-ms 0"),
        ({"micro_batch": 1, "step_ms": float("nan")}, "--step-ms nan"),
        ({"micro_batch": 1, "startup_s": -1.0}, "--startup-s -1"),
        ({"micro_batch": 1, "evaluate_every": 5}, "--evaluation-s"),
        ({"micro_batch": 1, "checkpoint_every": 5}, "--checkpoint-s"),
        ({"micro_batch": 2000, "drop_last": "loader"}, "the loader drops 1000"),
    ],
)
def test_input_that_is_refused(options, words):
    assert words in refused(**options)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    return ended.value.code, *capsys.readouterr()


def test_the_command_prints_the_keys_of_the_contract(capsys):
    code, out, err = call(
        capsys,
        *[
            "--samples",
            "1000",
            "--epochs",
            "2",
            "--global-batch",
            "10",
            "--accumulate",
            "2",
            "--json",
        ],
    )
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["training_time_s"] is None
    for key, value in {
        "global_batch": 10,
        "micro_batch": 5,
        "accumulation": 2,
        "dp": 1,
        "micro_steps_per_epoch": 200,
        "optimizer_steps_per_epoch": 100,
        "total_optimizer_steps": 200,
        "samples_repeated": 0,
        "samples_dropped": 0,
        "rounding": [],
    }.items():
        assert found[key] == value
    assert found["alternatives"][0]["micro_batch"] == 10


def test_the_command_reads_well(capsys):
    code, out, err = call(
        capsys,
        *[
            "--samples",
            "88492",
            "--epochs",
            "3",
            "--micro-batch",
            "160",
            "--dp",
            "4",
            "--accumulate",
            "2",
        ],
        *["--drop-last", "sampler", "--step-ms", "120", "--startup-s", "60"],
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "global batch 1280 = micro-batch 160 x accumulation 2 x dp 4" in out
    assert re.search(r"optimizer steps +70 +210", out)
    assert "training time: 1 min 25 s" in out
    assert "  210 steps of 120 ms (given by --step-ms) + start-up 1 min" in out
    assert "rounding: windows of 2 leave 1 of 139 micro-steps over" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epochs 1 --micro-batch 1", "--samples"),
        ("--samples ten --epochs 1", "'ten' is not a valid integer"),
        ("--samples 9 --epochs 1 --micro-batch 1 --step-ms 5 --run runs/x", "both tell"),
        ("--samples 9 --epochs 1 --global-batch 256 --micro-batch 2 --dp 7", "2 x 18 x 7 = 252"),
    ],
)
def test_wrong_usage_takes_two_lines(capsys, arguments, words):
    code, out, err = call(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) <= 2


def test_drop_last_without_a_word_is_both(capsys):
    _, out, _ = call(
        capsys,
        *[
            "--samples",
            "10",
            "--epochs",
            "1",
            "--micro-batch",
            "1",
            "--dp",
            "4",
            "--drop-last",
            "--json",
        ],
    )
    found = json.loads(out)
    assert (found["samples_processed"], found["samples_dropped"]) == (8, 2)


def test_a_run_that_is_not_there_is_unusable_input(capsys, tmp_path):
    code, _, err = call(
        capsys, *f"--samples 9 --epochs 1 --micro-batch 1 --run {tmp_path}/no".split()
    )
    assert code == 3
    assert len(err.splitlines()) <= 2


def test_alternatives_with_times_fit_80_columns():
    run = run_of(level(2, 4), micro_batches=curve(micro_batches(10**6, 2 * 10**6, 4 * 10**6)))
    text = report.render(plan(10**6, 90, global_batch=256, dp=2, micro_batch=4, run=run))
    assert max(map(len, text.splitlines())) <= 80
    assert "re-expressed" in text


def test_sources_of_alternatives_take_a_word_and_a_legend():
    sources = {
        8: "measured at dp2-acc1",
        4: "measured at dp2-acc1, re-expressed at accumulation 8 and micro-batch 4",
        2: "predicted",
        1: "predicted, beyond what was measured",
    }

    def source(batch):
        words = sources.get(batch.micro_batch)
        return words and StepTime(9876.5 * batch.accumulation, None, None, words)

    run = RunKnowledge("r", step_times=source, sizes=(1,), fits=lambda m: True)
    text = report.render(plan(10**7, 90, global_batch=16, micro_batch=16, dp=1, run=run))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    start = next(k for k, line in enumerate(lines) if line.startswith("micro-batch x acc."))
    # One line for each, then what each word means, without those that do not occur.
    rows, legend = lines[start + 2 : start + 6], lines[start + 6 :]
    words = ["measured", "re-expressed", "predicted", "extrapolated"]
    assert [row.split()[-1] for row in rows] == words
    assert [line.split(":")[0] for line in legend] == words

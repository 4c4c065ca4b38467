"""Faults planted on purpose."""

import time

import pytest

from ddp_profiler.errors import UsageError
from ddp_profiler.workload.plant import (
    PARTS,
    Plant,
    PlantedClock,
    PlantedLoss,
    Planter,
    check_plants,
    parse_plants,
    planted_clock,
)


def test_parse():
    assert parse_plants([]) == ()
    assert parse_plants(
        ["part=backward,ms=30", "part=optimizer, ms=0.5,rank=1,every=10,level_dp=2"]
    ) == (
        Plant("backward", 30.0),
        Plant("optimizer", 0.5, rank=1, every=10, level_dp=2),
    )


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("", "'' is not of the form key=value"),
        ("backward", "'backward' is not of the form key=value"),
        ("part=backward", "ms is missing"),
        ("ms=3", "part is missing"),
        (
            "part=update,ms=3",
            "part=update is none of data, forward, between, backward, copy, optimizer",
        ),
        ("part=data,ms=fast", "ms=fast is not a number above 0"),
        ("part=data,ms=0", "ms=0 is not a number above 0"),
        ("part=data,ms=inf", "ms=inf is not a number above 0"),
        ("part=data,ms=3,ms=4", "ms is given twice"),
        ("part=data,ms=3,step=4", "there is no option step"),
        ("part=data,ms=3,rank=-1", "rank=-1 is not a whole number of at least 0"),
        ("part=data,ms=3,every=0", "every=0 is not a whole number of at least 1"),
        ("part=data,ms=3,level_dp=two", "level_dp=two is not a whole number of at least 1"),
        ("loss=tp", "loss=tp is none of dp, accumulation, dp*accumulation, nor {}"),
        ("loss=", "loss= is none of dp, accumulation, dp*accumulation, nor {}"),
        ("loss=0", "loss=0 is none of dp, accumulation, dp*accumulation, nor {}"),
        ("loss=nan", "loss=nan is none of dp, accumulation, dp*accumulation, nor {}"),
        ("loss=2,rank=1", "loss=2,rank=1 is none of dp, accumulation, dp*accumulation, nor {}"),
        ("part=data,ms=3,loss=2", "there is no option loss"),
        ("clock=5", "rank is missing"),
        ("clock=5,rank=1,ppm=fast", "ppm=fast is not a number"),
        ("clock=5,rank=1,every=2", "there is no option every"),
        ("sync=never", "sync=never is not always"),
        ("sync=always,rank=1", "sync=always,rank=1 is not always"),
    ],
)
def test_refused(spec, what):
    with pytest.raises(UsageError) as caught:
        parse_plants([spec])
    what = what.replace("{}", "a number other than 0")
    first, remedy = str(caught.value).splitlines()
    assert first == f"Planted fault {spec!r}: {what}."
    assert remedy.startswith("Give it as part=PART")


def test_reducing_in_every_micro_step():
    assert Planter(parse_plants(["sync=always"]), rank=0).always_syncs
    assert not Planter(parse_plants(["loss=dp"]), rank=0).always_syncs


def test_applies_to_its_part_rank_and_steps():
    plant = Plant("data", 1.0, rank=1, every=3)
    assert [step for step in range(8) if plant.applies("data", 1, step)] == [0, 3, 6]
    assert not plant.applies("data", 0, 0)
    assert not plant.applies("forward", 1, 0)
    assert all(Plant("data", 1.0).applies("data", rank, 5) for rank in range(3))


def test_planter_waits_for_the_sum_of_what_applies():
    slept = []
    plants = parse_plants(
        [
            "part=data,ms=20",
            "part=data,ms=5,every=2",
            "part=data,ms=100,rank=0",
            "part=optimizer,ms=1",
        ]
    )
    planter = Planter(plants, rank=1, sleep=slept.append)
    assert [planter.ms("data", step) for step in range(3)] == [25.0, 20.0, 25.0]
    for step in range(2):
        for part in PARTS:
            planter.delay(part, step)
    assert slept == [0.025, 0.001, 0.020, 0.001]


def test_planter_does_nothing_where_nothing_is_planted():
    slept = []
    planter = Planter(parse_plants(["part=data,ms=20,every=2"]), rank=0, sleep=slept.append)
    planter.delay("forward", 0)
    planter.delay("data", 1)
    assert slept == []
    assert planter.ms("forward", 0) == 0
    with pytest.raises(KeyError):
        planter.delay("forwards", 0)


def test_level_dp_limits_a_plant_to_one_level():
    plants = parse_plants(["part=data,ms=20,level_dp=2"])
    assert Planter(plants, 0, dp=2).ms("data", 0) == 20
    assert Planter(plants, 0, dp=4).ms("data", 0) == 0
    assert Planter(plants, 0).ms("data", 0) == 0


def test_planted_clock():
    plants = parse_plants(["clock=-5000,rank=1,ppm=50,real_ms=3", "clock=1,rank=2"])
    assert planted_clock(plants, 0) is None
    assert planted_clock(plants, 1) == PlantedClock(1, -5000.0, ppm=50.0, real_ms=3.0)
    assert planted_clock(plants, 2) == PlantedClock(2, 1.0)
    assert Planter(plants, 1).ms("data", 0) == 0


@pytest.mark.parametrize(
    ("specs", "what"),
    [
        (["part=data,ms=1,rank=2"], "rank 2, and there are 2 ranks"),
        (["clock=1,rank=7"], "rank 7, and there are 2 ranks"),
        (["part=data,ms=1,level_dp=4"], "dp 4, and no level has it"),
        (["clock=1,rank=1", "clock=2,rank=1"], "rank 1 is planted twice"),
    ],
)
def test_what_can_fall_on_nothing_is_refused(specs, what):
    with pytest.raises(UsageError, match=what):
        check_plants(parse_plants(specs), 2, (1, 2))


def test_what_can_apply_passes():
    specs = ["part=data,ms=1,rank=1,level_dp=2", "clock=1,rank=1", "loss=dp", "sync=always"]
    check_plants(parse_plants(specs), 2, (1, 2))


def test_planter_sleeps_for_real():
    planter = Planter(parse_plants(["part=optimizer,ms=30"]), rank=0)
    begin = time.perf_counter()
    for step in range(3):
        planter.delay("optimizer", step)
    assert 0.085 < time.perf_counter() - begin < 0.5


@pytest.mark.parametrize(
    ("spec", "factor"),
    [
        ("loss=dp", 4),
        ("loss=accumulation", 3),
        ("loss = dp * accumulation", 12),
        ("loss=2.5", 2.5),
        ("loss=-1", -1),
    ],
)
def test_planted_loss(spec, factor):
    planter = Planter(parse_plants([spec, "part=data,ms=20,rank=1"]), rank=0, dp=4)
    assert planter.loss_factor(4, 3) == factor
    assert planter.ms("data", 0) == 0


def test_planted_losses_multiply_and_none_is_1():
    assert Planter((PlantedLoss("dp"), PlantedLoss(0.5)), 0).loss_factor(6, 1) == 3
    assert Planter(parse_plants(["part=data,ms=20"]), 0).loss_factor(6, 2) == 1

"""Comparisons of synthetic launches with known effects: what is called a change, and how often."""

import math

import numpy as np
import pytest

from ddp_profiler.analysis.comparison import (
    CANNOT_TELL,
    ERROR_RATE,
    EXPOSED_COMM,
    FASTER,
    NO_DIFFERENCE,
    SLOWER,
    LaunchFigures,
    check,
    compare_levels,
)
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.two_samples import holm, samples

TYPICAL_MS = {
    "data": 2.0,
    "forward": 40.0,
    "backward": 76.0,
    "exposed_wait": 1.0,
    "exposed_transfer": 5.0,
    "exposed_copy": 0.5,
    "optimizer": 3.0,
    "other": 0.5,
}
STEP_MS = sum(TYPICAL_MS.values())


def launch(random, factor=1.0, part_sd=0.02, planted=None):
    """A launch in which all parts are slower by a common factor, and each by its own noise."""
    parts = dict.fromkeys(PARTS, 0.0)
    for part, ms in TYPICAL_MS.items():
        parts[part] = ms * factor * random.lognormal(0, part_sd) + (planted or {}).get(part, 0.0)
    # Plain and instrumented steps are not the same steps.
    return LaunchFigures(sum(parts.values()) * random.lognormal(0, 0.003), parts)


def compare(base, new, **settings):
    (level,) = compare_levels({"dp2": base}, {"dp2": new}, **settings)
    return level


def flagged(level):
    return any(row.verdict in (SLOWER, FASTER) for row in (level.step, *level.parts))


LAUNCH_FACTORS = {
    "17 % between launches": lambda random: random.lognormal(0, 0.17),
    "two modes": lambda random: random.choice([1.0, 1.9]) * random.lognormal(0, 0.01),
    "now and then a slow one": lambda random: (
        random.lognormal(0, 0.01) * (1.5 if random.random() < 0.1 else 1)
    ),
    "quiet": lambda random: random.lognormal(0, 0.005),
}


@pytest.mark.parametrize("name", LAUNCH_FACTORS)
@pytest.mark.parametrize("launches", [3, 5])
def test_same_code_is_seldom_called_a_change(name, launches):
    random = np.random.default_rng(1)
    factor = LAUNCH_FACTORS[name]
    trials = 400

    def side():
        return [launch(random, factor(random)) for _ in range(launches)]

    count = sum(flagged(compare(side(), side())) for _ in range(trials))
    # At a true rate of 1 % more than 12 of 400 come once in 5000 times.
    assert count <= 12, count
    assert ERROR_RATE <= 0.01


def test_without_correction_same_code_would_be_called_a_change():
    """The test above can fail: what it holds comes from the correction."""
    random = np.random.default_rng(1)
    count = 0
    for _ in range(100):
        level = compare([launch(random) for _ in range(5)], [launch(random) for _ in range(5)])
        count += any(row.p_value < 0.05 for row in (level.step, *level.parts))
    assert count > 15


@pytest.mark.parametrize("part", ["data", "forward", "backward", "exposed_transfer", "optimizer"])
def test_ten_percent_are_caught_and_named(part):
    random = np.random.default_rng(2)
    planted = {part: 0.1 * STEP_MS}
    for _ in range(40):
        base = [launch(random, random.lognormal(0, 0.01)) for _ in range(5)]
        new = [launch(random, random.lognormal(0, 0.01), planted=planted) for _ in range(5)]
        level = compare(base, new)
        assert level.verdict == SLOWER
        assert level.causes == (part,)
        assert level.step.change_pct == pytest.approx(10, abs=3)
        assert level.explained_fraction == pytest.approx(1, abs=0.35)
        back = compare(new, base)
        assert (back.verdict, back.causes) == (FASTER, (part,))
        assert check([level], 5).outcome == "fails"
        assert check([back], 5).outcome == "holds"


def test_a_late_rank_is_two_parts_together():
    """The mean over two ranks halves its delay; the other half is the waiting of the other."""
    random = np.random.default_rng(3)
    planted = {"data": 0.05 * STEP_MS, "exposed_wait": 0.05 * STEP_MS}
    base = [launch(random, random.lognormal(0, 0.005)) for _ in range(5)]
    new = [launch(random, random.lognormal(0, 0.005), planted=planted) for _ in range(5)]
    level = compare(base, new)
    assert level.verdict == SLOWER
    assert set(level.causes) <= {"data", "exposed_wait"}
    assert level.explained_fraction >= 0.5


def test_a_part_that_moves_little_is_not_the_cause():
    random = np.random.default_rng(4)
    # Everything is slower by a tenth: no single part is more than its share but backward.
    base = [launch(random, 1.0, part_sd=0.003) for _ in range(5)]
    new = [launch(random, 1.1, part_sd=0.003) for _ in range(5)]
    level = compare(base, new)
    assert level.causes == ("backward",)
    assert level.explained_fraction == pytest.approx(76 / 128, abs=0.1)
    assert {p.name for p in level.parts if p.verdict == SLOWER} >= {"forward", "backward"}
    # One that goes the other way never is.
    new = [launch(random, 1.0, 0.003, {"backward": 20.0, "forward": -10.0}) for _ in range(5)]
    level = compare(base, new)
    assert (level.verdict, level.causes) == (SLOWER, ("backward",))
    assert next(p for p in level.parts if p.name == "forward").verdict == FASTER


@pytest.mark.parametrize(("launches", "least"), [(3, 120), (5, 155), (8, 165)])
def test_least_change_is_seen_in_nine_of_ten(launches, least):
    """What is printed as the smallest change that could have been seen is just that.

    3 launches do not know their own spread well: it is seen in about 7 of 10.
    """
    random = np.random.default_rng(5)
    sd = 0.02
    typical = [
        compare(
            [launch(random, random.lognormal(0, sd)) for _ in range(launches)],
            [launch(random, random.lognormal(0, sd)) for _ in range(launches)],
        ).step.least_seen_ms
        for _ in range(200)
    ]
    change = float(np.median(typical)) / STEP_MS
    seen = sum(
        compare(
            [launch(random, random.lognormal(0, sd)) for _ in range(launches)],
            [launch(random, (1 + change) * random.lognormal(0, sd)) for _ in range(launches)],
        ).verdict
        == SLOWER
        for _ in range(200)
    )
    assert least <= seen <= 197
    half = sum(
        compare(
            [launch(random, random.lognormal(0, sd)) for _ in range(launches)],
            [launch(random, (1 + change / 3) * random.lognormal(0, sd)) for _ in range(launches)],
        ).verdict
        == SLOWER
        for _ in range(200)
    )
    assert half < 60


def test_intervals_hold_zero_just_where_nothing_is_called():
    random = np.random.default_rng(6)
    seen = set()
    for planted in (0.0, 1.0, 2.0, 4.0, 16.0):
        for _ in range(10):
            level = compare(
                [launch(random, random.lognormal(0, 0.01)) for _ in range(5)],
                [
                    launch(random, random.lognormal(0, 0.01), planted={"backward": planted})
                    for _ in range(5)
                ],
            )
            for row in (level.step, *level.parts):
                low, high = row.interval_ms
                seen.add(row.verdict)
                assert (low <= 0 <= high) is (row.verdict == NO_DIFFERENCE)
                assert (row.p_adjusted <= ERROR_RATE) is (row.verdict != NO_DIFFERENCE)
                if row.interval_pct is not None:
                    assert (row.interval_pct[0] <= 0 <= row.interval_pct[1]) is (low <= 0 <= high)
    assert {SLOWER, NO_DIFFERENCE} <= seen


def test_one_launch_a_side_judges_nothing():
    random = np.random.default_rng(7)
    level = compare([launch(random)], [launch(random, 3.0)])
    assert level.verdict == CANNOT_TELL
    assert level.step.least_seen_ms is None
    assert all(part.verdict == CANNOT_TELL for part in level.parts)
    assert level.causes == ()
    assert check([level], 5).outcome == CANNOT_TELL
    # Under an assumption the step is judged, and its parts are not.
    level = compare([launch(random)], [launch(random, 1.3)], launch_sd_fraction=0.02)
    assert level.verdict == SLOWER
    assert all(part.verdict == CANNOT_TELL for part in level.parts)
    assert compare([launch(random)], [launch(random, 1.3)], launch_sd_fraction=0.17).verdict == (
        NO_DIFFERENCE
    )


def test_one_against_several_borrows_their_spread():
    random = np.random.default_rng(8)
    base = [launch(random, random.lognormal(0, 0.01)) for _ in range(6)]
    assert compare(base, [launch(random, 1.3)]).verdict == SLOWER
    assert compare(base, [launch(random, 1.005)]).verdict == NO_DIFFERENCE


def test_check_says_when_it_cannot_tell():
    random = np.random.default_rng(9)

    def side(factor=1.0):
        return [launch(random, factor * random.lognormal(0, 0.17)) for _ in range(5)]

    found = check([compare(side(), side())], 5)
    assert found.outcome == CANNOT_TELL
    assert found.launches_needed > 100
    quiet = compare(
        [launch(random, part_sd=0.001) for _ in range(5)],
        [launch(random, 1.03, part_sd=0.001) for _ in range(5)],
    )
    assert quiet.verdict == SLOWER
    assert check([quiet], 5).outcome == "holds"
    assert check([quiet], 2).outcome == "fails"


def test_wait_and_transfer_are_put_together_where_a_launch_could_not_tell_them_apart():
    random = np.random.default_rng(10)
    base = [launch(random) for _ in range(3)]
    cut = launch(random)
    cut.parts_ms["exposed_wait"] = None
    level = compare(base, [cut, *(launch(random) for _ in range(2))])
    names = [part.name for part in level.parts]
    assert EXPOSED_COMM in names
    assert not {"exposed_wait", "exposed_transfer"} & set(names)
    joined = next(part for part in level.parts if part.name == EXPOSED_COMM)
    assert joined.base_ms == pytest.approx(6, abs=0.5)


def test_who_is_late_is_told_where_it_changed():
    random = np.random.default_rng(11)

    def side(late):
        return [
            LaunchFigures(one.step_ms, one.parts_ms, late=late)
            for one in (launch(random) for _ in range(3))
        ]

    (note,) = compare(side(None), side((1, "data"))).notes
    assert "rank 1 (late in data) in NEW" in note
    assert "no rank in particular in BASE" in note
    assert compare(side((1, "data")), side((1, "data"))).notes == ()


def test_welch_by_hand():
    # Means 2 and 5, variances 1 and 4 of 3 launches each: error sqrt(5 / 3), t = 2.3238.
    found = samples(np.array([1.0, 2, 3]), np.array([3.0, 5, 7]))
    assert found.error == pytest.approx(math.sqrt(5 / 3))
    assert found.degrees == pytest.approx((5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2))
    from scipy.stats import ttest_ind

    assert found.p_value() == pytest.approx(ttest_ind([1, 2, 3], [3, 5, 7], equal_var=False).pvalue)


def test_equal_launches():
    assert samples(np.ones(3), np.ones(3)).p_value() == 1
    assert samples(np.ones(3), np.ones(3) * 2).p_value() == 0
    assert samples(np.ones(1), np.ones(1)) is None


def test_holm_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 0.05)
    # 0.005 x 4, 0.01 x 3, 0.03 x 2, and never below the one before.
    assert {k: round(v.adjusted, 3) for k, v in found.items()} == {
        "a": 0.03,
        "b": 0.06,
        "c": 0.06,
        "d": 0.02,
    }
    assert {k for k, v in found.items() if v.told} == {"a", "d"}
    assert found["b"].alpha == found["c"].alpha == pytest.approx(0.025)
    assert holm({}, 0.05) == {}

"""Levels packed on few nodes and spread over many, and the price of crossing nodes."""

from dataclasses import replace

import pytest

from ddp_profiler.analysis.findings import find
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.placement import largest, with_crossing
from ddp_profiler.analysis.statistics import Distribution, difference
from ddp_profiler.config import StudyConfig
from ddp_profiler.measure.topology import place_levels, plan_levels
from ddp_profiler.report import console, plots
from ddp_profiler.schema import RankPlace
from tests.unit.test_console import cells, make_level, make_summary


def places_of(*nodes):
    return tuple(
        RankPlace(r, 0, node, f"h{node}", "boot", "cpu", 17) for r, node in enumerate(nodes)
    )


def place(nodes, placement="both", **config):
    levels = plan_levels(StudyConfig(**config), len(nodes))
    return {v.id: v for v in place_levels(levels, places_of(*nodes), placement)}


TWO_BY_TWO = (0, 0, 1, 1)
THREE_BY_FOUR = (0,) * 4 + (1,) * 4 + (2,) * 4


def test_between_one_and_the_world_each_level_is_there_twice():
    levels = place(TWO_BY_TWO)
    assert [(v.id, v.placement, v.ranks) for v in levels.values()] == [
        ("dp1", "packed", (0,)),
        ("dp2", "packed", (0, 1)),
        ("dp2-spread", "spread", (0, 2)),
        ("dp4", "packed", (0, 1, 2, 3)),
    ]
    twin, spread = levels["dp2"], levels["dp2-spread"]
    assert spread == replace(twin, id="dp2-spread", placement="spread", ranks=(0, 2))


def test_spread_takes_ranks_of_all_nodes_in_turn_and_orders_them_node_by_node():
    levels = place(THREE_BY_FOUR, dp=(2, 4, 8, 10))
    assert levels["dp2-spread"].ranks == (0, 4)
    assert levels["dp4-spread"].ranks == (0, 1, 4, 8)
    assert levels["dp8-spread"].ranks == (0, 1, 2, 4, 5, 6, 8, 9)
    # Ten of twelve need all three nodes anyway.
    assert levels["dp10"].ranks == tuple(range(10))
    assert "dp10-spread" not in levels
    for level in levels.values():
        nodes = [THREE_BY_FOUR[rank] for rank in level.ranks]
        crossings = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        assert crossings == (len(set(nodes)) if len(set(nodes)) > 1 else 0)


def test_nodes_of_different_sizes():
    levels = place((0, 1, 1, 1), dp=(2, 3))
    # Rank 0 leads every level, so packed fills its node first: dp 2 needs both nodes.
    assert set(levels) == {"dp2", "dp3"}
    assert levels["dp3"].ranks == (0, 1, 2)


def test_ranks_that_are_dealt_out_to_nodes_like_cards():
    levels = place((0, 1, 0, 1), dp=(2,))
    assert (levels["dp2"].ranks, levels["dp2-spread"].ranks) == ((0, 2), (0, 1))


def test_choice_of_placement():
    assert list(place(TWO_BY_TWO, "packed")) == ["dp1", "dp2", "dp4"]
    spread = place(TWO_BY_TWO, "spread")
    assert list(spread) == ["dp1", "dp2-spread", "dp4"]
    assert [v.placement for v in spread.values()] == ["packed", "spread", "packed"]


def test_on_one_node_nothing_is_spread():
    assert list(place((0, 0, 0, 0))) == list(place((0, 0, 0, 0), "spread")) == ["dp1", "dp2", "dp4"]


def test_every_split_has_its_twin():
    levels = place(TWO_BY_TWO, dp=(2,), accumulate=(1, 4))
    assert list(levels) == ["dp2-acc1", "dp2-acc1-spread", "dp2-acc4", "dp2-acc4-spread"]


def steps(median, half=1.0):
    return Distribution(median + 5, median, median - 2, median + 9, (median - half, median + half))


def level(name, ms, half=1.0, transfer=1.0, **changes):
    spread = name.endswith("spread")
    return make_level(
        id=name,
        placement="spread" if spread else "packed",
        nodes=2 if spread else 1,
        step_ms=steps(ms, half),
        breakdown_ms={**dict.fromkeys(PARTS, 1.0), "exposed_transfer": transfer},
        **changes,
    )


def test_interval_of_a_difference():
    # Half-widths 3 and 4: 5 of the difference.
    assert difference(steps(100, 3), steps(60, 4)) == (40, (35, 45))
    assert difference(replace(steps(100), ci95=None), steps(60)) == (40, None)


def test_crossing_is_the_spread_step_less_the_packed_one():
    packed, spread, other = with_crossing(
        [level("dp2", 60, 4), level("dp2-spread", 100, 3), level("dp4", 300, dp=4)]
    )
    assert (spread.crossing_ms, spread.crossing_ci95_ms) == (40, (35, 45))
    assert spread.crossing_fraction == pytest.approx(0.4)
    assert {packed.crossing_ms, other.crossing_ms, packed.crossing_fraction} == {None}


@pytest.mark.parametrize("changes", [{"accumulation": 2}, {"micro_batch": 4}, {"dp": 4}])
def test_only_levels_of_one_setting_are_compared(changes):
    levels = with_crossing([level("dp2", 60), level("dp2-spread", 100, **changes)])
    assert [v.crossing_ms for v in levels] == [None, None]


def crossing_finding(*levels):
    return next((f for f in find(with_crossing(levels)) if f.id == "node-crossing"), None)


def test_the_finding_has_the_price_and_its_evidence():
    found = crossing_finding(level("dp2", 60), level("dp2-spread", 100, transfer=41.0))
    assert found.message == "Crossing nodes costs 40.0 ms a step (40.0 % of it) at dp 2."
    assert "on 1 node 60.0 ms, on 2 100 ms" in found.evidence
    assert "exposed transfer 1.00 and 41.0 ms" in found.evidence
    assert crossing_finding(level("dp2", 60)) is None


def test_a_difference_within_its_interval_is_none():
    levels = (level("dp2", 60, 4), level("dp2-spread", 63, 3))
    assert crossing_finding(*levels).message == (
        "Crossing nodes makes no measurable difference at dp 2."
    )
    text = console.render(make_summary(*with_crossing(levels)))
    assert cells(text, "of it crossing nodes") == ["-", "not", "measurable"]


def test_the_table_has_a_row_only_where_a_level_is_spread():
    text = console.render(
        make_summary(*with_crossing([level("dp2", 60), level("dp2-spread", 100)]))
    )
    assert cells(text, "of it crossing nodes") == ["-", "40.0", "40%"]
    assert "crossing" not in console.render(make_summary(level("dp2", 60)))


def study_of_four():
    """Efficiency 1, 0.9 packed, 0.2 spread, 0.8: the drop between 1 and 4 is not the spread's."""
    shares = {"dp1": 1.0, "dp2": 0.9, "dp2-spread": 0.2, "dp4": 0.8}
    return [
        level(
            name,
            80 / share,
            dp=int(name[2]),
            samples_per_s=100.0 * share * int(name[2]),
            speedup=share * int(name[2]),
            efficiency=share,
        )
        for name, share in shares.items()
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_the_scaling_curve_is_of_packed_levels(order):
    levels = study_of_four()[::order]
    drop = next(f for f in find(levels) if f.id == "efficiency-drop")
    assert drop.evidence in ("100.0 % to 90.0 %", "90.0 % to 80.0 %")
    left = plots.scaling(make_summary(*levels)).axes[0]
    drawn = [list(line.get_xdata()) for line in left.lines if line.get_label() != "ideal"]
    assert sorted(drawn) == [[1, 2, 4], [2]]


@pytest.mark.parametrize("order", [1, -1])
def test_the_packed_level_stands_for_the_largest_dp(order):
    levels = [v for v in study_of_four() if v.dp <= 2][::order]
    assert largest(levels).id == "dp2"
    terms = dict.fromkeys(("bare", "data", "residual", "measured"), 1.0)
    drawn = plots.waterfall(make_summary(*(replace(v, waterfall_ms=terms) for v in levels)))
    assert "to dp2:" in drawn.get_suptitle()
    assert "is 180.0 samples/s" in plots.scaling(make_summary(*levels)).get_suptitle()


def test_splits_are_compared_within_one_placement():
    def split(name, accumulation, ms):
        return level(name, ms, accumulation=accumulation, micro_batch=8 // accumulation)

    levels = [
        split("dp2-acc1", 1, 60),
        split("dp2-acc2", 2, 90),
        split("dp2-acc1-spread", 1, 200),
        split("dp2-acc2-spread", 2, 210),
    ]
    found = [f.message for f in find(levels) if f.id == "accumulation-cost"]
    assert [text.split(", micro-batch")[0] for text in found] == [
        "At dp 2 and global batch 16",
        "At dp 2 spread over nodes and global batch 16",
    ]
    assert "46 % more" in found[0]  # means 95 and 65

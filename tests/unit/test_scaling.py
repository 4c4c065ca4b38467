"""Efficiency, POP factors and findings on results with known answers."""

import pytest

from ddp_profiler.analysis.findings import _LOSSES as LOSSES
from ddp_profiler.analysis.findings import find
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.scaling import scale, sharpest_drop
from ddp_profiler.analysis.statistics import Distribution
from tests.unit.test_console import make_level

# Throughput of each GPU at 1, 2, 4, 8 GPUs of one node, and on two nodes of 8 (pytorch#17159).
REPORTED = {1: 122, 2: 115, 4: 111, 8: 110, 16: 80}


@pytest.fixture
def reported():
    return scale({dp: dp * each for dp, each in REPORTED.items()})


def test_reported_throughputs_give_the_known_efficiencies(reported):
    assert [round(s.efficiency * 100, 1) for s in reported] == [100.0, 94.3, 91.0, 90.2, 65.6]
    assert [round(s.speedup, 2) for s in reported] == [1.0, 1.89, 3.64, 7.21, 10.49]


def test_the_drop_is_where_the_second_node_begins(reported):
    assert sharpest_drop({s.dp: s.efficiency for s in reported}) == (8, 16)


def test_without_dp_1_there_is_no_efficiency():
    assert [s.efficiency for s in scale({2: 10.0, 4: 19.0})] == [None, None]
    assert sharpest_drop({2: None, 4: None}) is None


def test_the_finding_names_the_drop_and_the_class_of_its_reason(reported):
    levels = [
        make_level(
            id=f"dp{s.dp}",
            dp=s.dp,
            nodes=2 if s.dp > 8 else 1,
            speedup=s.speedup,
            efficiency=s.efficiency,
            step_ms=steps_of(8 / REPORTED[s.dp] * 1e3),
        )
        for s in reported
    ]
    found = [f for f in find(levels) if f.id == "efficiency-drop"]
    assert len(found) == 1
    assert "from dp 8 to dp 16" in found[0].message
    assert "network between nodes" in found[0].message
    assert found[0].evidence == "90.2 % to 65.6 %"
    assert found[0].severity == "warning"


def steps_of(ms: float, spread: float = 0.01) -> Distribution:
    return Distribution(ms, ms, ms, ms, (ms * (1 - spread), ms * (1 + spread)))


def test_a_drop_within_the_intervals_is_no_finding():
    levels = [
        make_level(
            id=f"dp{n}", dp=n, speedup=n * e, efficiency=e, step_ms=steps_of(100 / e, spread=0.3)
        )
        for n, e in ((1, 1.0), (2, 0.8))
    ]
    assert [f for f in find(levels) if f.id == "efficiency-drop"] == []


@pytest.mark.parametrize(("spread", "words"), [(0.01, "50 % more"), (0.4, "no measurable")])
def test_splits_of_one_global_batch_are_compared_by_their_intervals(spread, words):
    levels = [
        make_level(
            id=f"dp1-mb{16 // k}-acc{k}",
            dp=1,
            micro_batch=16 // k,
            accumulation=k,
            global_batch=16,
            step_ms=steps_of(ms, spread),
        )
        for k, ms in ((1, 100.0), (4, 150.0))
    ]
    found = [f.message for f in find(levels) if f.id == "accumulation-cost"]
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"forward": 20, "backward": 40}, "limited by compute"),
        ({"data": 60}, "limited by input"),
        ({"optimizer": 60}, "limited by the optimizer"),
        ({"other": 60}, "limited by what lies between"),
        ({"exposed_copy": 60}, "limited by copying"),
        ({"exposed_wait": 25, "exposed_transfer": 24, "backward": 40}, "(waiting)"),
        ({"exposed_wait": 24, "exposed_transfer": 25, "backward": 40}, "(exposed transfer)"),
    ],
)
def test_the_largest_group_of_parts_limits_a_level(parts, words):
    breakdown = {**dict.fromkeys(PARTS, 0.1), **parts}
    limits = [f.message for f in find([make_level(breakdown_ms=breakdown)]) if f.id == "limit"]
    assert len(limits) == 1
    assert words in limits[0]


def test_transfer_that_holds_waiting_is_not_called_transfer_alone():
    parts = {**dict.fromkeys(PARTS, 0.1), "exposed_wait": None, "exposed_transfer": 60}
    falls = {**dict.fromkeys(LOSSES, 0.0), "bare": 30.0, "measured": 90.0, "residual": 0.0}
    falls |= {"exposed_transfer": 60.0, "exposed_wait": None}
    found = {f.id: f.message for f in find([make_level(breakdown_ms=parts, waterfall_ms=falls)])}
    assert "or ranks wait for the last one" in found["limit"]
    assert "the largest share is exposed transfer, or waiting." in found["dominant-loss"]


def test_no_drop_no_finding():
    levels = [make_level(id=f"dp{n}", dp=n, speedup=n * 1.0, efficiency=1.0) for n in (1, 2, 4)]
    assert [f for f in find(levels) if f.id == "efficiency-drop"] == []

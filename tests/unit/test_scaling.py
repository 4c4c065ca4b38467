"""Efficiency, POP factors and findings on results with known answers."""

import pytest

from ddp_profiler.analysis.findings import find
from ddp_profiler.analysis.scaling import scale, sharpest_drop
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
    before, after = sharpest_drop(reported)
    assert (before.dp, after.dp) == (8, 16)


def test_without_dp_1_there_is_no_efficiency():
    assert [s.efficiency for s in scale({2: 10.0, 4: 19.0})] == [None, None]
    assert sharpest_drop(scale({2: 10.0, 4: 19.0})) is None


def test_the_finding_names_the_drop_and_the_class_of_its_reason(reported):
    levels = [
        make_level(
            id=f"dp{s.dp}",
            dp=s.dp,
            nodes=2 if s.dp > 8 else 1,
            speedup=s.speedup,
            efficiency=s.efficiency,
        )
        for s in reported
    ]
    found = [f for f in find(levels) if f.id == "efficiency-drop"]
    assert len(found) == 1
    assert "from dp 8 to dp 16" in found[0].message
    assert "network between nodes" in found[0].message
    assert found[0].evidence == "90.2 % to 65.6 %"
    assert found[0].severity == "warning"


def test_no_drop_no_finding():
    levels = [make_level(id=f"dp{n}", dp=n, speedup=n * 1.0, efficiency=1.0) for n in (1, 2, 4)]
    assert [f for f in find(levels) if f.id == "efficiency-drop"] == []

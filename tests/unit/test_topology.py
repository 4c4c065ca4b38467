"""Ranks as a launcher's variables give them, and the levels of a study."""

import pytest

from ddp_profiler.config import StudyConfig
from ddp_profiler.errors import UsageError
from ddp_profiler.measure.topology import Topology, default_dp, plan_levels, read_topology

LAUNCHED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher_a_process_is_alone():
    assert read_topology({"HOME": "/"}) == Topology(0, 0, 1, 1, launched=False)


def test_torchrun():
    assert read_topology(LAUNCHED) == Topology(5, 1, 8, 4, launched=True)


def test_local_variables_default_to_one_node():
    some = {k: v for k, v in LAUNCHED.items() if not k.startswith("LOCAL_")}
    assert read_topology(some) == Topology(5, 5, 8, 8, launched=True)


def test_one_launched_rank_needs_no_address():
    assert read_topology({"RANK": "0", "WORLD_SIZE": "1"}).launched


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "WORLD_SIZE is set to 8 but RANK is not set."),
        ({"WORLD_SIZE": None}, "RANK is set to 5 but WORLD_SIZE is not set."),
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8 contradict"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=8 contradict"),
        ({"WORLD_SIZE": "0"}, "RANK=5 and WORLD_SIZE=0 contradict"),
        ({"RANK": "first"}, "RANK='first' is not a whole number."),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number."),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4 contradict"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 and LOCAL_WORLD_SIZE=4 contradict"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=9 contradict"),
        ({"RANK": "0"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=4 contradict"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=8 but MASTER_ADDR is not set."),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=8 but MASTER_PORT is not set."),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number."),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
    ],
)
def test_contradictions(changes, message):
    environ = {k: v for k, v in {**LAUNCHED, **changes}.items() if v is not None}
    with pytest.raises(UsageError) as raised:
        read_topology(environ)
    assert message in raised.value.message
    assert "torchrun" in raised.value.remedy


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (12, (1, 2, 4, 8, 12)),
        (1024, tuple(1 << k for k in range(11))),
    ],
)
def test_default_dp(world_size, expected):
    assert default_dp(world_size) == expected


def plan(dp, accumulate, micro_batch, world_size):
    config = StudyConfig(dp=dp, accumulate=accumulate, micro_batch=micro_batch)
    return plan_levels(config, world_size)


def test_each_dp_with_each_accumulation():
    levels = plan((1, 4), (1, 3), 8, 6)
    assert [(v.id, v.dp, v.accumulation, v.global_batch, v.ranks) for v in levels] == [
        ("dp1-acc1", 1, 1, 8, (0,)),
        ("dp1-acc3", 1, 3, 24, (0,)),
        ("dp4-acc1", 4, 1, 32, (0, 1, 2, 3)),
        ("dp4-acc3", 4, 3, 96, (0, 1, 2, 3)),
    ]


def test_ids_are_short_without_accumulation():
    assert [v.id for v in plan(None, (1,), 8, 4)] == ["dp1", "dp2", "dp4"]
    assert [v.id for v in plan(None, (4,), 8, 1)] == ["dp1-acc4"]


def test_ids_are_unique():
    levels = plan(None, (1, 2, 4), 8, 16)
    assert len({v.id for v in levels}) == len(levels) == 15


def test_dp_beyond_the_world():
    with pytest.raises(UsageError, match=r"--dp 4,16 is larger than the world of 2 ranks\.") as e:
        plan((1, 4, 16), (1,), 8, 2)
    assert "--nproc_per_node 16" in e.value.remedy

"""Evidence from the machine: what is said of one rank, of all ranks, and when nothing is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.analysis.machine import (
    explain,
    find_machine,
    foreign_fraction,
    run_delay_ms_per_s,
    waiting_share,
)
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.schema import GpuUse, LevelFacts, MachineUse
from tests.unit.test_summary import SOURCES, rank_columns, run_info

FAST_GPU = GpuUse(1980, 1980, {}, 500, 700, 60, 5, 5, 16, 16)
WELL = MachineUse(
    rank=0,
    wall_ms=10_000,
    user_ms=8000,
    system_ms=1000,
    run_delay_ms=30,
    preemptions=50,
    major_faults=0,
    steal_fraction=0.001,
    busy_fraction=0.5,
    throttled_ms=0,
    throttled_fraction=0,
    cpu_mhz=2600,
    cores=2,
    affinity="0-1",
    threads=4,
    gpu=FAST_GPU,
)


def ranks(*uses):
    return [replace(use, rank=rank) for rank, use in enumerate(uses)]


def gpu(**changes):
    return replace(WELL, gpu=replace(FAST_GPU, **changes))


CASES = [
    (
        replace(WELL, run_delay_ms=2100, busy_fraction=0.9),
        "stood 210 ms/s without a core (others 3), other processes used 45 % of its cores",
    ),
    # Its own threads fill its cores: nobody else is to be named.
    (
        replace(WELL, run_delay_ms=2100, busy_fraction=0.5),
        "stood 210 ms/s without a core (others 3)",
    ),
    (replace(WELL, steal_fraction=0.12), "CPU steal 12 % (others 0.1 %)"),
    (replace(WELL, cores=1, affinity="0"), "may use 1 core: 0 (others 2)"),
    (replace(WELL, threads=2), "2 threads (others 4)"),
    (
        replace(WELL, throttled_ms=3000, throttled_fraction=0.35),
        "cgroup throttled in 35 % of its periods (others 0 %)",
    ),
    (replace(WELL, cpu_mhz=1200), "CPU clock 1200 MHz (others 2600)"),
    (replace(WELL, major_faults=1200), "read memory from storage 120 times/s (others 0)"),
    (
        gpu(sm_mhz=900, clock_reasons={"thermal": 0.5, "power cap": 1.0}, temperature_c=86),
        "SM clock 900 of 1980 MHz: power cap (500 of 700 W), thermal (86 °C) (others 1980)",
    ),
    (gpu(pcie_width=4), "PCIe x4 of x16 (others x16)"),
    (gpu(pcie_generation=3), "PCIe generation 3 of 5 (others 5)"),
]


@pytest.mark.parametrize(("bad", "phrase"), CASES)
@pytest.mark.parametrize("others", [1, 3])
def test_what_stands_out_is_said_of_that_rank_only(bad, phrase, others):
    uses = ranks(*[WELL] * others, bad)
    assert explain(others, uses) == (phrase,)
    assert all(explain(rank, uses) == () for rank in range(others))


@pytest.mark.parametrize(
    "slightly",
    [
        {"run_delay_ms": 500},  # 47 ms/s more
        {"steal_fraction": 0.04},
        {"steal_fraction": 0.5, "wall_ms": 40, "run_delay_ms": 0},  # fewer than five ticks
        {"throttled_ms": 50, "throttled_fraction": 0.04},
        {"cpu_mhz": 2400},
        {"major_faults": 90},
        {"preemptions": 5000},  # the time without a core says it better
        {"cores": 4},
        {"threads": 8},
        {"gpu": replace(FAST_GPU, sm_mhz=1900, clock_reasons={"power cap": 1.0})},
        {"gpu": None},
    ],
)
def test_nothing_is_said_where_nothing_stands_out(slightly):
    uses = ranks(WELL, WELL, replace(WELL, **slightly))
    assert explain(2, uses) == ()


def test_a_rank_is_compared_with_what_the_others_suffer():
    busy = replace(WELL, run_delay_ms=5000)
    assert explain(0, ranks(replace(busy, run_delay_ms=9000), busy, busy)) == ()
    assert explain(0, ranks(replace(busy, run_delay_ms=10_500), busy, busy)) != ()


def test_preemptions_where_time_without_a_core_is_unknown():
    uses = ranks(*[replace(WELL, run_delay_ms=None)] * 2)
    uses[1] = replace(uses[1], preemptions=3050)
    assert explain(1, uses) == ("lost its core 305 times/s (others 5)",)


def test_several_causes_at_once():
    bad = replace(WELL, cores=1, affinity="0", run_delay_ms=4000)
    assert len(explain(1, ranks(WELL, bad))) == 2


def test_nobody_to_compare_with():
    bad = replace(WELL, run_delay_ms=9000, cores=1)
    assert explain(0, [bad]) == ()
    assert explain(7, ranks(WELL, bad)) == ()
    assert explain(0, []) == ()
    unknown = MachineUse(rank=1, wall_ms=0)
    assert explain(0, [bad, unknown]) == explain(1, [bad, unknown]) == ()


maybe = lambda strategy: st.none() | strategy  # noqa: E731
amount = st.floats(0, 1e7)
use = st.builds(
    MachineUse,
    rank=st.integers(0, 3),
    wall_ms=amount,
    user_ms=maybe(amount),
    system_ms=maybe(amount),
    run_delay_ms=maybe(amount),
    preemptions=maybe(st.integers(0, 10**6)),
    major_faults=maybe(st.integers(0, 10**6)),
    steal_fraction=maybe(st.floats(0, 1)),
    busy_fraction=maybe(st.floats(0, 1)),
    throttled_ms=maybe(amount),
    throttled_fraction=maybe(st.floats(0, 1)),
    cpu_mhz=maybe(amount),
    cores=maybe(st.integers(1, 300)),
    affinity=maybe(st.just("0")),
    threads=maybe(st.integers(1, 300)),
    gpu=maybe(
        st.builds(
            GpuUse,
            sm_mhz=maybe(amount),
            sm_mhz_max=maybe(amount),
            clock_reasons=st.dictionaries(st.sampled_from(["power cap", "thermal"]), amount),
            power_w=maybe(amount),
            power_limit_w=maybe(amount),
            temperature_c=maybe(st.integers(0, 120)),
            pcie_width=maybe(st.integers(0, 16)),
            pcie_generation=maybe(st.integers(0, 6)),
        )
    ),
)


@given(st.lists(use, max_size=5))
def test_whatever_is_known_it_is_never_said_of_all_ranks(uses):
    said = [explain(rank, ranks(*uses)) for rank in range(len(uses))]
    # Of the ranks, one at least is not worse than the median of the others.
    for about in ("without a core", "may use", "threads (", "CPU clock", "PCIe x"):
        if uses:
            assert not all(any(about in phrase for phrase in phrases) for phrases in said)


def test_shares():
    busy = replace(WELL, run_delay_ms=1000, busy_fraction=0.7)
    assert run_delay_ms_per_s(busy) == pytest.approx(100)
    assert waiting_share(busy) == pytest.approx(1000 / (1000 + 9000))
    # 9 of 20 s on its two cores are its own.
    assert foreign_fraction(busy) == pytest.approx(0.7 - 0.45)
    assert foreign_fraction(replace(busy, busy_fraction=0.2)) == 0


def summary_of(*uses):
    columns = {rank: rank_columns(65) for rank in range(len(uses))}
    facts = LevelFacts("dp2", 500, 2000, 2, (1000, 1000), SOURCES, machine=tuple(ranks(*uses)))
    return summarize_run(run_info(facts=(facts,)), columns)


def test_each_rank_has_its_machine():
    level = summary_of(WELL, replace(WELL, cores=1)).levels[0]
    assert [(r.machine.rank, r.machine.cores) for r in level.ranks] == [(0, 2), (1, 1)]
    (without,) = summarize_run(run_info(), {0: rank_columns(65)}).levels
    assert without.ranks[0].machine is None


@pytest.mark.parametrize(
    ("identity", "changes", "evidence"),
    [
        (
            "cpu-throttled",
            {"throttled_ms": 900, "throttled_fraction": 0.6},
            "limit reached in 60 % of its periods, 2 of 2 ranks",
        ),
        ("cpu-steal", {"steal_fraction": 0.08}, "8 % stolen, 2 of 2 ranks"),
        (
            "cores-shared",
            {"run_delay_ms": 3000},
            "300 ms/s without a core, 25 % of the time with work, 2 of 2 ranks",
        ),
        (
            "gpu-clocks",
            {"gpu": replace(FAST_GPU, sm_mhz=1400, clock_reasons={"power cap": 1.0})},
            "1400 of 1980 MHz: power cap, 2 of 2 ranks",
        ),
    ],
)
def test_what_all_ranks_suffer_is_a_finding(identity, changes, evidence):
    bad = replace(WELL, **changes)
    both = summary_of(bad, bad)
    found = [f for f in both.findings if f.id == identity]
    assert [f.evidence for f in found] == [evidence]
    assert found[0].message.startswith("dp2: ")
    # Of one rank in two the straggler's evidence tells.
    assert identity not in {f.id for f in summary_of(WELL, bad).findings}
    uses = ranks(bad, bad)
    assert explain(0, uses) == explain(1, uses) == ()


def test_all_is_well():
    assert list(find_machine(summary_of(WELL, WELL).levels)) == []
    slow_on_purpose = gpu(sm_mhz=1000, clock_reasons={"clocks set by the user": 1.0})
    assert list(find_machine(summary_of(slow_on_purpose, slow_on_purpose).levels)) == []


def test_levels_share_a_finding():
    bad = replace(WELL, steal_fraction=0.08)
    (level,) = summary_of(bad, bad).levels
    (found,) = find_machine([level, replace(level, id="dp4"), replace(level, id="dp8")])
    assert found.message.startswith("dp2, dp4 and dp8: ")
    assert found.evidence.startswith("dp2: 8 % stolen, 2 of 2 ranks; dp4: ")

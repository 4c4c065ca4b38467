"""The table of what each rank was doing."""

from ddp_profiler.report.phases import render, tells_more
from ddp_profiler.schema import Failure, RankPhase


def test_two_ranks():
    phases = [RankPhase(0, "node0", "level dp2", True), RankPhase(1, "node1", "start-up", False)]
    assert render([Failure(0, "level dp2", "late", "node0")], phases).splitlines() == [
        "  rank  host   last phase",
        "     0  node0  level dp2   failed first",
        "     1  node1  start-up    no sign of life",
    ]


def test_many_ranks_show_the_telling_ones_in_eight_rows():
    phases = [RankPhase(r, f"n{r // 8}", "level dp64", r != 50) for r in range(64)]
    phases[40] = RankPhase(40, "n5", "waiting", True)
    failures = [Failure(33, "level dp64", "x", "n4"), Failure(7, "level dp64", "x", "n0")]
    lines = render(failures, phases).splitlines()
    assert len(lines) == 1 + 8 + 1
    shown = [int(line.split()[0]) for line in lines[1:-1]]
    assert {33, 7, 40, 50} <= set(shown)
    assert shown == sorted(shown)
    assert lines[-1] == "  and 56 more, all in level dp64"
    assert "failed first" in next(line for line in lines if line.split()[0] == "33")


def test_long_names_are_cut():
    phases = [RankPhase(r, "h" * 300, "p" * 300, None) for r in range(2)]
    assert max(map(len, render([], phases).splitlines())) < 80


def test_no_table_where_all_failed_alike():
    phases = [RankPhase(r, "a", "check", True) for r in range(2)]
    alike = [Failure(r, "check", "no bf16", "a") for r in range(2)]
    assert not tells_more(alike, phases)
    assert tells_more(alike[:1], phases)
    assert tells_more([alike[0], Failure(1, "check", "other", "a")], phases)
    assert not tells_more(alike[:1], phases[:1])

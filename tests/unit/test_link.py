"""The rate of a link from its streams, and the ring bound beside the measured AllReduce."""

from dataclasses import replace

import pytest

from ddp_profiler.analysis.link import Link, link_of, ring_bound_ms
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.measure.link import neighbours
from ddp_profiler.report import console, plots
from ddp_profiler.schema import LevelFacts, LinkStreams, RankPlace, SpanKind, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_console import cells, make_level, make_summary
from tests.unit.test_plots import reductions, texts
from tests.unit.test_summary import SOURCES, run_info

# 10 MB in 160 ms: 0.5 Gbit/s. One stream of three was disturbed.
STREAMS = LinkStreams(1, 2, 10_000_000, (160_000_000, 480_000_000, 159_000_000))


def places_of(*nodes):
    return {r: RankPlace(r, 0, node, "host", "boot", "cpu", 17) for r, node in enumerate(nodes)}


def test_rate_is_bytes_over_the_median_time():
    link = link_of(STREAMS, places_of(0, 0, 1, 1))
    assert link == Link("node0-node1", "between_nodes", 0.5, "measured", (1, 2))


def test_a_declared_rate_is_about_links_between_nodes():
    declared = link_of(STREAMS, places_of(0, 0, 1, 1), 400.0)
    assert (declared.gbit_per_s, declared.source) == (400.0, "declared")
    within = link_of(STREAMS, places_of(0, 1, 1, 1), 400.0)
    assert within == Link("within node1", "within_node", 0.5, "measured", (1, 2))


def test_no_streams_no_link():
    assert link_of(None, places_of(0, 1), 400.0) is None
    assert link_of(replace(STREAMS, elapsed_ns=(0, 0, 0)), places_of(0, 0, 1)) is None


@pytest.mark.parametrize(("dp", "expected_ms"), [(2, 160), (4, 240), (8, 280)])
def test_ring_bound(dp, expected_ms):
    link = link_of(STREAMS, places_of(0, 0, 1, 1))
    assert ring_bound_ms(10_000_000, dp, link) == pytest.approx(expected_ms)


def test_neighbours_are_on_different_nodes_where_the_ring_has_such():
    assert neighbours((0, 1, 2, 3), {0: 0, 1: 0, 2: 0, 3: 1}) == (2, 3)
    assert neighbours((0, 4), {0: 0, 4: 1}) == (0, 4)
    assert neighbours((2, 3, 5), dict.fromkeys(range(6), 0)) == (2, 3)


@pytest.fixture
def columns():
    """Two buckets: 10 MB in 170 ms and 5 MB in 85 ms; and 10 MB of the sweep in 165 ms."""
    spans = Spans(micro_step=-1)
    for variant, index, nbytes, ms in (
        (Variant.ALLREDUCE, 0, 10_000_000, 165),
        (Variant.BUCKETS, 0, 10_000_000, 170),
        (Variant.BUCKETS, 1, 5_000_000, 85),
    ):
        place = {"variant": int(variant), "index": index, "bytes": nbytes}
        spans.add(SpanKind.ALLREDUCE, 0, ms, **place)
    return {0: spans.columns(), 1: spans.columns()}


def summary_of(columns, link=None, **settings):
    streams = replace(STREAMS, sender=0, receiver=1)
    facts = LevelFacts("dp2", 1, 15_000_000, 2, None, SOURCES, link=streams if link else None)
    ranks = tuple(replace(place, rank=r) for r, place in places_of(0, 1).items())
    return summarize_run(run_info(ranks=ranks, facts=(facts,), settings=settings), columns)


def test_bounds_stand_beside_the_measured_times(columns):
    found = summary_of(columns, link=True).levels[0].allreduce
    assert (found.link.name, found.link.ranks) == ("node0-node1", (0, 1))
    assert [(s.time_ms, s.ring_bound_ms) for s in found.sizes] == [(165, 160)]
    assert [(b.time_ms, b.ring_bound_ms) for b in found.buckets] == [(170, 160), (85, 80)]
    assert (found.buckets_total_ms, found.buckets_ring_bound_ms) == (255, 240)
    text = console.render(summary_of(columns, link=True))
    assert cells(text, "buckets alone, one by one") == ["255"]
    assert cells(text, "ring bound (node0-node1)") == ["240"]
    assert cells(text, "link's rate") == ["0.500", "Gbit/s"]
    assert "declared" not in text


def test_the_declared_rate_is_named_so(columns):
    summary = summary_of(columns, link=True, link_gbps=100)
    found = summary.levels[0].allreduce
    assert (found.link.gbit_per_s, found.link.source) == (100, "declared")
    assert found.buckets_ring_bound_ms == pytest.approx(1.2)
    assert cells(console.render(summary), "link's rate") == ["100", "Gbit/s"]
    assert cells(console.render(summary), "source of the rate") == ["declared"]


def test_a_record_without_streams_has_no_bound(columns):
    found = summary_of(columns).levels[0].allreduce
    assert found.link is found.buckets_ring_bound_ms is found.sizes[0].ring_bound_ms is None
    assert found.buckets_total_ms == 255
    assert "ring bound" not in console.render(summary_of(columns))


def test_each_link_has_a_row_of_its_own():
    between = Link("node0-node1", "between_nodes", 0.5, "measured", (0, 2))
    within = Link("within node0", "within_node", 20.0, "measured", (0, 1))
    levels = [
        make_level(allreduce=replace(reductions(2), link=link, buckets_ring_bound_ms=bound))
        for link, bound in ((within, 4.0), (between, 160.0))
    ]
    text = console.render(make_summary(make_level(id="dp1"), *levels))
    assert cells(text, "ring bound (within node0)") == ["-", "4.00", "-"]
    assert cells(text, "ring bound (node0-node1)") == ["-", "-", "160"]
    assert cells(text, "link's rate") == ["-", "20.0", "Gbit/s", "0.500", "Gbit/s"]


def test_the_picture_draws_the_bound_where_it_can_be_seen():
    result = reductions(2)
    near = max(size.busbw_gb_per_s for size in result.sizes) * 1.5
    for rate, seen in ((near, True), (near * 10, False)):
        link = Link("node0-node1", "between_nodes", rate * 8, "measured", (0, 1))
        figure = plots.allreduce(make_summary(make_level(allreduce=replace(result, link=link))))
        (axes,) = figure.axes
        label = f"ring bound, node0-node1: {plots._short(rate)} GB/s"
        drawn = [line.get_ydata()[0] for line in axes.lines if line.get_label() == label]
        assert drawn == ([pytest.approx(rate)] if seen else [])
        assert bool(axes.get_ylim()[1] > rate) is seen
        assert label + ("" if seen else " (above)") in texts(figure)

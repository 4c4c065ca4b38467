"""The network model on times made by a known law."""

import math

import numpy as np
import pytest

from ddp_profiler.predict.network import FORMS, Sample, fit

SIZES = [4096 * 4**k for k in range(8)]


def times(form, ranks, overhead=0.1, latency=0.05, gbit=1.0, noise=0.0, seed=0):
    """Samples of a law at each n."""
    random = np.random.default_rng(seed)
    law = FORMS[form]
    return [
        Sample(
            n,
            size,
            (overhead + law.hops(n) * latency + law.passes(n) * size * 8 / (gbit * 1e6))
            * math.exp(noise * random.standard_normal()),
        )
        for n in ranks
        for size in SIZES
    ]


@pytest.mark.parametrize(
    ("form", "backend", "between"),
    [("ring", "nccl", True), ("tree", "nccl", False), ("shared", "gloo", False)],
)
def test_the_law_is_found_and_carried_on(form, backend, between):
    model = fit(times(form, [2, 3, 4, 6], noise=0.01), backend, between)
    assert model.curve.form == form
    assert model.unit == "ranks"
    [expected] = [s.time_ms for s in times(form, [16]) if s.nbytes == SIZES[-1]]
    cost = model.cost(16, SIZES[-1])
    assert cost.latency_ms + cost.wire_ms == pytest.approx(expected, rel=0.03)


def test_held_out_errors_are_of_what_was_not_fitted():
    model = fit(times("ring", [2, 4, 8]), "nccl", True)
    by_form = {one.form: one.error for one in model.held_out}
    assert by_form["ring"] < 1e-6
    assert by_form["tree"] > 0.1
    assert model.error == 0.01


def test_one_number_of_ranks_tells_no_ring_from_a_tree():
    model = fit(times("tree", [4]), "nccl", True)
    assert {model.curve.form, *(curve.form for curve in model.rivals)} == {"ring", "tree"}
    # At the measured n they agree; beyond they do not.
    at_four = [model.cost(4, 2**24, c).wire_ms for c in (model.curve, *model.rivals)]
    at_64 = [model.cost(64, 2**24, c).wire_ms for c in (model.curve, *model.rivals)]
    assert max(at_four) / min(at_four) < 1.02
    assert max(at_64) / min(at_64) > 1.2


def test_gloo_between_nodes_is_a_ring():
    # Also where a tree would fit better.
    for ranks in ([2], [2, 4, 8]):
        model = fit(times("tree", ranks), "gloo", True)
        assert {model.curve.form, *(rival.form for rival in model.rivals)} == {"ring"}


def test_one_n_cannot_tell_overhead_from_latency():
    model = fit(times("ring", [2], overhead=0.5, latency=0.0), "gloo", True)
    assert model.unit == "sizes"
    small = [model.cost(64, 1, curve).latency_ms for curve in (model.curve, *model.rivals)]
    # Once: 0.5; in hops of which there are 63 times as many: 31.5. The truth is among them.
    assert min(small) == pytest.approx(0.5, rel=0.02)
    assert max(small) == pytest.approx(31.5, rel=0.02)
    assert model.cost(64, 1).latency_ms == pytest.approx(16.0, rel=0.02)
    # Two n tell it.
    told = fit(times("ring", [2, 4], overhead=0.5, latency=0.0), "gloo", True)
    assert told.cost(64, 1).latency_ms == pytest.approx(0.5, rel=0.02)
    assert told.curve.form == "ring"


def test_a_bend_in_the_sizes_is_followed():
    # Small ones pass a token bucket unhindered; a straight line cannot do both.
    bent = [
        Sample(n, size, s.time_ms * (0.3 if size < 2**20 else 1.0))
        for n in (2, 4)
        for s, size in zip(times("ring", [n], overhead=0, latency=0), SIZES, strict=True)
    ]
    model = fit(bent, "gloo", True)
    for sample in bent:
        assert model.curve.time_ms(sample.ranks, sample.nbytes) == pytest.approx(
            sample.time_ms, rel=0.02
        )


def test_sizes_like_the_buckets_decide():
    # Right for large sizes, garbage for small ones.
    samples = [
        Sample(s.ranks, s.nbytes, s.time_ms * (1 if s.nbytes > 2**20 else 5 * s.ranks))
        for s in times("ring", [2, 4, 8], overhead=0, latency=0)
    ]
    assert fit(samples, "nccl", True, [2**25]).error < fit(samples, "nccl", True).error


def test_beyond_the_largest_n_less_is_known():
    model = fit(times("ring", [2, 4], noise=0.02), "nccl", True)
    assert model.uncertainty(3) == model.error
    assert model.uncertainty(4) < model.uncertainty(8) < model.uncertainty(64)


def test_another_bandwidth_changes_the_wire_only():
    model = fit(times("ring", [2, 4]), "nccl", True)
    slower = model.with_bandwidth(1.0, 0.25)
    before, after = model.cost(4, 2**24), slower.cost(4, 2**24)
    assert after.wire_ms == pytest.approx(4 * before.wire_ms)
    assert after.latency_ms == before.latency_ms
    assert slower.with_bandwidth(0.25, 1.0).cost(4, 2**24).wire_ms == pytest.approx(before.wire_ms)


def test_a_correction_by_size_is_taken_where_it_is_better_only():
    model = fit(times("ring", [2, 4, 8], noise=0.005), "nccl", True)
    assert (model.curve.form, model.curve.correction) == ("ring", ())


def test_a_tree_goes_by_whole_levels():
    assert [FORMS["tree"].hops(n) for n in (2, 3, 4, 5, 8, 9)] == [2, 4, 4, 6, 6, 8]


def test_too_few_samples():
    assert fit(times("ring", [2])[:1], "gloo", True) is None
    assert fit([], "gloo", True) is None


def test_two_sizes_are_a_line_of_which_nothing_is_held_out():
    model = fit(times("ring", [2])[-2:], "gloo", True)
    assert (model.held_out, model.error) == ((), 0.1)
    [expected] = [s.time_ms for s in times("ring", [2]) if s.nbytes == SIZES[-1]]
    assert model.curve.time_ms(2, SIZES[-1]) == pytest.approx(expected)

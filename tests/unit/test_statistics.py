"""Medians, percentiles and bootstrap intervals."""

import numpy as np
import pytest

from ddp_profiler.analysis.statistics import block_bootstrap, mean_interval, summarize


def median(values):
    return np.median(values, axis=-1)


def test_by_hand():
    found = summarize(np.array([5.0, 1.0, 2.0, 4.0, 100.0, 3.0, 6.0, 8.0, 7.0, 9.0, 10.0]))
    assert found is not None
    assert found.mean == pytest.approx(155 / 11)
    assert found.median == 6
    # Linear between neighbours: the 10th percentile of 11 values is the second smallest.
    assert (found.p10, found.p90) == (2, 10)
    assert found.ci95 is not None
    assert found.ci95[0] <= 6 <= found.ci95[1]


def test_too_few():
    assert summarize(np.empty(0)) is None
    alone = summarize(np.array([7.0]))
    assert alone is not None
    assert (alone.mean, alone.median, alone.p10, alone.p90, alone.ci95) == (7, 7, 7, 7, None)
    assert block_bootstrap(np.array([7.0]), median) is None
    assert block_bootstrap(np.array([7.0, 7.0]), median) == (7, 7)


def test_equal_values_have_an_interval_without_width():
    assert block_bootstrap(np.full(30, 4.5), median) == (4.5, 4.5)


def test_same_values_same_interval():
    values = np.random.default_rng(1).normal(100, 5, 50)
    assert block_bootstrap(values, median) == block_bootstrap(values, median)


def test_interval_follows_values():
    values = np.random.default_rng(1).normal(100, 5, 50)
    low, high = block_bootstrap(values, median)
    assert block_bootstrap(values + 30, median) == pytest.approx((low + 30, high + 30))
    assert block_bootstrap(values * 2, median) == pytest.approx((low * 2, high * 2))


def coverage(make, size, block):
    """Share of intervals that hold the true median, which is 0."""
    generator = np.random.default_rng(11)
    hits = 0
    for _ in range(200):
        low, high = block_bootstrap(make(generator, size), median, block)
        hits += low <= 0 <= high
    return hits / 200


def independent(generator, size):
    return generator.normal(0, 1, size)


def correlated(generator, size):
    noise = generator.normal(0, 1, size + 50)
    series = np.zeros(size + 50)
    for i in range(1, size + 50):
        series[i] = 0.6 * series[i - 1] + noise[i]
    return series[50:]


def test_covers_the_truth():
    assert 0.88 <= coverage(independent, 60, None) <= 0.99


def test_blocks_take_correlation_into_account():
    """Neighbouring steps resemble each other; resampling them singly is too sure."""
    single, blocks = coverage(correlated, 60, 1), coverage(correlated, 60, None)
    assert single < blocks
    assert blocks > 0.75


def test_columns_stay_together():
    """A statistic of pairs sees each pair whole."""
    pairs = np.column_stack([np.arange(20.0), np.arange(20.0) * 3])
    assert block_bootstrap(pairs, lambda v: (v[..., 1] - 3 * v[..., 0]).max(axis=-1)) == (0, 0)


def test_blocks_keep_order():
    """With one block of all values nothing is left to chance."""
    values = np.array([3.0, 1.0, 2.0])
    assert block_bootstrap(values, lambda v: v[:, 0], block=3) == (3, 3)
    assert block_bootstrap(values, lambda v: v[:, 0], block=99) == (3, 3)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_interval_of_a_mean_holds_it_in_most_series(correlation):
    random = np.random.default_rng(4)
    held, widths = 0, []
    for _ in range(400):
        noise = random.normal(0, 1, 150)
        values = [0.0]
        for step in noise:
            values.append(correlation * values[-1] + step)
        low, high = mean_interval(np.array(values[30:]) + 7)
        held += low <= 7 <= high
        widths.append(high - low)
    assert 355 <= held <= 395
    # Neighbours that resemble each other say less: the true width is 1.43 times as large.
    expected = 2 * 1.96 / 120**0.5 / (1 - correlation)
    assert np.mean(widths) == pytest.approx(expected, rel=0.2)


def test_interval_of_a_mean_by_hand():
    assert mean_interval(np.array([7.0])) is None
    # Two blocks of one: mean 2, t of one degree of freedom 12.706, error 1.
    assert mean_interval(np.array([1.0, 3.0])) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)

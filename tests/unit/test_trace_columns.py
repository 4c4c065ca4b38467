"""Compact columns hold what was put into them, whatever it is."""

import numpy as np
import pytest

from ddp_profiler.trace.columns import (
    Column,
    Packed,
    Sums,
    constant_or,
    distinct,
    gather,
    in_order,
    median,
    narrow,
)
from ddp_profiler.trace.reader import read_trace
from ddp_profiler.trace.split import split

from .kineto import Recording

ENDS = [-(2**63), 2**63 - 1, 0]


def numbers(seed):
    """Numbers of several kinds, some of them as far apart as there are."""
    draw = np.random.default_rng(seed)
    yield np.zeros(0, np.int64)
    yield np.array([7])
    yield np.full(9000, -5)
    for span in (1, 200, 70_000, 2**24, 2**33, 2**62):
        found = draw.integers(-span, span, 9000)
        yield found
        # Few that are far from all others, as a stalled kernel is.
        found[draw.integers(0, found.size, 5)] = 2**61
        yield found
    yield np.array(ENDS * 3000)
    yield np.sort(draw.integers(0, 10**12, 20_000)) + 1_700_000_000_000_000_000


@pytest.mark.parametrize("seed", range(2))
def test_columns_give_back_what_they_got(seed):
    for found in numbers(seed):
        column = Column()
        for part in np.array_split(found, 7):
            column.append(part)
        assert len(column) == found.size
        assert column.take().tolist() == found.tolist()
        assert len(column) == 0
        column.append(found)
        taken = column.take_narrow()
        assert taken.tolist() == found.tolist()
        assert taken.dtype == narrow(found).dtype


@pytest.mark.parametrize("seed", range(2))
def test_packed_numbers_are_those_of_an_array(seed):
    draw = np.random.default_rng(seed)
    for found in numbers(seed):
        packed = Packed(found)
        assert packed.size == len(packed) == found.size
        assert packed[:].tolist() == np.asarray(packed).tolist() == found.tolist()
        assert packed[3:200:7].tolist() == found[3:200:7].tolist()
        if not found.size:
            continue
        assert (packed[0], packed[-1]) == (found[0], found[-1])
        places = draw.integers(0, found.size, 300)
        assert packed[places].tolist() == found[places].tolist()
        chosen = draw.integers(0, 2, found.size).astype(bool)
        assert packed[chosen].tolist() == found[chosen].tolist()
        assert (packed.min(), packed.max()) == (found.min(), found.max())
        order = draw.permutation(found.size).astype(np.int32)
        assert Packed(found, order)[:].tolist() == found[order].tolist()


def test_packed_numbers_take_little_memory_and_do_not_keep_what_they_were_made_of():
    times = np.arange(0, 10**12, 10**7) + 1_700_000_000_000_000_000
    times[70:90] += 10**11
    packed = Packed(times)
    held = [value for value in vars(packed).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in held) < 0.6 * times.nbytes
    assert not any(np.shares_memory(value, times) for value in held)
    ends = Sums(packed, Packed(np.full(times.size, 5)))
    assert ends[:].tolist() == (times + 5).tolist()
    assert (ends[3], ends.max(), ends.size) == (times[3] + 5, times.max() + 5, times.size)


@pytest.mark.parametrize("seed", range(2))
def test_sorting_keeps_the_order_of_equal_ones(seed):
    draw = np.random.default_rng(seed)
    for found in [*numbers(seed), draw.integers(0, 9, 9000)]:
        expected = np.argsort(found, kind="stable")
        values, places = in_order(found.copy())
        assert places.tolist() == expected.tolist()
        assert values.tolist() == found[expected].tolist()
        assert gather(found, places).tolist() == values.tolist()
        assert distinct(found) == np.unique(found).tolist()
        assert constant_or(found).tolist() == found.tolist()
        if found.size and abs(found).max() < 2**50:
            assert median(found) == np.median(found)


def test_launches_of_one_number_are_in_the_order_of_their_begin(tmp_path):
    made = Recording()
    made.step(1, 0, 1000)
    made.step(2, 1000, 1000)
    # The later one is first in the file, and numbers before and after are out of order too.
    for number, begin in ((9, 1500), (7, 1400), (7, 100), (8, 50)):
        made.correlation = number - 1
        made.launch(begin)
    made.kernel(200, 50, correlation=7)
    made.kernel(1600, 50, correlation=7)
    found = read_trace(made.write(tmp_path / "rank0.json"))
    pairs = zip(
        found.launches.correlation, found.launches.begin_ns[:] - made.origin_ns, strict=True
    )
    assert [(int(number), int(begin)) for number, begin in pairs] == [
        (7, 100), (7, 1400), (8, 50), (9, 1500),
    ]  # fmt: skip
    assert [step.parts.compute_ns for step in split(found, 0).steps] == [50, 50]

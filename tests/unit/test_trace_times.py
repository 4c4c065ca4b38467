"""Times of traces are exact, whatever form they are written in."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_profiler.trace import times

from .kineto import us


@settings(deadline=None)
@given(st.integers(0, 2**43 * 1000 - 1))
def test_doubles_below_the_limit_give_the_written_ns(ns):
    text = us(ns)
    value = float(text) if "." in text else int(text)
    found, finer = times.from_numbers([value])
    assert (found.tolist(), finer) == ([ns], 0)


@settings(deadline=None)
@given(st.integers(-(2**63) // 4, 2**63 // 2))
def test_text_gives_the_written_ns(ns):
    found, finer = times.from_text(us(ns).encode())
    if abs(ns) > times.MAX_US * 1000:
        assert found == times.UNREADABLE or abs(found - ns) < 1000
    else:
        assert (found, finer) == (ns, False)


@settings(deadline=None)
@given(st.decimals(-(10**12), 10**12, places=6))
def test_digits_beyond_the_ns_are_rounded_and_told(value):
    found, finer = times.from_text(str(value).encode())
    assert found == int((value * 1000).to_integral_value())
    assert finer == ((value * 1000) % 1 != 0)


def test_doubles_too_large_ask_for_the_text():
    # As it was written: the double is ...695.75.
    with pytest.raises(times.NeedsTextError):
        times.from_numbers([1712195495519695.8])
    assert times.from_text(b"1712195495519695.8") == (1712195495519695800, False)


def test_whole_and_broken_numbers_mix():
    values = [2**52 + 1, 0.02, None, 7]
    found, finer = times.from_numbers(values)
    assert found.tolist() == [(2**52 + 1) * 1000, 20, times.UNREADABLE, 7000]
    assert finer == 0


@pytest.mark.parametrize("value", [2**64, -(2**70), times.MAX_US + 1])
def test_numbers_beyond_all_years_are_no_times(value):
    assert times.from_numbers([value, 5])[0].tolist() == [times.UNREADABLE, 5000]
    assert times.from_text(str(value).encode())[0] == times.UNREADABLE


@pytest.mark.parametrize(
    "text", [b"", b"null", b"true", b'"soon"', b"NaN", b"1e99999", b"\xff", b"[]"]
)
def test_what_is_no_number_is_no_time(text):
    assert times.from_text(text) == (times.UNREADABLE, False)


@pytest.mark.parametrize(
    ("text", "ns"), [(b"1e3", 1_000_000), (b"-2.5e-1", -250), (b'"42"', 42_000), (b" 7 ", 7000)]
)
def test_other_forms_of_numbers(text, ns):
    assert times.from_text(text) == (ns, False)


def test_finer_doubles_are_told():
    found, finer = times.from_numbers([0.0204, 1.5])
    assert (found.tolist(), finer) == ([20, 1500], 1)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 10**15), st.none()), max_size=9))
def test_arrays_match_single_values(values):
    found, _ = times.from_numbers(values)
    assert found.dtype == np.int64
    expected = [times.UNREADABLE if v is None else int(Decimal(v) * 1000) for v in values]
    assert found.tolist() == expected

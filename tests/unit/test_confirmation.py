"""A proposed change that was measured: the gain from blocks in turns."""

import pytest

from ddp_profiler.analysis.confirmation import confirmed
from ddp_profiler.schema import Change, Confirmation


def made(before, after, **more):
    settings = {"setting": "bucket_cap_mb", "text": "set bucket_cap_mb=25", **more}
    return Confirmation(
        level="dp2-acc1",
        change=Change(bucket_cap_mb=25),
        predicted_gain_ms=33.0,
        predicted_interval90_ms=(25.0, 40.0),
        before_ms=before,
        after_ms=after,
        steps=5,
        **settings,
    )


def test_the_gain_is_that_of_neighbouring_blocks():
    # The machine slows down by 10 ms a block: pairs still differ by 30.
    found = confirmed(made((100.0, 110.0, 120.0), (70.0, 80.0, 90.0)))
    assert (found.before_ms, found.after_ms, found.gain_ms) == (110.0, 80.0, 30.0)
    assert found.ci95_ms == (30.0, 30.0)
    assert found.error_pct == pytest.approx(10.0)


def test_what_could_not_be_measured_has_no_gain():
    found = confirmed(made((), (), problem="the data is too short"))
    assert (found.gain_ms, found.ci95_ms, found.error_pct) == (None, None, None)
    assert found.problem == "the data is too short"


def test_no_gain_has_no_relative_error():
    assert confirmed(made((50.0, 50.0), (50.0, 50.0))).error_pct is None


def test_nothing_confirmed():
    assert confirmed(None) is None

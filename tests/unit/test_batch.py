"""The batch identity, solved and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.batch import Batch, nearest_legal, solve
from ddp_profiler.errors import UsageError

SMALL = st.integers(1, 40)


@given(SMALL, SMALL, SMALL)
def test_solving_finds_what_was_left_open(micro_batch, accumulation, dp):
    total = micro_batch * accumulation * dp
    expected = Batch(micro_batch, accumulation, dp)
    assert solve(total, dp, micro_batch=micro_batch) == expected
    assert solve(total, dp, accumulation=accumulation) == expected
    assert solve(total, dp, micro_batch=micro_batch, accumulation=accumulation) == expected


@given(st.integers(1, 3000), SMALL, SMALL)
def test_what_is_not_whole_is_refused_with_legal_settings(total, micro_batch, dp):
    if total % (micro_batch * dp) == 0:
        assert solve(total, dp, micro_batch=micro_batch).global_batch == total
        return
    with pytest.raises(UsageError, match=f"Global batch {total} is not") as refused:
        solve(total, dp, micro_batch=micro_batch)
    asked = Batch(micro_batch, max(1, round(total / (micro_batch * dp))), dp)
    suggestions = nearest_legal(total, asked)
    assert suggestions
    for suggestion in suggestions:
        assert str(suggestion) in refused.value.remedy
        assert min(suggestion.micro_batch, suggestion.accumulation, suggestion.dp) >= 1
        assert suggestion.global_batch == total or (suggestion.dp, suggestion.micro_batch) == (
            dp,
            micro_batch,
        )


def test_the_reported_case_has_all_four_numbers():
    with pytest.raises(UsageError) as refused:
        solve(256, 7, micro_batch=2, accumulation=18)
    assert "256" in refused.value.message
    assert "2 x 18 x 7 = 252" in refused.value.message
    assert "2 x 16 x 8 = 256" in refused.value.remedy

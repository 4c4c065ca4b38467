"""The batch identity, solved and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ddp_profiler.batch import (
    CARRY,
    DROP,
    SHORT,
    Batch,
    dealt_epoch,
    epoch,
    nearest_legal,
    solve,
)
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


@given(
    samples=st.integers(1, 60),
    dp=st.integers(1, 5),
    micro=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    sampler_drops=st.booleans(),
    loader_drops=st.booleans(),
)
def test_an_epoch_is_what_torch_makes_of_it(
    samples, dp, micro, accumulation, sampler_drops, loader_drops
):
    given_out, batches = [], []
    for rank in range(dp):
        sampler = DistributedSampler(
            range(samples), dp, rank, shuffle=False, drop_last=sampler_drops
        )
        given_out += list(sampler)
        batches.append([len(b) for b in BatchSampler(sampler, micro, loader_drops)])
    found = epoch(
        samples,
        Batch(micro, accumulation, dp),
        sampler_drops=sampler_drops,
        loader_drops=loader_drops,
        window=DROP,
    )
    assert found.samples_per_rank * dp == len(given_out)
    assert found.samples_repeated == len(given_out) - len(set(given_out))
    assert found.samples_dropped_by_sampler == samples - len(set(given_out))
    assert batches == [batches[0]] * dp
    assert found.micro_steps == len(batches[0])
    assert found.last_micro_batch == (batches[0][-1] if batches[0] else 0)
    assert found.samples_dropped_by_loader == len(given_out) - dp * sum(batches[0])
    full = len(batches[0]) // accumulation * accumulation
    assert found.left_over == len(batches[0]) - full
    assert found.samples_dropped_by_window == dp * sum(batches[0][full:])
    assert found.optimizer_steps == full // accumulation
    trained = dp * sum(batches[0][:full])
    assert trained == samples + found.samples_repeated - found.samples_dropped


@given(
    samples=st.integers(1, 60),
    dp=st.integers(1, 5),
    micro=st.integers(1, 7),
    drops=st.booleans(),
    splits=st.booleans(),
)
def test_a_dealt_epoch_is_what_accelerate_makes_of_it(samples, dp, micro, drops, splits):
    data_loader = pytest.importorskip("accelerate.data_loader")
    ranks = []
    for rank in range(dp):
        whole = BatchSampler(range(samples), micro * dp if splits else micro, drops)
        ranks.append(list(data_loader.BatchSamplerShard(whole, dp, rank, splits)))
    found = dealt_epoch(samples, Batch(micro, 1, dp), drops=drops)
    assert [len(batches) for batches in ranks] == [found.micro_steps] * dp
    given_out = [index for batches in ranks for batch in batches for index in batch]
    assert found.samples_per_rank * dp == len(given_out)
    assert found.samples_repeated - found.samples_dropped == len(given_out) - samples


def test_an_epoch_in_words():
    assert epoch(1000, Batch(10, 1, 1)).rounding == ()
    found = epoch(1001, Batch(4, 2, 3), window=None)
    assert found.rounding == (
        "the sampler repeats 1 (334 a rank)",
        "the last micro-batch has 2 of 4",
    )
    cut = epoch(1001, Batch(4, 5, 3), sampler_drops=True, loader_drops=True)
    assert cut.rounding == (
        "the sampler leaves 2 out (333 a rank)",
        "the loader drops 3 (1 a rank): too few for a micro-batch of 4",
        "windows of 5 leave 3 of 83 micro-steps over, which make a step of 3",
    )
    assert (cut.optimizer_steps, cut.samples_dropped) == (17, 5)


def test_windows_end_an_epoch_in_three_ways():
    ends = {w: epoch(70, Batch(10, 2, 1), window=w) for w in (SHORT, DROP, CARRY, None)}
    assert [e.total_optimizer_steps(3) for e in ends.values()] == [12, 9, 10, None]
    assert [e.samples_dropped for e in ends.values()] == [0, 10, 0, 0]
    assert ends[CARRY].rounding[0].endswith("which the next epoch's first step takes")
    assert ends[None].rounding[0].endswith("for a shorter step, the next epoch, or nothing")
    assert epoch(80, Batch(10, 2, 1), window=None).total_optimizer_steps(3) == 12

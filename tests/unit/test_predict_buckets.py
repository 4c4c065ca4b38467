"""The packing of gradients into buckets, against torch's own."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.predict.buckets import Bucket, assign, pack

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=40)


@given(sizes=SIZES, cap=st.integers(1, 1000), first=st.integers(1, 1000))
def test_buckets_are_those_of_torch(sizes, cap, first):
    gradients = [torch.empty(size) for size in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(
        gradients, [4 * first, 4 * cap], [False] * len(sizes), list(range(len(sizes)))
    )
    assert assign([4 * size for size in sizes], 4 * cap, 4 * first) == expected


@given(sizes=SIZES, cap=st.integers(1, 1000))
def test_with_one_limit(sizes, cap):
    gradients = [torch.empty(size) for size in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(
        gradients, [4 * cap], [False] * len(sizes), list(range(len(sizes)))
    )
    assert assign([4 * size for size in sizes], 4 * cap) == expected


def test_nothing_to_reduce():
    assert assign([], 10) == []


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (8, (Bucket(8, 2.0), Bucket(9, 5.0))),
        (1, (Bucket(4, 1.0), Bucket(4, 2.0), Bucket(4, 3.0), Bucket(5, 5.0))),
    ],
)
def test_a_bucket_is_ready_with_its_last_gradient(cap, expected):
    # The first of the model is ready last, as in backward.
    assert pack([5, 4, 4, 4], [5.0, 3.0, 2.0, 1.0], cap) == expected

"""Pairing sequences: whatever is missing, what is paired is the same collective."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_profiler.trace.groups import configured_ranks, group_ranks
from ddp_profiler.trace.kernels import KINDS, Collective
from ddp_profiler.trace.matching import Calls, fits, pair_anchored, pair_shifted

REDUCE, GATHER = KINDS.index(Collective.ALL_REDUCE), KINDS.index(Collective.ALL_GATHER)


def calls(tokens, ends=None):
    """A sequence from (kind, elements) each; ``place`` is what each one truly is."""
    number = len(tokens)
    return Calls(
        place=np.arange(number),
        kind=np.array([kind for kind, _ in tokens], np.int64),
        elements=np.array([elements for _, elements in tokens], np.int64),
        index=np.arange(number),
        end_ns=np.array(ends if ends is not None else range(number), np.int64),
        step=None,
        inside=np.ones(number, bool),
    )


def without(found, missing):
    return found.take(np.array([p for p in range(len(found)) if p not in missing], np.int64))


def true_pairs(one, other, pairing):
    pairs = list(
        zip(one.place[pairing.first].tolist(), other.place[pairing.second].tolist(), strict=True)
    )
    assert all(first == second for first, second in pairs), pairs
    assert len(set(pairs)) == len(pairs)
    return len(pairs)


TOKENS = st.lists(
    st.tuples(st.sampled_from([REDUCE, GATHER]), st.integers(1, 3)), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.data())
def test_one_stretch_missing_within_a_step_pairs_nothing_wrong(tokens, data):
    whole = calls(tokens)
    first = data.draw(st.integers(0, len(tokens)))
    last = data.draw(st.integers(first, len(tokens)))
    part = without(whole, set(range(first, last)))
    for one, other in ((whole, part), (part, whole)):
        pairing = pair_anchored(one, other, begins=False, ends=False)
        paired = true_pairs(one, other, pairing)
        # What is left out is only what equals something on the other side of the gap.
        assert paired + pairing.count == len(whole)
        assert (pairing.differs == "count") == (last > first)


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.data())
def test_a_recording_that_begins_or_ends_in_a_step_pairs_all_it_has(tokens, data):
    whole = calls(tokens)
    number = data.draw(st.integers(0, len(tokens)))
    late = without(whole, set(range(number)))
    pairing = pair_anchored(whole, late, begins=True, ends=False)
    assert true_pairs(whole, late, pairing) == len(late)
    assert pairing.count == 0
    short = without(whole, set(range(len(whole) - number, len(whole))))
    pairing = pair_anchored(short, whole, begins=False, ends=True)
    assert true_pairs(short, whole, pairing) == len(short)
    assert pairing.count == 0


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.just(REDUCE), st.integers(1, 2)), min_size=6, max_size=40),
    st.data(),
)
def test_recordings_of_any_stretch_pair_by_shifting(tokens, data):
    """Ends are those of one job, on clocks that are apart; at least half is in both."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    ends = np.cumsum([draw.randrange(100_000, 900_000) for _ in tokens])
    whole, moved = calls(tokens, ends), calls(tokens, ends + 123_456_789)
    cut = max(0, (len(tokens) - 3) // 3)
    one = without(whole, set(range(data.draw(st.integers(0, cut)))))
    drop = data.draw(st.integers(0, cut))
    other = without(moved, set(range(len(tokens) - drop, len(tokens))))
    pairing = pair_shifted(one, other)
    if pairing.differs:
        # Few ends may look even by chance: then nothing is paired rather than something wrong.
        assert (pairing.differs, pairing.first.size) == ("order", 0)
        assert len(tokens) < 12
        return
    assert true_pairs(one, other, pairing) == len(one) - drop


def test_a_shift_that_nothing_decides_is_none():
    # Equal sizes and an even rhythm: ten of them fit eight in three ways.
    one = calls([(REDUCE, 5)] * 10, np.arange(10) * 1000)
    other = calls([(REDUCE, 5)] * 8, np.arange(8) * 1000)
    pairing = pair_shifted(one, other)
    assert (pairing.first.size, pairing.differs, pairing.count) == (0, "order", 10)
    # As many of both may be other ones all the same.
    assert pair_shifted(one, one).differs == "order"
    # Different sizes decide, and so does a rhythm.
    sized = calls([(REDUCE, size) for size in range(10)], np.arange(10) * 1000)
    assert pair_shifted(sized, sized).first.size == 10
    uneven = calls([(REDUCE, 5)] * 10, np.arange(10) ** 2 * 1000)
    assert pair_shifted(uneven, uneven).first.tolist() == list(range(10))


@pytest.mark.parametrize(("of_ten", "found"), [(2, True), (4, False)])
def test_a_shift_must_keep_the_distance_of_three_in_four(of_ten, found):
    """Of another run some ends may agree by chance; of the same one, some may be broken."""
    draw = np.random.default_rng(3)
    ends = np.cumsum(draw.integers(1000, 9000, 60))
    place = np.arange(60)
    off = np.where(place % 10 < of_ten, 100_000 * (1 + place % 7), 0)
    one = calls([(REDUCE, 5)] * 60, ends)
    other = without(calls([(REDUCE, 5)] * 60, ends + off), {0, 1})
    pairing = pair_shifted(one, other)
    assert pairing.differs == ("" if found else "order")
    assert true_pairs(one, other, pairing) == (58 if found else 0)


def test_one_that_differs_moves_none_of_the_others():
    tokens = [(REDUCE, 1), (REDUCE, 2), (GATHER, 3), (REDUCE, 4)]
    one = calls(tokens)
    other = calls([*tokens[:2], (REDUCE, 3), tokens[3]])
    pairing = pair_anchored(one, other, begins=False, ends=False)
    assert (pairing.first.tolist(), pairing.differs, pairing.at) == ([0, 1, 3], "kind", 2)
    other = calls([*tokens[:2], (GATHER, 9), tokens[3]])
    pairing = pair_anchored(one, other, begins=False, ends=False)
    assert (pairing.first.tolist(), pairing.differs, pairing.at) == ([0, 1, 3], "size", 2)


def test_sizes_count_only_where_ranks_must_have_the_same():
    to_all = KINDS.index(Collective.ALL_TO_ALL)
    one = calls([(REDUCE, 5), (REDUCE, -1), (to_all, 5), (REDUCE, 5), (GATHER, 5)])
    other = calls([(REDUCE, 5), (REDUCE, 7), (to_all, 6), (REDUCE, 6), (REDUCE, 5)])
    assert fits(one, other).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        (b'"[2, 0]"', 2, (0, 2)),
        (b"[0, 1]", -1, (0, 1)),
        (b'"[0, 1, ..., 7]"', 8, (4, 5)),
        (b'"[0, 1]"', 8, None),
        (b"", 2, (4, 5)),
        (b'"nonsense', 2, (4, 5)),
        (b"3", 2, (4, 5)),
    ],
)
def test_ranks_of_groups(text, size, expected):
    config = configured_ranks(
        b'{"pg_config": [{"pg_name": "dp", "ranks": [4, 5]}, {"pg_name": 3}, "x"]}'
    )
    assert config == {"dp": (4, 5)}
    if text.startswith(b'"[0, 1, ...'):
        # A list that was cut counts as none; the metadata's has another size.
        expected = None
    assert group_ranks(text, size, config, "dp") == expected
    assert configured_ranks(None) == configured_ranks(b"[") == configured_ranks(b"[]") == {}

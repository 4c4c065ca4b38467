"""Parts of a step, against cases worked out by hand. Times in ms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.analysis.parts import PARTS, derive_steps, split_exposed
from ddp_profiler.schema import SpanKind, Variant
from tests.unit.span_columns import MS, NULL, Spans


def derive(spans, rank=0, level=0, variant=Variant.INSTRUMENTED):
    return derive_steps(rank, spans.columns(), level, variant)


def parts(steps, latest=None, peers=2, step=0):
    """All ten parts of one step."""
    latest_ns = (
        steps.backwards.local_end if latest is None else np.array([round(x * MS) for x in latest])
    )
    found = {**steps.parts_ms, **split_exposed(steps, latest_ns, peers)}
    return {name: float(values[step]) for name, values in found.items()}


def one_step(local_end=65, backward_end=85):
    """Data 5, forward 20, backward from 25, optimizer 10, and 5 that nothing covers."""
    return (
        Spans()
        .data(0, 5)
        .forward(5, 25)
        .backward(25, local_end, backward_end)
        .optimizer(85, 95)
        .step(0, 100)
    )


def test_no_overlap():
    steps = derive(one_step().gradient(65, 80))
    assert parts(steps) == pytest.approx(
        {
            "data": 5,
            "forward": 20,
            "forward_comm": 0,
            "backward": 40,
            "backward_comm": 0,
            "exposed_wait": 0,
            "exposed_transfer": 15,
            "exposed_copy": 5,
            "optimizer": 10,
            "other": 5,
        }
    )
    assert steps.wall_ms.tolist() == [100]
    assert steps.busy_ms.tolist() == [15]
    assert steps.overlapped_ms.tolist() == [0]


def test_full_overlap():
    steps = derive(one_step(local_end=80).gradient(30, 60))
    found = parts(steps)
    assert found["backward"] == pytest.approx(55)
    assert found["exposed_wait"] == found["exposed_transfer"] == 0
    assert found["exposed_copy"] == pytest.approx(5)
    assert steps.busy_ms.tolist() == steps.overlapped_ms.tolist() == [30]


def test_overlapping_collectives_are_counted_once():
    spans = one_step().gradient(40, 70, 100).gradient(50, 60, 20).gradient(64, 75, 3)
    steps = derive(spans)
    assert steps.busy_ms.tolist() == [35]
    assert steps.overlapped_ms.tolist() == [25]
    assert steps.collectives.tolist() == [3]
    assert steps.gradient_bytes.tolist() == [123]
    assert parts(steps)["exposed_transfer"] == pytest.approx(10)


def test_gap_between_collectives_is_not_busy():
    steps = derive(one_step().gradient(30, 40).gradient(50, 60))
    assert steps.busy_ms.tolist() == [20]


def test_completion_noticed_after_backward_is_clamped():
    steps = derive(one_step().gradient(60, 200))
    assert steps.busy_ms.tolist() == [25]
    assert steps.overlapped_ms.tolist() == [5]
    found = parts(steps)
    assert (found["exposed_transfer"], found["exposed_copy"]) == pytest.approx((20, 0))
    assert steps.unnoticed == 0


def test_completion_never_noticed_ends_with_backward():
    steps = derive(one_step().gradient(60, None).gradient(30, 40))
    assert steps.unnoticed == 1
    assert steps.busy_ms.tolist() == [35]
    assert parts(steps)["exposed_transfer"] == pytest.approx(20)


def test_hand_over_after_backward_returned_has_no_length():
    """A mark on another timeline may lie behind the call's end: it must not count negative."""
    steps = derive(one_step().gradient(90, 95))
    assert steps.busy_ms.tolist() == [0]
    assert sum(parts(steps).values()) == pytest.approx(100)


def test_accumulation_only_the_synchronising_call_has_a_window():
    spans = (
        Spans()
        .data(0, 1)
        .forward(1, 11)
        .backward(11, 29, 31)
        .data(31, 34, micro_step=1)
        .forward(34, 44, micro_step=1)
        .backward(44, 64, 74, micro_step=1)
        .gradient(60, 70, micro_step=1)
        .optimizer(74, 79)
        .step(0, 80)
    )
    steps = derive(spans)
    assert parts(steps) == pytest.approx(
        {
            "data": 4,
            "forward": 20,
            "forward_comm": 0,
            # All 20 of the call under no_sync, 20 of the other.
            "backward": 40,
            "backward_comm": 0,
            "exposed_wait": 0,
            "exposed_transfer": 6,
            "exposed_copy": 4,
            "optimizer": 5,
            "other": 1,
        }
    )
    assert steps.micro_steps.tolist() == [2]
    assert steps.samples.tolist() == [16]
    assert len(steps.backwards.key) == 1


def test_unseen_end_of_local_backward_leaves_no_window():
    steps = derive(one_step(local_end=None).gradient(60, 80))
    found = parts(steps)
    assert found["backward"] == pytest.approx(60)
    assert found["exposed_wait"] == found["exposed_transfer"] == found["exposed_copy"] == 0
    # Nothing is known to be exposed, so all of it counts as overlapped.
    assert steps.busy_ms.tolist() == steps.overlapped_ms.tolist() == [20]


def test_first_of_several_local_ends_counts():
    spans = one_step().gradient(60, 80).add(SpanKind.LOCAL_BACKWARD_END, 70, 70)
    assert parts(derive(spans))["backward"] == pytest.approx(40)


def test_an_end_before_the_last_hand_over_is_that_of_a_nested_pass():
    """Reentrant checkpoints: passes inside the pass end, and DDP finishes in the last of them."""
    spans = one_step(local_end=50).gradient(40, 60).gradient(70, 84)
    spans = spans.add(SpanKind.LOCAL_BACKWARD_END, 72, 72)
    spans = spans.add(SpanKind.LOCAL_BACKWARD_END, 88, 88)
    # Backward began at 25.
    assert parts(derive(spans))["backward"] == pytest.approx(72 - 25)


def test_end_of_local_backward_before_the_call_began():
    """Of another backward in the same micro-step: the window is at most the call."""
    steps = derive(one_step(local_end=10).gradient(30, 60))
    found = parts(steps)
    assert found["backward"] == pytest.approx(0)
    assert found["exposed_transfer"] + found["exposed_copy"] == pytest.approx(60)


def test_alone_the_window_is_copy():
    steps = derive(one_step().gradient(60, 80))
    found = parts(steps, peers=1)
    assert found["exposed_wait"] == found["exposed_transfer"] == 0
    assert found["exposed_copy"] == pytest.approx(20)
    assert sum(found.values()) == pytest.approx(100)


def test_wait_goes_to_the_rank_that_was_first():
    first = derive(one_step(local_end=65).gradient(64, 80), rank=0)
    last = derive(one_step(local_end=75).gradient(74, 80), rank=1)
    waited = parts(first, latest=[75])
    waited_for = parts(last, latest=[75])
    exposed = ("exposed_wait", "exposed_transfer", "exposed_copy")
    assert [waited[name] for name in exposed] == pytest.approx([10, 5, 5])
    assert [waited_for[name] for name in exposed] == pytest.approx([0, 5, 5])
    assert (waited["backward"], waited_for["backward"]) == pytest.approx((40, 50))


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        (60, (0, 15, 5)),  # nobody is later than this rank
        (70, (5, 10, 5)),
        (82, (17, 0, 3)),  # later than the last completion that was seen: no negative transfer
        (200, (20, 0, 0)),  # clipped to the window
    ],
)
def test_wait_is_clipped_to_the_window(latest, expected):
    found = parts(derive(one_step().gradient(65, 80)), latest=[latest])
    assert tuple(found[f"exposed_{name}"] for name in ("wait", "transfer", "copy")) == (
        pytest.approx(expected)
    )


def test_wait_is_withheld_where_clocks_cannot_be_compared():
    exposed = split_exposed(derive(one_step().gradient(65, 80)), None, 2)
    assert np.isnan(exposed["exposed_wait"]).all()
    assert exposed["exposed_transfer"].tolist() == [15]
    assert exposed["exposed_copy"].tolist() == [5]


def test_collectives_of_modules_are_taken_out_of_forward_and_backward():
    spans = (
        one_step()
        .forward_comm(6, 9)
        .forward_comm(10, 11)
        .backward_comm(30, 37)
        .bookkeeping(66, 68)
        .gradient(65, 80)
    )
    found = parts(derive(spans))
    assert (found["forward"], found["forward_comm"]) == pytest.approx((16, 4))
    assert (found["backward"], found["backward_comm"]) == pytest.approx((33, 7))
    assert found["other"] == pytest.approx(5)


def test_collectives_of_modules_inside_each_other_count_once():
    spans = (
        one_step()
        .forward_comm(6, 14)
        .forward_comm(8, 12)
        .forward_comm(13, 16)
        .backward_comm(30, 40)
        .backward_comm(31, 33)
        .gradient(65, 80)
    )
    found = parts(derive(spans))
    assert (found["forward"], found["forward_comm"]) == pytest.approx((10, 10))
    assert (found["backward"], found["backward_comm"]) == pytest.approx((30, 10))
    assert sum(found.values()) == pytest.approx(100)


def test_a_collective_of_a_module_in_the_exposed_window_is_counted_there():
    spans = one_step().backward_comm(60, 70).backward_comm(75, 78).gradient(65, 80)
    steps = derive(spans)
    found = parts(steps)
    assert (found["backward"], found["backward_comm"]) == pytest.approx((35, 5))
    assert (found["exposed_transfer"], found["exposed_copy"]) == pytest.approx((15, 5))
    assert steps.backwards.module_comm.tolist() == [5 * MS]
    assert sum(found.values()) == pytest.approx(100)


def test_a_micro_step_without_reduction_keeps_its_collectives():
    spans = (
        Spans()
        .forward(0, 10, micro_step=0)
        .backward(10, 30, 30, micro_step=0)
        .backward_comm(12, 16, micro_step=0)
        .forward(30, 40, micro_step=1)
        .backward(40, 60, 70, micro_step=1)
        .backward_comm(42, 48, micro_step=1)
        .gradient(50, 65, micro_step=1)
        .step(0, 70)
    )
    steps = derive(spans)
    found = parts(steps)
    assert (found["backward"], found["backward_comm"]) == pytest.approx((30, 10))
    assert steps.backwards.module_comm.tolist() == [6 * MS]


def test_pause_between_forward_and_backward_is_other():
    spans = (
        Spans()
        .data(0, 5)
        .forward(5, 25)
        .backward(225, 265, 285)
        .optimizer(285, 295)
        .step(0, 295)
        .gradient(265, 280)
    )
    found = parts(derive(spans))
    assert found["other"] == pytest.approx(200)
    assert found["backward"] == pytest.approx(40)


def test_steps_come_in_order_of_time_and_keep_their_own():
    spans = Spans(step=1).forward(210, 230, samples=5).backward(230, 250, 251).gradient(249, 251)
    spans.step(200, 300)
    spans.add(SpanKind.FORWARD, 10, 40, step=0, samples=7)
    spans.add(SpanKind.STEP, 0, 200, step=0)
    steps = derive(spans)
    assert steps.wall_ms.tolist() == [200, 100]
    assert steps.parts_ms["forward"].tolist() == [30, 20]
    assert steps.samples.tolist() == [7, 5]
    assert steps.busy_ms.tolist() == [0, 2]
    assert steps.backwards.step_index.tolist() == [1]


def test_only_the_asked_level_and_variant():
    spans = one_step()
    spans.step(100, 150, variant=int(Variant.PLAIN), step=1)
    spans.step(100, 170, variant=int(Variant.WARMUP), step=2)
    spans.step(100, 190, level=1)
    assert derive(spans).wall_ms.tolist() == [100]
    assert derive(spans, variant=Variant.PLAIN).wall_ms.tolist() == [50]
    assert derive(spans, variant=Variant.WARMUP).wall_ms.tolist() == [70]
    assert derive(spans, level=1).wall_ms.tolist() == [90]
    assert len(derive(spans, level=2)) == 0


def test_step_that_was_cut_is_left_out_with_all_its_spans():
    spans = one_step().gradient(65, 80)
    spans.data(100, 105, step=1).forward(105, 125, step=1).backward(125, 140, 150, step=1)
    spans.gradient(130, 145, step=1)
    steps = derive(spans)
    assert len(steps) == 1
    assert steps.collectives.tolist() == [1]
    assert sum(parts(steps).values()) == pytest.approx(100)


def test_same_step_of_another_repetition_is_another_step():
    spans = one_step().gradient(65, 80)
    spans.step(500, 540, repetition=1)
    spans.forward(500, 510, repetition=1)
    steps = derive(spans)
    assert steps.repetition.tolist() == [0, 1]
    assert steps.parts_ms["forward"].tolist() == [20, 10]
    assert len(set(steps.key.tolist())) == 2


def test_samples_not_observed_count_as_none():
    spans = Spans().forward(0, 10, samples=None).step(0, 20)
    assert derive(spans).samples.tolist() == [0]


def test_no_spans_at_all():
    steps = derive(Spans())
    assert len(steps) == 0
    assert all(len(values) == 0 for values in split_exposed(steps, None, 2).values())


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 80)), max_size=12)


@given(calls=st.lists(st.tuples(st.integers(0, 60), intervals), min_size=1, max_size=3))
def test_busy_is_the_union_of_intervals(calls):
    """Against sets of nanoseconds. Each call is a step of 100 ns from 100 x its number."""
    spans, busy, overlapped = Spans(), [], []
    for step, (local_end, collectives) in enumerate(calls):
        base = 100 * step
        covered: set[int] = set()
        spans.step((base) / MS, (base + 100) / MS, step=step)
        spans.backward(base / MS, (base + local_end) / MS, (base + 60) / MS, step=step)
        for begin, length in collectives:
            spans.gradient((base + begin) / MS, (base + begin + length) / MS, step=step)
            covered |= set(range(begin, min(begin + length, 60)))
        busy.append(len(covered))
        overlapped.append(len({t for t in covered if t < local_end}))
    steps = derive(spans)
    assert (steps.busy_ms * MS).round().tolist() == busy
    assert (steps.overlapped_ms * MS).round().tolist() == overlapped


times = st.integers(-(2**40), 2**40)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from([int(k) for k in SpanKind if k is not SpanKind.STEP]),
            "step": st.integers(0, 3),
            "micro_step": st.integers(0, 2),
            "begin_ns": times,
            "end_ns": times,
        }
    ),
    max_size=40,
)


@given(rows=rows, lengths=st.lists(st.integers(1, 2**40), max_size=4), data=st.data())
def test_parts_sum_to_wall_whatever_was_recorded(rows, lengths, data):
    spans = Spans()
    begin = 0
    for step, length in enumerate(lengths):
        spans.step(0, 1, step=step)
        spans.rows[-1].update(begin_ns=begin, end_ns=begin + length)
        begin += length
    for row in rows:
        unnoticed = row["kind"] == SpanKind.GRADIENT and data.draw(st.booleans())
        spans.rows.append({**spans.place, **row, "end_ns": None if unnoticed else row["end_ns"]})
        # An interval ends after it begins.
        if not unnoticed and row["end_ns"] < row["begin_ns"]:
            spans.rows[-1].update(begin_ns=row["end_ns"], end_ns=row["begin_ns"])
        if row["kind"] == SpanKind.GRADIENT:
            spans.rows[-1]["bytes"] = 1
    steps = derive(spans)
    calls = len(steps.backwards.key)
    latest = np.array(data.draw(st.lists(times, min_size=calls, max_size=calls)), dtype=np.int64)
    for peers in (1, 2):
        exposed = split_exposed(steps, latest, peers)
        assert all((values >= 0).all() for values in exposed.values())
        total = sum({**steps.parts_ms, **exposed}.values())
        assert total == pytest.approx(steps.wall_ms, rel=1e-9, abs=1e-3)
        assert sorted({**steps.parts_ms, **exposed}) == sorted(PARTS)
    assert (steps.overlapped_ms <= steps.busy_ms).all()


def test_null_of_the_reader_is_the_null_of_the_analysis():
    from ddp_profiler.analysis import parts as module
    from ddp_profiler.record import reader

    assert module.NULL == reader.NULL == NULL

"""Micro-steps and steps, found in what a script does; with a clock of ours."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_profiler.measure.clock import HostTimeline
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.steps import StepTracker, typical
from ddp_profiler.schema import Interruption, SpanKind, Variant

WARMUP, PLAIN, INSTRUMENTED = Variant.WARMUP, Variant.PLAIN, Variant.INSTRUMENTED


class Script:
    """Does what a training script does, and tells a tracker of it as the attachment does.

    Each act takes as long as given; between acts ``pass_time`` stands for the loop's own time.
    """

    def __init__(self, *plan):
        self.now = 0
        self.rows = []
        self.switched = []
        recorder = Recorder(HostTimeline(lambda: self.now), self._take)
        self.tracker = StepTracker(
            recorder, plan or [(INSTRUMENTED, 99)], lambda v: self.switched.append((v, self.now))
        )

    def _take(self, columns):
        names = list(columns)
        self.rows += [dict(zip(names, v, strict=True)) for v in zip(*columns.values(), strict=True)]

    def pass_time(self, length):
        self.now += length
        return self.now

    def data(self, length=1):
        self.tracker.act()
        self.tracker.fetched(self.now, self.pass_time(length))

    def forward(self, length=20, samples=8):
        self.tracker.act()
        self.tracker.begins_call()
        self.tracker.called(self.now, self.pass_time(length), samples)

    def backward(self, length=30):
        self.tracker.act()
        self.tracker.begins_backward()
        self.tracker.went_back(self.now, self.pass_time(length))

    def optimizer(self, length=4, inside=lambda: None):
        self._optimizer(length, inside, ends_step=True)

    def zero_grad(self, length=2):
        self._optimizer(length, lambda: None, ends_step=False)

    clip = zero_grad

    def _optimizer(self, length, inside, ends_step):
        begun = self.tracker.begins_optimizer()
        inside()
        self.tracker.optimized(begun, self.pass_time(length), ends_step=ends_step)

    def evaluation(self, length=7):
        self.tracker.act()
        self.tracker.interrupted(Interruption.EVALUATION, self.now, self.pass_time(length))

    def checkpoint(self, length=9):
        self.tracker.act()
        self.tracker.interrupted(Interruption.CHECKPOINT, self.now, self.pass_time(length))

    def micro_step(self, samples=8):
        self.data()
        self.forward(samples=samples)
        self.backward()

    def finish(self):
        self.tracker.finish()
        return self

    def of(self, kind):
        """Spans of a kind as (step, micro-step, begin, length)."""
        return [
            (r["step"], r["micro_step"], r["begin_ns"], r["end_ns"] - r["begin_ns"])
            for r in self.rows
            if r["kind"] == kind
        ]

    @property
    def of_steps(self):
        return [row for row in self.rows if row["kind"] == SpanKind.STEP]

    def rows_of(self, step):
        return [row for row in self.rows if row["step"] == step]

    @property
    def steps(self):
        """Steps as (begin, end, micro-steps, samples)."""
        return [
            (r["begin_ns"], r["end_ns"], r["index"], r["samples"])
            for r in self.rows
            if r["kind"] == SpanKind.STEP
        ]


@pytest.fixture
def script():
    return Script()


def test_step_and_then_zero_grad(script):
    for _ in range(2):
        script.micro_step()
        script.pass_time(100)
        script.optimizer()
        script.zero_grad()
        script.pass_time(10)
    script.finish()
    # A step goes on until the next act that is not the optimizer's; what lies between the two
    # belongs to the step that follows.
    assert script.steps == [(0, 157, 1, 8), (157, 324, 1, 8)]
    assert script.of(SpanKind.DATA) == [(0, 0, 0, 1), (1, 0, 167, 1)]
    assert script.of(SpanKind.FORWARD) == [(0, 0, 1, 20), (1, 0, 168, 20)]
    assert script.of(SpanKind.BACKWARD) == [(0, 0, 21, 30), (1, 0, 188, 30)]
    assert script.of(SpanKind.OPTIMIZER) == [
        (0, 0, 151, 4),
        (0, 0, 155, 2),
        (1, 0, 318, 4),
        (1, 0, 322, 2),
    ]


def test_zero_grad_before_backward(script):
    for _ in range(2):
        script.data()
        script.zero_grad()
        script.forward()
        script.zero_grad()
        script.backward()
        script.optimizer()
    script.finish()
    assert script.steps == [(0, 59, 1, 8), (59, 118, 1, 8)]
    assert [step for step, *_ in script.of(SpanKind.OPTIMIZER)] == [0, 0, 0, 1, 1, 1]


def test_zero_grad_at_the_head_of_the_loop_ends_the_step_before(script):
    for _ in range(2):
        script.zero_grad()
        script.micro_step()
        script.optimizer()
    script.finish()
    assert script.steps == [(0, 59, 1, 8), (59, 114, 1, 8)]


def test_accumulation(script):
    for _ in range(2):
        for samples in (8, 8, 3):
            script.micro_step(samples)
        script.clip()
        script.optimizer()
    script.finish()
    assert [s[2:] for s in script.steps] == [(3, 19), (3, 19)]
    for kind in (SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD):
        assert [row[:2] for row in script.of(kind)] == [*itertools.product((0, 1), (0, 1, 2))]
    assert script.tracker.micro_steps == {3: 2}
    assert script.tracker.samples == {8: 4, 3: 2}


def test_batch_that_is_fetched_ahead_is_no_micro_step(script):
    script.micro_step()
    script.data()
    script.optimizer()
    script.forward()
    script.backward()
    script.optimizer()
    script.finish()
    assert [s[2:] for s in script.steps] == [(1, 8), (1, 8)]


def test_several_optimizers_end_one_step(script):
    for _ in range(2):
        script.micro_step()
        script.optimizer(3)
        script.clip(1)
        script.optimizer(5)
        script.zero_grad(2)
        script.zero_grad(2)
    script.finish()
    assert script.steps == [(0, 64, 1, 8), (64, 128, 1, 8)]


def test_optimizers_with_a_backward_between_them_are_two_steps(script):
    script.micro_step()
    script.optimizer()
    script.forward(samples=4)
    script.backward()
    script.optimizer()
    script.finish()
    assert script.steps == [(0, 55, 1, 8), (55, 109, 1, 4)]


def test_scaler_that_skips_ends_the_step_all_the_same(script):
    # The attachment tells of the scaler's own step; unscaling runs inside of it.
    for _ in range(2):
        script.micro_step()
        script.optimizer(4, inside=lambda: script.clip(6))
    script.finish()
    assert script.steps == [(0, 61, 1, 8), (61, 122, 1, 8)]
    # Nothing counts twice: what follows the unscaling is the scaler's own.
    assert script.of(SpanKind.OPTIMIZER) == [
        (0, 0, 51, 6),
        (0, 0, 57, 4),
        (1, 0, 112, 6),
        (1, 0, 118, 4),
    ]


def test_second_scaler_step_unscales_within_the_same_step(script):
    script.micro_step()
    script.optimizer(4, inside=lambda: script.clip(6))
    script.optimizer(4, inside=lambda: script.clip(6))
    script.micro_step()
    script.optimizer()
    script.finish()
    assert [s[:2] for s in script.steps] == [(0, 71), (71, 126)]


def test_closure_with_forward_and_backward_inside_the_optimizer(script):
    def closure():
        script.pass_time(1)
        script.zero_grad(2)
        script.forward()
        script.backward()

    for _ in range(2):
        script.data()
        script.optimizer(4, inside=closure)
    script.finish()
    assert script.steps == [(0, 58, 1, 8), (58, 116, 1, 8)]
    assert script.of(SpanKind.FORWARD) == [(0, 0, 4, 20), (1, 0, 62, 20)]
    assert script.of(SpanKind.OPTIMIZER) == [
        (0, 0, 2, 2),
        (0, 0, 54, 4),
        (1, 0, 60, 2),
        (1, 0, 112, 4),
    ]


def test_closure_that_is_called_several_times(script):
    def closure():
        for _ in range(3):
            script.zero_grad(2)
            script.forward()
            script.backward()

    for _ in range(2):
        script.data()
        script.optimizer(4, inside=closure)
    script.finish()
    assert [s[2:] for s in script.steps] == [(3, 24), (3, 24)]
    assert [row[:2] for row in script.of(SpanKind.BACKWARD)] == [
        *itertools.product((0, 1), (0, 1, 2))
    ]


def test_several_forwards_for_one_backward_count_samples_once(script):
    script.data()
    script.forward(samples=8)
    script.forward(samples=16)
    script.backward()
    script.optimizer()
    script.finish()
    assert script.steps == [(0, 75, 1, 8)]
    samples = [r["samples"] for r in script.rows if r["kind"] == SpanKind.FORWARD]
    assert samples == [8, None]
    assert {row[:2] for row in script.of(SpanKind.FORWARD)} == {(0, 0)}


def test_two_backwards_after_one_forward_are_two_micro_steps(script):
    script.micro_step()
    script.backward()
    script.optimizer()
    script.finish()
    assert script.steps == [(0, 85, 2, 8)]
    assert [row[:2] for row in script.of(SpanKind.BACKWARD)] == [(0, 0), (0, 1)]


def test_samples_that_are_not_known(script):
    script.micro_step(samples=None)
    script.optimizer()
    assert script.finish().steps == [(0, 55, 1, None)]
    assert script.tracker.samples == {}


def test_interruptions_lie_in_the_step_that_follows():
    script = Script((INSTRUMENTED, 1), (PLAIN, 9))
    script.micro_step()
    script.optimizer()
    script.evaluation()
    script.evaluation()
    script.checkpoint()
    script.micro_step()
    script.optimizer()
    script.finish()
    # The block ends before the evaluation begins, and plain steps keep their interruptions.
    assert script.steps == [(0, 55, 1, 8), (55, 133, 1, 8)]
    rows = [r for r in script.rows if r["kind"] == SpanKind.INTERRUPTION]
    assert [(r["step"], r["index"], r["variant"]) for r in rows] == [
        (1, Interruption.EVALUATION, PLAIN),
        (1, Interruption.EVALUATION, PLAIN),
        (1, Interruption.CHECKPOINT, PLAIN),
    ]
    assert script.of(SpanKind.INTERRUPTION) == [(1, 0, 55, 7), (1, 0, 62, 7), (1, 0, 69, 9)]


def test_evaluation_is_no_forward(script):
    script.micro_step()
    script.optimizer()
    script.evaluation()
    script.micro_step()
    script.optimizer()
    script.finish()
    assert [s[2:] for s in script.steps] == [(1, 8), (1, 8)]
    assert script.steps[1][:2] == (55, 117)


def test_blocks_and_the_end_of_the_plan():
    script = Script((WARMUP, 1), (PLAIN, 2), (INSTRUMENTED, 1))
    for _ in range(6):
        script.micro_step()
        script.optimizer()
        script.pass_time(5)
    assert script.tracker.done
    # It ends when the next step begins, and records nothing more.
    assert script.switched == [(WARMUP, 0), (PLAIN, 60), (INSTRUMENTED, 180), (None, 240)]
    assert len(script.steps) == 4
    assert script.now == 360
    steps = [r for r in script.rows if r["kind"] == SpanKind.STEP]
    assert [(r["step"], r["block"], r["variant"]) for r in steps] == [
        (0, 0, WARMUP),
        (1, 1, PLAIN),
        (2, 1, PLAIN),
        (3, 2, INSTRUMENTED),
    ]
    # Between blocks there is a gap, in which is written; within one there is none.
    assert [s[:2] for s in script.steps] == [(0, 55), (60, 115), (115, 175), (180, 235)]
    assert {r["step"] for r in script.rows if r["kind"] == SpanKind.FORWARD} == {0, 3}
    before = len(script.rows)
    script.evaluation()
    script.checkpoint()
    assert len(script.finish().rows) == before


def test_only_the_step_that_is_complete_is_ended_by_the_end_of_the_script(script):
    script.micro_step()
    script.optimizer()
    script.micro_step()
    script.finish()
    assert script.steps == [(0, 55, 1, 8)]


ACTS = ("data", "forward", "backward", "optimizer", "zero_grad", "evaluation", "checkpoint")


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 50), st.integers(0, 9))))
def test_steps_of_a_block_leave_no_time_out(acts):
    script = Script((WARMUP, 2), (PLAIN, 2), (INSTRUMENTED, 3))
    for name, length, pause in acts:
        getattr(script, name)(length)
        script.pass_time(pause)
    script.finish()
    steps = [r for r in script.rows if r["kind"] == SpanKind.STEP]
    assert [r["step"] for r in steps] == list(range(len(steps)))
    for block in {r["block"] for r in steps}:
        of_block = [r for r in steps if r["block"] == block]
        walls = sum(r["end_ns"] - r["begin_ns"] for r in of_block)
        assert walls == of_block[-1]["end_ns"] - of_block[0]["begin_ns"]
    for step in steps:
        inside = [r for r in script.rows if r["step"] == step["step"] and r is not step]
        spent = sum(r["end_ns"] - r["begin_ns"] for r in inside)
        assert spent <= step["end_ns"] - step["begin_ns"]
        assert all(step["begin_ns"] <= r["begin_ns"] <= r["end_ns"] for r in inside)
        assert all(r["end_ns"] <= step["end_ns"] for r in inside)
        backwards = [r["micro_step"] for r in inside if r["kind"] == SpanKind.BACKWARD]
        if step["variant"] != PLAIN:
            assert step["index"] == len(backwards)
        # A micro-step has one backward.
        assert len(set(backwards)) == len(backwards)


def test_typical():
    assert typical({4: 2, 2: 1}, 1) == 4
    assert typical({4: 2, 2: 2}, 1) == 2
    assert typical({}, 7) == 7


def test_steps_between_windows_are_counted_only(script):
    script = Script((WARMUP, 1), (PLAIN, 1), (None, 3), (INSTRUMENTED, 1), (None, 2), (PLAIN, 1))
    for _ in range(10):
        script.micro_step()
        script.micro_step()
        # Clipping and setting to zero make no step of their own.
        script.clip()
        script.optimizer()
        script.zero_grad()
    script.finish()
    assert [(row["step"], row["variant"], row["block"]) for row in script.of_steps] == [
        (0, WARMUP, 0),
        (1, PLAIN, 1),
        (5, INSTRUMENTED, 2),
        (8, PLAIN, 3),
    ]
    assert {row[0] for row in script.of(SpanKind.FORWARD)} == {0, 5}
    assert [variant for variant, _ in script.switched] == [
        *(WARMUP, PLAIN, None, INSTRUMENTED, None, PLAIN, None)
    ]
    assert script.tracker.done
    # Every window begins with the first act after the steps that were only counted.
    length = 2 * 51 + 2 + 4 + 2
    assert [begin for begin, *_ in script.steps] == [length * step for step in (0, 1, 5, 8)]
    assert script.tracker.samples == {8: 8}
    assert script.tracker.micro_steps == {2: 4}


def test_windows_in_an_endless_plan(script):
    def endless():
        while True:
            yield INSTRUMENTED, 2
            yield None, 1

    script.tracker = StepTracker(
        script.tracker.recorder, endless(), lambda v: script.switched.append(v)
    )
    for _ in range(7):
        script.micro_step()
        script.optimizer()
    script.finish()
    assert [row["step"] for row in script.of_steps] == [0, 1, 3, 4, 6]
    assert not script.tracker.done


def test_skipped_and_several_optimizer_steps_between_windows(script):
    script = Script((WARMUP, 1), (None, 2), (INSTRUMENTED, 1))
    for _ in range(4):
        script.micro_step()
        script.optimizer()
        script.optimizer()
    script.finish()
    assert [row["step"] for row in script.of_steps] == [0, 3]


def test_a_window_that_begins_inside_a_closure(script):
    script = Script((WARMUP, 1), (None, 2), (INSTRUMENTED, 2))

    def inside():
        script.zero_grad()
        script.forward()
        script.backward()

    for _ in range(5):
        script.pass_time(100)
        script.optimizer(4, inside)
    script.finish()
    assert [row["step"] for row in script.of_steps] == [0, 3, 4]
    for step in (3, 4):
        kinds = [(row["kind"], row["end_ns"] - row["begin_ns"]) for row in script.rows_of(step)]
        # What a closure did before the window began is not in it.
        assert (SpanKind.FORWARD, 20) in kinds
        assert (SpanKind.BACKWARD, 30) in kinds
        assert max(length for kind, length in kinds if kind == SpanKind.OPTIMIZER) <= 4


def test_what_is_kept_does_not_grow_with_training(script):
    script = Script((INSTRUMENTED, 1500), (None, 10**6))
    for step in range(1600):
        script.micro_step(samples=step)
        script.optimizer()
    assert len(script.tracker.samples) == 1000
    assert script.tracker.recorder._spans == []

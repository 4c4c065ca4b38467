"""Finds micro-steps and optimizer steps in what a training script does.

A script tells nobody where its steps begin. What can be seen are single acts: a batch is
fetched, a model is called, a backward runs, an optimizer steps. A step ends with the last act
of the optimizers before anything else happens, and the next one begins there, so that the
steps of a block leave no time out. In plain blocks only the steps and their interruptions are
recorded. Between the windows of a long run nothing is: steps are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ddp_profiler.measure.clock import Mark
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.measure.scripts.feeding import Tokens
from ddp_profiler.schema import Interruption, SpanKind, Variant

_OBSERVED = (Variant.WARMUP, Variant.INSTRUMENTED)
_MOST_VALUES = 1000
"""So many different values are counted: what is kept of a run does not grow with it."""


class StepTracker:
    """Turns the acts of a script into spans of micro-steps and steps.

    Each act is announced before it begins, by :meth:`act`, and told when it has ended.

    Args:
        recorder: Takes the spans.
        plan: Variants and numbers of steps, one block after the other, for as long as it likes;
            steps of the variant None are counted only.
        switch: Told, between two steps, the variant of the block that begins; None where
            nothing is recorded from now on: for some steps, or for good (:attr:`done`).
    """

    def __init__(
        self,
        recorder: Recorder,
        plan: Iterable[tuple[Variant | None, int]],
        switch: Callable[[Variant | None], None],
    ) -> None:
        self.recorder = recorder
        self.step = 0
        self.done = False
        """Whether all blocks of the plan have been trained."""
        self.micro_steps: dict[int, int] = {}
        """How many recorded steps had so many backward calls."""
        self.samples: dict[int, int] = {}
        """How many recorded micro-steps were entered by so many samples."""
        self.acts = 0
        """Acts that have ended so far."""
        self._last_ended: Mark | None = None
        self._plan = iter(plan)
        self._switch = switch
        self._block = -1
        self._left = 0
        self._variant: Variant | None = None
        self.stepped = False
        """Whether a step that is only counted may be over: an optimizer has stepped."""
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._micro_step = 0
        self._forwards = 0
        self._had_backward = False
        self._backwards = 0
        self._samples: int | None = None
        self._for_evaluation: tuple[Mark, Mark] | None = None
        self.fetched_for_evaluation = False
        """Whether the last fetch seemed to be for an evaluation, and no training followed yet."""
        self._tokens: int | None = None
        self._next_block()

    @property
    def observing(self) -> bool:
        """Whether acts are recorded now, and not only the steps that they end."""
        return self._variant in _OBSERVED

    @property
    def warming_up(self) -> bool:
        """Whether this is a warm-up step: left out of the figures, with time for more."""
        return self._variant is Variant.WARMUP

    @property
    def recording(self) -> bool:
        """Whether steps are recorded now, and not only counted."""
        return self._variant is not None

    def act(self, *, of_optimizer: bool = False) -> None:
        """Announces an act: a fetch, a forward, a backward, or one of the optimizers.

        Args:
            of_optimizer: Whether it may belong to the end of a step: optimizer.step, zero_grad,
                clipping, unscaling.
        """
        if not self.recording:
            if of_optimizer or not self.stepped:
                return
            self._count_step()
        elif self._end is not None and not of_optimizer:
            self._close_step()
        if not self.recording:
            return
        if self._begin is None:
            self._begin = self.recorder.mark()
            self._begin_step()

    def fetched(self, begin: Mark, end: Mark, *, evaluates: bool = False) -> None:
        """Tells that the loop has waited for its next batch.

        Args:
            begin: When it began to wait.
            end: When it had the batch.
            evaluates: Whether the batch seems to be for an evaluation: gradients are off, or no
                model is in training mode. It counts as one unless the model is trained on it,
                as by scripts that train in evaluation mode.
        """
        self._settle()
        self._acted(end)
        self._next_micro_step()
        self._record(SpanKind.DATA, begin, end)
        self.fetched_for_evaluation = evaluates
        if evaluates and self.recording:
            self._for_evaluation = begin, end

    def exhausted(self) -> None:
        """Tells that a loop over batches has come to its end."""
        self._settle()

    def begins_call(self) -> None:
        """Tells that a forward begins; after a backward it begins a micro-step."""
        self._next_micro_step()

    def called(
        self, begin: Mark, end: Mark, samples: int | None, tokens: Tokens | None = None
    ) -> None:
        """Tells that the model has been called.

        Where several calls share one backward, samples and tokens of the first count.
        """
        self._for_evaluation = None
        self.fetched_for_evaluation = False
        self._acted(end)
        if not self.recording:
            return
        if self._forwards:
            samples = tokens = None
        self._forwards += 1
        if samples is not None:
            _count(self.samples, samples)
            self._samples = (self._samples or 0) + samples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens.count
        if self.observing:
            self.recorder.span(
                SpanKind.FORWARD,
                begin,
                end,
                index=-1 if tokens is None or tokens.places is None else tokens.places,
                samples=samples,
                value=None if tokens is None else tokens.count,
            )

    def called_without_gradients(self, begin: Mark, end: Mark) -> None:
        """Tells that training has called a model without gradients, as a GAN its generator.

        Its input is no batch that is trained on.
        """
        self._acted(end)
        self._record(SpanKind.FORWARD, begin, end)

    def begins_backward(self) -> None:
        """Tells that a backward begins; one that follows another is a micro-step of its own."""
        self._next_micro_step()

    def went_back(self, begin: Mark, end: Mark) -> None:
        """Tells that backward has returned."""
        self._acted(end)
        self._had_backward = True
        self._backwards += 1
        self._record(SpanKind.BACKWARD, begin, end)

    def begins_optimizer(self) -> tuple[Mark | None, int]:
        """Tells that an optimizer begins to step, clip, unscale or set gradients to zero.

        Returns:
            What :meth:`optimized` needs.
        """
        self.act(of_optimizer=True)
        return self.recorder.mark() if self.recording else None, self.acts

    def optimized(
        self, begun: tuple[Mark | None, int], end: Mark | None, *, ends_step: bool
    ) -> None:
        """Tells that it has ended.

        What ran inside has spans of its own: a closure's forward and backward, a scaler's
        unscaling. The optimizer's is what follows them.

        Args:
            begun: What :meth:`begins_optimizer` returned.
            end: When it had ended; None where steps are only counted.
            ends_step: Whether it was a step, which the next act of another kind ends.
        """
        if end is None or not self.recording:
            self.stepped |= ends_step
            return
        begin, acts = begun
        if self.acts != acts or begin is None:
            # A window may begin inside a closure.
            begin = end if self._last_ended is None else self._last_ended
        self._acted(end)
        self._record(SpanKind.OPTIMIZER, begin, end)
        if ends_step or self._end is not None:
            self._end = end

    def interrupted(self, reason: Interruption, begin: Mark, end: Mark) -> None:
        """Tells of something inside a step that is no training: an evaluation, a checkpoint."""
        self._settle()
        self._acted(end)
        if self.recording and self._begin is not None:
            self.recorder.span(SpanKind.INTERRUPTION, begin, end, index=int(reason))

    def finish(self) -> None:
        """Ends the last step where an optimizer has stepped; what is incomplete has no step."""
        if self.recording and self._end is not None:
            self._close_step()
        self.recorder.flush()

    def _settle(self) -> None:
        """Records the last fetch as part of an evaluation, if it was for one."""
        fetch, self._for_evaluation = self._for_evaluation, None
        if fetch is not None:
            self.recorder.span(SpanKind.INTERRUPTION, *fetch, index=int(Interruption.EVALUATION))

    def _acted(self, end: Mark) -> None:
        self.acts += 1
        self._last_ended = end

    def _record(self, kind: SpanKind, begin: Mark, end: Mark) -> None:
        if self.observing:
            self.recorder.span(kind, begin, end)

    def _begin_step(self) -> None:
        self._backwards, self._samples, self._tokens = 0, None, None
        self._begin_micro_step(0)

    def _next_micro_step(self) -> None:
        if self._had_backward and self.recording:
            self._begin_micro_step(self._micro_step + 1)

    def _begin_micro_step(self, number: int) -> None:
        self._micro_step = number
        self._forwards = 0
        self._had_backward = False
        self.recorder.begin_micro_step(self.step, number)

    def _count_step(self) -> None:
        self.stepped = False
        self.step += 1
        self._left -= 1
        if self._left == 0:
            self._next_block()

    def _close_step(self) -> None:
        self._settle()
        _count(self.micro_steps, self._backwards)
        self.recorder.begin_micro_step(self.step, -1)
        self.recorder.step_span(
            self._begin,
            self._end,
            micro_steps=self._backwards,
            samples=self._samples,
            tokens=self._tokens,
        )
        self.step += 1
        self._begin, self._end = self._end, None
        self._left -= 1
        if self._left == 0:
            self.recorder.flush()
            # Writing has taken time that belongs to no step.
            self._begin = None
            self._next_block()
        if self._begin is not None:
            self._begin_step()

    def _next_block(self) -> None:
        block = next(self._plan, None)
        self.done = block is None
        self._variant, self._left = block or (None, 0)
        if self._variant is not None:
            self._block += 1
            self.recorder.begin_block(0, 0, self._block, self._variant)
        # What was last seen lies before everything that was only counted.
        self._last_ended, self._had_backward = None, False
        self._switch(self._variant)


def _count(counts: dict[int, int], value: int) -> None:
    if value in counts or len(counts) < _MOST_VALUES:
        counts[value] = counts.get(value, 0) + 1


def typical(counts: Mapping[int, int], otherwise: int) -> int:
    """Returns the value that occurs most, the smallest of several; ``otherwise`` of none.

    >>> typical({4: 2, 2: 1}, 1), typical({}, 1)
    (4, 1)
    """
    return min(counts, key=lambda value: (-counts[value], value), default=otherwise)

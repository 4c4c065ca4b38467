"""Finds micro-steps and optimizer steps in what a training script does.

A script tells nobody where its steps begin. What can be seen are single acts: a batch is
fetched, a model is called, a backward runs, an optimizer steps. A step ends with the last act
of the optimizers before anything else happens, and the next one begins there, so that the
steps of a block leave no time out. In plain blocks only the steps and their interruptions are
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_profiler.measure.clock import Mark
from ddp_profiler.measure.feeding import Tokens
from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import Interruption, SpanKind, Variant

_OBSERVED = (Variant.WARMUP, Variant.INSTRUMENTED)


class StepTracker:
    """Turns the acts of a script into spans of micro-steps and steps.

    Each act is announced before it begins, by :meth:`act`, and told when it has ended.

    Args:
        recorder: Takes the spans.
        plan: Variants and numbers of steps, one block after the other.
        switch: Told, between two steps, the variant of the block that begins; None at the end
            of the plan.
    """

    def __init__(
        self,
        recorder: Recorder,
        plan: Sequence[tuple[Variant, int]],
        switch: Callable[[Variant | None], None],
    ) -> None:
        self.recorder = recorder
        self.step = 0
        self.micro_steps: list[int] = []
        """Backward calls of each step of the plan."""
        self.samples: list[int] = []
        """Samples that entered each micro-step of the plan."""
        self.acts = 0
        """Acts that have ended so far."""
        self._last_ended: Mark | None = None
        self._plan = list(plan)
        self._switch = switch
        self._block = -1
        self._left = 0
        self._variant: Variant | None = None
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._micro_step = 0
        self._forwards = 0
        self._had_backward = False
        self._backwards = 0
        self._samples: int | None = None
        self._for_evaluation: tuple[Mark, Mark] | None = None
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
    def done(self) -> bool:
        """Whether all blocks of the plan have been trained."""
        return self._variant is None

    def act(self, *, of_optimizer: bool = False) -> None:
        """Announces an act: a fetch, a forward, a backward, or one of the optimizers.

        Args:
            of_optimizer: Whether it may belong to the end of a step: optimizer.step, zero_grad,
                clipping, unscaling.
        """
        if self.done:
            return
        if self._end is not None and not of_optimizer:
            self._close_step()
            if self.done:
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
        if evaluates and not self.done:
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
        self._acted(end)
        if self.done:
            return
        if self._forwards:
            samples = tokens = None
        self._forwards += 1
        if samples is not None:
            self.samples.append(samples)
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

    def begins_backward(self) -> None:
        """Tells that a backward begins; one that follows another is a micro-step of its own."""
        self._next_micro_step()

    def went_back(self, begin: Mark, end: Mark) -> None:
        """Tells that backward has returned."""
        self._acted(end)
        self._had_backward = True
        self._backwards += 1
        self._record(SpanKind.BACKWARD, begin, end)

    def begins_optimizer(self) -> tuple[Mark, int]:
        """Tells that an optimizer begins to step, clip, unscale or set gradients to zero.

        Returns:
            What :meth:`optimized` needs.
        """
        self.act(of_optimizer=True)
        return self.recorder.mark(), self.acts

    def optimized(self, begun: tuple[Mark, int], end: Mark, *, ends_step: bool) -> None:
        """Tells that it has ended.

        What ran inside has spans of its own: a closure's forward and backward, a scaler's
        unscaling. The optimizer's is what follows them.

        Args:
            begun: What :meth:`begins_optimizer` returned.
            end: When it had ended.
            ends_step: Whether it was a step, which the next act of another kind ends.
        """
        begin, acts = begun
        if self.acts != acts:
            begin = self._last_ended
        self._acted(end)
        if self.done:
            return
        self._record(SpanKind.OPTIMIZER, begin, end)
        if ends_step or self._end is not None:
            self._end = end

    def interrupted(self, reason: Interruption, begin: Mark, end: Mark) -> None:
        """Tells of something inside a step that is no training: an evaluation, a checkpoint."""
        self._settle()
        self._acted(end)
        if not self.done and self._begin is not None:
            self.recorder.span(SpanKind.INTERRUPTION, begin, end, index=int(reason))

    def finish(self) -> None:
        """Ends the last step where an optimizer has stepped; what is incomplete has no step."""
        if not self.done and self._end is not None:
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
        if self._had_backward and not self.done:
            self._begin_micro_step(self._micro_step + 1)

    def _begin_micro_step(self, number: int) -> None:
        self._micro_step = number
        self._forwards = 0
        self._had_backward = False
        self.recorder.begin_micro_step(self.step, number)

    def _close_step(self) -> None:
        self._settle()
        self.micro_steps.append(self._backwards)
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
        if not self._plan:
            self._variant = None
            self._switch(None)
            return
        self._variant, self._left = self._plan.pop(0)
        self._block += 1
        self.recorder.begin_block(0, 0, self._block, self._variant)
        self._switch(self._variant)


def typical(values: Sequence[int], otherwise: int) -> int:
    """Returns the value that occurs most, the smallest of several; ``otherwise`` of none.

    >>> typical([4, 4, 2], 1), typical([], 1)
    (4, 1)
    """
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return min(counts, key=lambda value: (-counts[value], value), default=otherwise)

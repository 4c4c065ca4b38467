"""Collects a rank's marks in memory and hands them, as spans, to a sink between blocks.

Nothing here reads a device or touches a file while a step runs: a mark is appended
to a list, and :meth:`Recorder.flush` tells times and writes when the loop allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_profiler.measure.clock import Mark, Timeline
from ddp_profiler.schema import SPAN_COLUMNS, SpanKind, Variant

Columns = Mapping[str, Sequence[int | None]]

_FLUSH_WAIT_S = 0.5
"""How long a flush waits for completions that are noticed late; then the end stays null."""


@dataclass(slots=True)
class OpenSpan:
    """A collective in flight: its end is filled in by whoever notices its completion.

    ``awaited`` is false where nobody will.
    """

    kind: SpanKind
    step: int
    micro_step: int
    index: int
    begin: Mark
    nbytes: int
    end: Mark | None = None
    awaited: bool = True
    value: int | None = None


_Span = tuple[int, int, SpanKind, int, Mark, Mark | None, int | None, int | None, int | None]
"""step, micro_step, kind, index, begin, end, nbytes, samples, value."""


class Recorder:
    """Marks of one rank.

    Args:
        timeline: Makes marks and tells their times.
        sink: Takes the columns of one batch of spans (``schema.SPAN_COLUMNS``).

    Attributes:
        phase: ``FORWARD`` or ``BACKWARD`` while the loop is in one of them, else None. Tells
            where a collective belongs that a module issues.
        reduced_outside_bytes: Bytes that the loop handed to ``all_reduce`` by itself, outside of
            both.
    """

    def __init__(self, timeline: Timeline, sink: Callable[[Columns], None]) -> None:
        self.timeline = timeline
        self.mark = timeline.mark
        self.step = -1
        self.micro_step = -1
        self.backward_pass = -1
        self.phase: SpanKind | None = None
        self.reduced_outside_bytes = 0
        self._sink = sink
        self._place = (0, 0, 0, Variant.WARMUP)
        self._spans: list[_Span] = []
        self._open: list[OpenSpan] = []
        self._next_index = 0

    def begin_block(self, level: int, repetition: int, block: int, variant: Variant) -> None:
        """Starts a block: what is recorded until the next flush belongs to it."""
        self._place = (level, repetition, block, variant)

    def begin_micro_step(self, step: int, micro_step: int) -> None:
        """Starts a micro-step: the spans that follow belong to it, buckets count from 0."""
        self.step, self.micro_step = step, micro_step
        self.phase = None
        self._next_index = 0

    def span(
        self,
        kind: SpanKind,
        begin: Mark,
        end: Mark,
        *,
        index: int = -1,
        nbytes: int | None = None,
        samples: int | None = None,
        value: int | None = None,
    ) -> None:
        """Records a span of the current micro-step."""
        self._spans.append(
            (self.step, self.micro_step, kind, index, begin, end, nbytes, samples, value)
        )

    def step_span(
        self,
        begin: Mark,
        end: Mark,
        *,
        micro_steps: int = -1,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Records the span of a whole optimizer step.

        Args:
            begin: Its begin.
            end: Its end.
            micro_steps: Backward calls in it, where they were counted.
            samples: Samples that entered forward in it, where they were counted.
            tokens: Tokens that entered forward in it, where there are any.
        """
        self._spans.append(
            (self.step, -1, SpanKind.STEP, micro_steps, begin, end, None, samples, tokens)
        )

    def point(self, kind: SpanKind, index: int = -1, value: int | None = None) -> None:
        """Records a point in time of the current micro-step."""
        mark = self.mark()
        self._spans.append((self.step, self.micro_step, kind, index, mark, mark, None, None, value))

    def hand_over(self, kind: SpanKind, nbytes: int, value: int | None = None) -> OpenSpan:
        """Records that a collective is handed to the backend now.

        Returns:
            The open span; set its ``end`` to a mark once the completion is noticed.
        """
        index = -1
        if kind is SpanKind.GRADIENT:
            index, self._next_index = self._next_index, self._next_index + 1
        span = OpenSpan(kind, self.step, self.micro_step, index, self.mark(), nbytes, value=value)
        self._open.append(span)
        return span

    def flush(self) -> None:
        """Tells the times of all marks and hands the block's spans to the sink.

        Waits a bounded time for completions that have not been noticed yet.
        """
        spans, self._spans = self._spans, []
        collectives, self._open = self._open, []
        if not spans and not collectives:
            return
        deadline = time.monotonic() + _FLUSH_WAIT_S
        while any(c.awaited and c.end is None for c in collectives) and time.monotonic() < deadline:
            time.sleep(0.001)
        # What is noticed from here on is dropped; on a GPU its event is not pooled again.
        time_ns = self.timeline.time_ns
        level, repetition, block, variant = self._place
        spans += [
            (c.step, c.micro_step, c.kind, c.index, c.begin, c.end, c.nbytes, None, c.value)
            for c in collectives
        ]
        rows = [
            (
                step,
                micro_step,
                int(kind),
                index,
                time_ns(begin),
                None if end is None else time_ns(end),
                nbytes,
                samples,
                value,
            )
            for step, micro_step, kind, index, begin, end, nbytes, samples, value in spans
        ]
        # A mark may end one span and begin the next: release it once.
        marks = {id(m): m for span in spans for m in span[4:6] if m is not None}
        self.timeline.release(list(marks.values()))
        count = len(rows)
        fixed: list[Sequence[int]] = [
            [level] * count,
            [repetition] * count,
            [block] * count,
            [int(variant)] * count,
        ]
        names = [name for name, _ in SPAN_COLUMNS]
        self._sink(dict(zip(names, [*fixed, *zip(*rows, strict=True)], strict=True)))

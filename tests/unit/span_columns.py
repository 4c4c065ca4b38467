"""Builds a rank's spans by hand, with times in ms."""

from __future__ import annotations

import numpy as np

from ddp_profiler.schema import SPAN_COLUMNS, SpanKind, Variant

NULL = np.iinfo(np.int64).min
MS = 1_000_000


class Spans:
    """Spans of one rank; each call of `add` may override the place set in the constructor."""

    def __init__(self, **place) -> None:
        self.rows: list[dict] = []
        self.place = {
            "level": 0,
            "repetition": 0,
            "block": 1,
            "variant": int(Variant.INSTRUMENTED),
            "step": 0,
            "micro_step": 0,
            "index": -1,
            "bytes": None,
            "samples": None,
            "value": None,
            **place,
        }

    def add(self, kind: SpanKind, begin: float, end: float | None, **more) -> Spans:
        if kind in (SpanKind.STEP, SpanKind.OPTIMIZER):
            more.setdefault("micro_step", -1)
        times = {
            "kind": int(kind),
            "begin_ns": round(begin * MS),
            "end_ns": None if end is None else round(end * MS),
        }
        self.rows.append({**self.place, **times, **more})
        return self

    def step(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.STEP, begin, end, **more)

    def data(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.DATA, begin, end, **more)

    def forward(self, begin, end, samples=8, **more) -> Spans:
        return self.add(SpanKind.FORWARD, begin, end, samples=samples, **more)

    def forward_comm(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.FORWARD_COMM, begin, end, **more)

    def backward(self, begin, local_end, end, **more) -> Spans:
        if local_end is not None:
            self.add(SpanKind.LOCAL_BACKWARD_END, local_end, local_end, **more)
        return self.add(SpanKind.BACKWARD, begin, end, **more)

    def backward_comm(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.BACKWARD_COMM, begin, end, **more)

    def gradient(self, begin, end, nbytes=1000, **more) -> Spans:
        return self.add(SpanKind.GRADIENT, begin, end, bytes=nbytes, **more)

    def bookkeeping(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.BOOKKEEPING, begin, end, bytes=4, **more)

    def optimizer(self, begin, end, **more) -> Spans:
        return self.add(SpanKind.OPTIMIZER, begin, end, **more)

    def columns(self) -> dict[str, np.ndarray]:
        return {
            name: np.array(
                [NULL if row[name] is None else row[name] for row in self.rows], dtype=np.int64
            )
            for name, _ in SPAN_COLUMNS
        }

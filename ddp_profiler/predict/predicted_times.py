"""Predictions as a source of step times, for settings that a run has not measured."""

from __future__ import annotations

from ddp_profiler.analysis.results import Summary
from ddp_profiler.batch import Batch
from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.predict.prediction import predictor_of
from ddp_profiler.predict.request import Request
from ddp_profiler.predict.step_time import StepTime, StepTimes, unknown

_INTERVAL_PCT = 90


def predicted(summary: Summary) -> StepTimes:
    """Returns a source that replays a study at other dp and accumulation.

    It knows batches with the micro-batch of the study only. Of a run that carries no
    prediction, as that of a script, it knows nothing.
    """
    predictor, _ = predictor_of(summary)
    if predictor is None:
        return unknown
    micro_batch = predictor.evidence.largest.micro_batch

    def ask(batch: Batch) -> StepTime | None:
        if batch.micro_batch != micro_batch:
            return None
        try:
            found = predictor.predict(Request(batch.dp, accumulation=batch.accumulation))
        except DdpProfilerError:
            # Nothing in the run carries it, such as the network between nodes.
            return None
        step = found.step_ms
        marked = ", beyond what was measured" if found.extrapolated else ""
        return StepTime(step.median, step.interval90, _INTERVAL_PCT, f"predicted{marked}")

    return ask

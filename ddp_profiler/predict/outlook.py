"""What more ranks would bring: the next doublings of dp, and how far such a prediction was off."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.predict.prediction import Predictor
from ddp_profiler.predict.request import Request
from ddp_profiler.predict.results import BackTests, Prediction

_DOUBLINGS = 3


@dataclass(frozen=True)
class Outlook:
    """Predictions of a study.

    Attributes:
        predictions: The next doublings of the largest dp, settings as measured there.
        samples_per_s_interval90: 90 % of each one's throughput.
        back_tests: Every measured level, predicted from the others; None without predictions.
        why_not: Why there are none; None if there are.
    """

    predictions: tuple[Prediction, ...]
    samples_per_s_interval90: tuple[tuple[float, float], ...]
    back_tests: BackTests | None
    why_not: str | None


def look_ahead(predictor: Predictor | None, why_not: str) -> Outlook:
    """Predicts dp times 2, 4 and 8 of a study.

    Args:
        predictor: Made of a run; None where it carries no prediction.
        why_not: Why then.
    """
    if predictor is None:
        return Outlook((), (), None, why_not)
    try:
        largest = predictor.evidence.largest.dp
        found = tuple(predictor.predict(Request(largest * 2**k)) for k in range(1, _DOUBLINGS + 1))
        tests = predictor.back_test()
    except DdpProfilerError as error:
        return Outlook((), (), None, f"{error.message} {error.remedy}".rstrip())
    rates = []
    for one in found:
        low, high = one.step_ms.interval90
        rates.append((one.global_batch / high * 1e3, one.global_batch / low * 1e3))
    return Outlook(found, tuple(rates), tests, None)

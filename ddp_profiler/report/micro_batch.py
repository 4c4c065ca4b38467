"""Memory and speed against the micro-batch, as a table and in words."""

from __future__ import annotations

from rich.table import Table

from ddp_profiler import units
from ddp_profiler.analysis.micro_batch import (
    NEAR_BEST_FRACTION,
    MicroBatchCurve,
    MicroBatchPoint,
)
from ddp_profiler.report.text import table_of

_OUTCOMES = {
    "fits": "yes",
    "out_of_memory": "no: out of memory",
    "over_limit": "no: over the limit",
    "not_tried": "no, as expected",
}


def micro_batch_table(curve: MicroBatchCurve) -> Table:
    """Returns the table: a row for each micro-batch that was tried."""
    table = table_of(
        (f"micro-batch at dp {curve.dp}", "right"),
        ("peak memory", "right"),
        ("micro-step (ms)", "right"),
        ("samples/s", "right"),
        ("fits", "left"),
    )
    for point in curve.points:
        table.add_row(
            str(point.micro_batch),
            units.nbytes(point.peak_bytes),
            units.ms(point.micro_step_ms.median if point.micro_step_ms else None),
            units.rate(point.samples_per_s),
            _fits(point),
        )
    return table


def micro_batch_lines(curve: MicroBatchCurve | None) -> list[str]:
    """Returns which micro-batch to use, and what the figures are."""
    if curve is None:
        return []
    limit = f"{units.nbytes(curve.limit_bytes)} a rank ({curve.limit_source})"
    largest, efficient = curve.largest_micro_batch, curve.efficient_micro_batch
    if largest is None or efficient is None:
        return [f"micro-batch: not even the smallest fits in {limit}."]
    why = {
        "memory": f"the largest that was seen to fit in {limit}",
        "slower": "the largest that was tried, since samples get slower; memory would hold it",
        "time": "the largest that was tried in the time for it; memory would hold it",
    }.get(curve.ended, "the largest that was tried")
    lines = [
        f"micro-batch: {efficient} is the smallest within {NEAR_BEST_FRACTION * 100:.0f} % of the "
        f"best speed: use it, or up to {largest} in its place where fewer micro-steps are wanted.",
        f"micro-batch: {largest} is {why}.",
    ]
    if curve.bytes_per_sample is not None:
        lines.append(
            f"memory: {units.nbytes(curve.bytes_per_sample)} a sample and "
            f"{units.nbytes(curve.fixed_bytes)} beside, by the larger peaks "
            f"({curve.memory_source})."
        )
    return lines


def _fits(point: MicroBatchPoint) -> str:
    return _OUTCOMES.get(point.outcome, point.outcome)

"""The table and the JSON of predicted steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ddp_profiler import units
from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import RunResult
from ddp_profiler.predict.network import NetworkModel
from ddp_profiler.predict.results import BackTests, Prediction
from ddp_profiler.report.text import table_of, text_console

_COLUMNS = 6
"""Predictions beside each other in the table of parts."""
_FORMS_SHOWN = 3
_FORM_NAMES = {
    "ring": "ring",
    "tree": "tree",
    "shared": "ring on one shared medium",
}


def as_json(
    run: RunResult,
    found: Sequence[Prediction],
    tests: BackTests,
    networks: Sequence[NetworkModel],
) -> dict[str, Any]:
    """Returns the content of ``predict --json``.

    Args:
        run: The run that they are made from.
        found: The predictions.
        tests: Measured levels predicted from the others.
        networks: The models of AllReduce, within a node and between nodes.
    """
    return {
        "run_id": run.run_id,
        "partial": run.partial,
        "predictions": [asdict(one) for one in found],
        "backtest": [asdict(test) for test in tests.tests],
        "backtest_not_possible": tests.why_not,
        "backtest_left_out": list(tests.left_out),
        "model": {"networks": [_network_json(model) for model in networks]},
    }


def _network_json(model: NetworkModel) -> dict[str, Any]:
    curve = model.curve
    return {
        "between_nodes": model.between_nodes,
        "form": curve.form,
        "overhead_ms": curve.overhead_ms,
        "latency_ms": curve.latency_ms,
        "bandwidth_gb_per_s": 1e-6 / curve.ms_per_byte if curve.ms_per_byte else None,
        "by_size": [{"bytes": size, "ratio": ratio} for size, ratio in curve.correction],
        "ranks": list(model.ranks),
        "held_out_unit": model.unit,
        "held_out": [{"form": one.form, "rms_error_fraction": one.error} for one in model.held_out],
        "not_told_apart": [
            {
                "form": rival.form,
                "overhead_ms": rival.overhead_ms,
                "latency_ms": rival.latency_ms,
                "bandwidth_gb_per_s": 1e-6 / rival.ms_per_byte if rival.ms_per_byte else None,
            }
            for rival in model.rivals
        ],
    }


def render(
    run: RunResult,
    found: Sequence[Prediction],
    tests: BackTests,
    networks: Sequence[NetworkModel],
    *,
    color: bool = False,
) -> str:
    """Returns predictions as text of at most 80 columns, readable without colour.

    Args:
        run: The run that they are made from.
        found: The predictions.
        tests: Measured levels predicted from the others.
        networks: The models of AllReduce.
        color: Whether escapes for colour may be used.
    """
    output = io.StringIO()
    console = text_console(output, color=color)
    partial = ", which is PARTIAL: ddp-profiler analyze says what is missing" if run.partial else ""
    console.print(Text(units.printable(f"Predictions from {run.run_id}{partial}")))
    console.print()
    console.print(_steps(found))
    console.print()
    for begin in range(0, len(found), _COLUMNS):
        console.print(_parts(found[begin : begin + _COLUMNS]))
        console.print()
    for line in _back_test_heading(tests):
        console.print(Text(units.printable(line)))
    if tests.tests:
        console.print(_back_tests(tests))
    console.print()
    for model in networks:
        console.print(Text(units.printable(_network_line(model))))
    notes = _notes(found)
    if notes:
        console.print()
        for line in notes:
            console.print(Text(units.printable(line)))
    return output.getvalue()


def _steps(found: Sequence[Prediction]) -> Table:
    table = table_of(
        ("dp", "right"),
        ("nodes", "right"),
        ("acc", "right"),
        ("batch", "right"),
        ("step ms", "right"),
        ("90 % interval", "right"),
        ("samples/s", "right"),
        ("efficiency", "right"),
    )
    for one in found:
        low, high = one.step_ms.interval90
        table.add_row(
            f"{one.dp}{'*' if one.extrapolated else ''}",
            str(one.nodes),
            str(one.accumulation),
            f"{one.global_batch}",
            units.ms(one.step_ms.median),
            f"{units.ms(low)} to {units.ms(high)}",
            units.rate(one.samples_per_s),
            units.percent(one.efficiency),
        )
    return table


def _parts(found: Sequence[Prediction]) -> Table:
    table = table_of(("ms a step", "left"), *((f"dp {one.dp}", "right") for one in found))
    for part in PARTS:
        if any(one.breakdown_ms[part] >= 0.005 for one in found):
            table.add_row(
                part.replace("_", " "), *(units.ms(one.breakdown_ms[part]) for one in found)
            )
    table.add_row("step", *(units.ms(one.step_ms.median) for one in found))
    if any(one.measured_ms is not None for one in found):
        table.add_row("  as it was measured", *(units.ms(one.measured_ms) for one in found))
    table.add_row("overlap", *(units.percent(one.overlap_fraction, 0) for one in found))
    table.add_row("no overlap at all", *(units.ms(one.naive_ms.no_overlap_ms) for one in found))
    table.add_row("perfect overlap", *(units.ms(one.naive_ms.perfect_overlap_ms) for one in found))
    return table


def _back_test_heading(tests: BackTests) -> list[str]:
    if tests.why_not is not None:
        return [f"Back-test: not possible: {tests.why_not}."]
    rest = ", ".join(tests.left_out)
    alone = f" Not {rest}: the only one of its kind, or without a dp 1 to start from."
    return [
        "Back-test: each measured level predicted from the others."
        + (alone if tests.left_out else "")
    ]


def _back_tests(tests: BackTests) -> Table:
    table = table_of(
        ("held out", "left"),
        ("predicted ms", "right"),
        ("90 % interval", "right"),
        ("measured ms", "right"),
        ("error", "right"),
    )
    for test in tests.tests:
        low, high = test.interval90
        table.add_row(
            units.printable(test.held_out),
            units.ms(test.predicted_ms),
            f"{units.ms(low)} to {units.ms(high)}",
            units.ms(test.measured_ms),
            f"{test.error_pct:+.1f} %",
        )
    return table


def _network_line(model: NetworkModel) -> str:
    curve = model.curve
    where = "between nodes" if model.between_nodes else "within a node"
    rate = f"{1e-6 / curve.ms_per_byte:.3g} GB/s" if curve.ms_per_byte else "no limit"
    tried = ", ".join(
        f"{one.form} {units.percent(one.error)}" for one in model.held_out[:_FORMS_SHOWN]
    )
    others = [_FORM_NAMES[rival.form] for rival in model.rivals if rival.form != curve.form]
    if any(rival.form == curve.form for rival in model.rivals):
        others.append("all of its latency once, or all in hops")
    rivals = ", ".join(dict.fromkeys(others))
    held_out = f" Held out by {model.unit}: {tried}." if tried else ""
    return (
        f"AllReduce {where}: {_FORM_NAMES[curve.form]}"
        f"{', by size' if curve.correction else ''}; {units.ms(curve.overhead_ms)} ms + "
        f"{units.ms(curve.latency_ms)} ms a hop, {rate}; measured on "
        f"{', '.join(map(str, model.ranks))} ranks.{held_out}"
        + (f" Not told apart from: {rivals}." if rivals else "")
    )


def _notes(found: Sequence[Prediction]) -> list[str]:
    by_note: dict[str, list[int]] = {}
    for one in found:
        for note in one.notes:
            by_note.setdefault(note, []).append(one.dp)
    lines = []
    for note, sizes in by_note.items():
        where = "" if len(sizes) == len(found) else f"dp {', '.join(map(str, sizes))}: "
        lines.append(f"* {where}{note}")
    return lines

"""Pictures of a summary, as matplotlib figures; right in grey and for the colour-blind."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from ddp_profiler.analysis.parts import PARTS
from ddp_profiler.analysis.results import Summary
from ddp_profiler.record import paths

# Okabe-Ito colours, ordered so that neighbours differ in lightness; hatches tell them in grey.
_STYLES: dict[str, tuple[str, str]] = {
    "data": ("#F0E442", ""),
    "forward": ("#56B4E9", ""),
    "forward_comm": ("#FFFFFF", "//"),
    "backward": ("#0072B2", ""),
    "backward_comm": ("#FFFFFF", "xx"),
    "exposed_wait": ("#E69F00", "\\\\"),
    "exposed_transfer": ("#D55E00", ""),
    "exposed_copy": ("#CC79A7", ".."),
    "optimizer": ("#009E73", ""),
    "other": ("#BBBBBB", ""),
}


def step_parts(summary: Summary) -> Figure:
    """Draws the parts of the instrumented step of each level as stacked bars, in ms."""
    levels = [level for level in summary.levels if level.instrumented_step_ms]
    figure = Figure(figsize=(max(5.0, 2.6 + 1.1 * len(levels)), 4.6), layout="constrained")
    axes = figure.add_subplot()
    bottom = [0.0] * len(levels)
    tallest = max(
        (lv.instrumented_step_ms.mean for lv in levels if lv.instrumented_step_ms), default=1.0
    )
    with mpl.rc_context({"hatch.linewidth": 0.6}):
        for part in PARTS:
            heights = [level.breakdown_ms[part] or 0.0 for level in levels]
            if max(heights, default=0.0) < tallest * 0.001:
                continue
            color, hatch = _STYLES[part]
            axes.bar(
                range(len(levels)),
                heights,
                bottom=bottom,
                width=0.62,
                label=part.replace("_", " "),
                color=color,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.5,
            )
            bottom = [b + max(h, 0.0) for b, h in zip(bottom, heights, strict=True)]
    for i, top in enumerate(bottom):
        axes.annotate(
            f"{top:.1f}", (i, top), xytext=(0, 3), textcoords="offset points", ha="center", size=9
        )
    axes.set_xticks(range(len(levels)), [level.id for level in levels])
    axes.set_ylabel("ms a step, mean over ranks")
    axes.set_ylim(0, max(bottom, default=1.0) * 1.1 or 1.0)
    axes.set_title("Where the step time goes", loc="left", size=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9
    )
    return figure


def save_all(summary: Summary, folder: Path) -> list[Path]:
    """Saves every picture of a summary below a run folder; returns their paths."""
    plots = paths.plots_folder(folder)
    plots.mkdir(exist_ok=True)
    saved = []
    for name, draw in (("step_parts", step_parts),):
        path = plots / f"{name}.png"
        draw(summary).savefig(path, dpi=130)
        saved.append(path)
    return saved

"""Pictures of traces, as matplotlib figures, in the style of those of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ddp_profiler import units
from ddp_profiler.report.plots import _DPI, _figure, _thin_hatches, _title
from ddp_profiler.trace.analysis import TraceAnalysis
from ddp_profiler.trace.gather import TraceSet
from ddp_profiler.trace.split import RankSplit

_RANKS_SHOWN = 64

# Okabe-Ito colours; neighbours differ in lightness or hatch, so that grey tells them too.
_STYLES: dict[str, tuple[str, str]] = {
    "compute": ("#0072B2", ""),
    "exposed wait": ("#E69F00", "\\\\"),
    "exposed transfer": ("#D55E00", "///"),
    "exposed, not compared": ("#F0E442", "xx"),
    "exposed communication": ("#D55E00", "///"),
    "communication": ("#D55E00", "///"),
    "exposed memory": ("#CC79A7", "...."),
    "other steps' work": ("#999999", "--"),
    "idle": ("#FFFFFF", ""),
    "rest": ("#FFFFFF", ""),
}


def step_parts(found: TraceSet, analysis: TraceAnalysis) -> Figure | None:
    """Draws the parts of a step of each rank as stacked bars, in ms: the mean of complete steps.

    Communication on the CPU is drawn as a whole, since what it overlaps with is not known. Where
    no step is complete, all steps count; without steps, the whole recording.
    """
    ranks = found.ranks[:_RANKS_SHOWN]
    parts = [_parts_ms(rank, analysis) for rank in ranks]
    if not any(sum(one.values()) for one in parts):
        return None
    figure = _figure(_width(len(ranks)), 4.4)
    axes = figure.add_subplot()
    bottom = [0.0] * len(ranks)
    for name, (color, hatch) in _STYLES.items():
        heights = [one.get(name, 0.0) for one in parts]
        if not any(heights):
            continue
        axes.bar(
            range(len(ranks)),
            heights,
            bottom=bottom,
            width=0.7,
            label=name,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(*_ticks([rank.rank for rank in ranks]))
    axes.set_xlabel("rank")
    axes.set_ylabel("ms a step" if any(rank.steps for rank in ranks) else "ms, all recorded")
    axes.set_ylim(0, max(bottom) * 1.08)
    _thin_hatches(axes.patches)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9
    )
    names = list(dict.fromkeys(name for one in parts for name in one))
    means = {name: sum(one.get(name, 0.0) for one in parts) / len(parts) for name in names}
    most = max(means, key=lambda name: means[name])
    _title(figure, f"Where the time goes: most in {most}{_of(len(ranks), found)}")
    return figure


def _parts_ms(rank: RankSplit, analysis: TraceAnalysis) -> Mapping[str, float]:
    waiting = analysis.across.waiting.get(rank.rank)
    chosen = [place for place, step in enumerate(rank.steps) if not step.step.incomplete]
    chosen = chosen or list(range(len(rank.steps)))
    if chosen:
        parts = [rank.steps[place].parts for place in chosen]
        waits = [waiting[place] for place in chosen] if waiting else []
    else:
        parts = [rank.total]
        total = analysis.across.waiting_total.get(rank.rank)
        waits = [total] if total else []

    def mean_ms(values: Sequence[int | None]) -> float:
        return sum(value or 0 for value in values) / len(values) / 1e6

    comm = mean_ms([one.comm_ns for one in parts])
    if all(one.compute_ns is None for one in parts):
        window = mean_ms([one.window_ns for one in parts])
        return {"communication": comm, "rest": max(0.0, window - comm)}
    exposed = (
        {
            "exposed wait": mean_ms([one.exposed_wait_ns for one in waits]),
            "exposed transfer": mean_ms([one.exposed_transfer_ns for one in waits]),
            "exposed, not compared": mean_ms([one.exposed_untold_ns for one in waits]),
        }
        if waits
        else {"exposed communication": mean_ms([one.exposed_comm_ns for one in parts])}
    )
    return {
        "compute": mean_ms([one.compute_ns for one in parts]),
        **exposed,
        "exposed memory": mean_ms([one.exposed_memory_ns for one in parts]),
        "other steps' work": mean_ms([one.other_steps_ns for one in parts]),
        "idle": mean_ms([one.idle_ns for one in parts]),
    }


def _ms(time_ns: int | None) -> float:
    return 0.0 if time_ns is None else time_ns / 1e6


def waiting(found: TraceSet, analysis: TraceAnalysis) -> Figure | None:
    """Draws, for each rank, how long it waited in collectives and how long others did for it.

    In ms, over all that was recorded. None where ranks could not be compared.
    """
    late = {one.rank: one for one in analysis.across.lateness}
    totals = analysis.across.waiting_total
    # A rank whose clock did not fit has no known waiting.
    known = (rank for rank in totals if rank in late and totals[rank].wait_ns is not None)
    ranks = sorted(known)[:_RANKS_SHOWN]
    if not ranks:
        return None
    figure = _figure(_width(len(ranks)), 4.0)
    axes = figure.add_subplot()
    for shift, name, color, hatch, heights in (
        (-0.2, "waited", "#E69F00", "\\\\", [_ms(totals[rank].wait_ns) for rank in ranks]),
        (0.2, "others waited", "#0072B2", "", [late[rank].caused_ns / 1e6 for rank in ranks]),
    ):
        axes.bar(
            [place + shift for place in range(len(ranks))],
            heights,
            width=0.38,
            label=name,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
        )
    axes.set_xticks(*_ticks(ranks))
    axes.set_xlabel("rank")
    axes.set_ylabel("ms, all recorded")
    _thin_hatches(axes.patches)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    worst = max(late.values(), key=lambda one: one.caused_ns)
    title = (
        f"Waited for most: rank {worst.rank}, {units.ms(worst.caused_ns / 1e6)} ms"
        if worst.caused_ns
        else "No rank is clearly waited for"
    )
    _title(figure, title + _of(len(ranks), found))
    return figure


def _width(ranks: int) -> float:
    return min(14.0, max(5.6, 3.0 + 0.5 * ranks))


def _ticks(ranks: Sequence[int]) -> tuple[Sequence[int], Sequence[str]]:
    every = -(-len(ranks) // 32)
    places = range(0, len(ranks), every)
    return places, [str(ranks[place]) for place in places]


def _of(shown: int, found: TraceSet) -> str:
    return f" (the first {shown} ranks)" if shown < len(found.ranks) else ""


_PICTURES = {"step_parts": step_parts, "waiting": waiting}


def save_all(found: TraceSet, analysis: TraceAnalysis, folder: Path) -> list[Path]:
    """Saves the pictures that apply to traces in a folder; returns their paths."""
    saved = []
    for name, draw in _PICTURES.items():
        figure = draw(found, analysis)
        if figure is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI)
        saved.append(path)
    return saved

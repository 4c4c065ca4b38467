"""A run folder as an object with tables and figures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ddp_profiler.analysis.detail import LevelDetail
from ddp_profiler.analysis.placement import largest
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.verdict import verdict
from ddp_profiler.errors import DdpProfilerError, InputError, UsageError
from ddp_profiler.load import LoadedInFull, load_in_full
from ddp_profiler.naming import options_as_arguments
from ddp_profiler.notebook import frames
from ddp_profiler.notebook.frames import DataFrame
from ddp_profiler.predict.outlook import Outlook, look_ahead
from ddp_profiler.predict.request import Request
from ddp_profiler.report import console, plots, step_plots

FIGURES = {
    "step_parts": "a level with instrumented steps",
    "scaling": "a level beyond dp = 1 and one of dp = 1 to compare it with",
    "waterfall": "the costs of a level and of one of dp = 1",
    "rank_heat_map": "a level with the steps of two ranks or more",
    "bucket_timeline": "a level of two ranks or more that reduces gradients",
    "allreduce": "AllReduces in isolation, which a study measures",
    "batch_split": "one global batch that is split in two ways",
}
"""What each figure shows needs."""
_OF_ONE_LEVEL = ("waterfall", "rank_heat_map", "bucket_timeline")

_ARGUMENTS = {field.name.replace("_", "-"): field.name for field in fields(Request)}
_ARGUMENTS |= {"accumulate": "accumulation"}


class LoadedRun:
    """A run, read from its folder; made by :func:`load_run`.

    Tables are pandas data frames, made anew by each call, so that they may be changed; their
    columns are those of :data:`ddp_profiler.notebook.columns.TABLES`. What a run does not hold
    is a table without rows. Figures are matplotlib figures; none is shown or kept.

    Attributes:
        folder: The run folder, as it was given.
        summary: All figures: the content of ``summary.json``.
    """

    def __init__(self, folder: Path, loaded: LoadedInFull) -> None:
        self.folder = folder
        self.summary: Summary = loaded.summary
        self._loaded = loaded

    def __repr__(self) -> str:
        levels = ", ".join(level.id for level in self.summary.levels)
        return f"<LoadedRun {self.folder}: {self.status}; levels {levels}>"

    @property
    def status(self) -> str:
        """``complete``, ``failed`` or ``running``."""
        return self.summary.run.status

    @property
    def partial(self) -> bool:
        """Whether something is missing: the run did not end, or a rank's record is lost or cut."""
        return self.summary.run.partial

    @property
    def verdict(self) -> str:
        """The run in one sentence."""
        return verdict(self.summary)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know of the run, and of each level, whose id goes before it."""
        of_levels = (f"{lv.id}: {note}" for lv in self.summary.levels for note in lv.notes)
        return (*self.summary.notes, *of_levels)

    def report(self) -> str:
        """Returns the table of ``ddp-profiler analyze`` as text."""
        return console.render(self.summary)

    def levels(self) -> DataFrame:
        """Returns a row a level: its settings, step time, throughput, scaling and batch check."""
        return frames.levels(self.summary, self._loaded.details)

    def parts(self, level: str | None = None) -> DataFrame:
        """Returns a row a level and part: mean over ranks and steps in ms.

        Of a level they sum to the mean instrumented step.
        """
        return self._of(level, frames.parts(self.summary))

    def ranks(self, level: str | None = None) -> DataFrame:
        """Returns a row a level and rank: its step, parts, and what its machine gave it."""
        return self._of(level, frames.ranks(self.summary))

    def steps(self, level: str | None = None, variant: str = frames.INSTRUMENTED) -> DataFrame:
        """Returns a row a rank and step, with its parts in ms, which sum to ``step_ms``.

        The steps are those that figures are means of: not of a warm-up, whole on all ranks, and
        without an evaluation or a checkpoint inside.

        Args:
            level: Only this one.
            variant: ``instrumented``; ``plain``, of which only the length is known; or
                ``warmup``, the steps before steady state, with what its marks tell but parts.
        """
        if variant not in frames.VARIANTS:
            raise UsageError(
                f"variant {variant!r} is unknown.", f"Choose one of: {', '.join(frames.VARIANTS)}."
            )
        return self._of(level, frames.steps(self.summary, self._loaded.steps, variant))

    def collectives(self, level: str | None = None) -> DataFrame:
        """Returns a row a gradient collective of each rank's instrumented steps."""
        return self._of(level, frames.collectives(self._loaded.steps))

    def buckets(self, level: str | None = None) -> DataFrame:
        """Returns a row a bucket of each level's typical step, as the bucket timeline draws it."""
        return self._of(level, frames.buckets(self._loaded.details))

    def phases(self, level: str | None = None) -> DataFrame:
        """Returns a row a phase of each level's typical step, as the bucket timeline draws it."""
        return self._of(level, frames.phases(self._loaded.details))

    def rank_heat_map(self, level: str | None = None) -> DataFrame:
        """Returns a row a cell of the heat map: a rank's own work in ms against the others'."""
        return self._of(level, frames.rank_heat_map(self._loaded.details))

    def stragglers(self, level: str | None = None) -> DataFrame:
        """Returns a row a level and rank that comes late, with the part that it is late in."""
        return self._of(level, frames.stragglers(self.summary))

    def allreduce(self, level: str | None = None) -> DataFrame:
        """Returns a row a level and message size or bucket: AllReduce in isolation."""
        return self._of(level, frames.allreduce(self.summary))

    def waterfall(self, level: str | None = None) -> DataFrame:
        """Returns a row a level and term: from the bare model's step to the measured one, ms."""
        return self._of(level, frames.waterfall(self.summary))

    def findings(self) -> DataFrame:
        """Returns a row a finding, with what mending it would gain."""
        return frames.findings(self.summary)

    def environment(self) -> DataFrame:
        """Returns a row a node and fact of its software and hardware."""
        return frames.environment(self.summary)

    def settings(self) -> DataFrame:
        """Returns a row a setting in force."""
        return frames.settings(self.summary)

    def failures(self) -> DataFrame:
        """Returns a row a failure of the run, the first one first."""
        return frames.failures(self._loaded.info)

    def rank_states(self) -> DataFrame:
        """Returns a row a rank: what it was doing when the run failed."""
        return frames.rank_states(self._loaded.info)

    @functools.cached_property
    def _outlook(self) -> Outlook:
        return look_ahead(self._loaded.predictor, self._loaded.why_not)

    @property
    def why_no_predictions(self) -> str | None:
        """Why the run carries no prediction; None if it does."""
        return self._outlook.why_not

    def predictions(self, dp: int | Iterable[int] | None = None, **changes: Any) -> DataFrame:
        """Returns a row a setting that was not measured, with its predicted step in ms.

        Args:
            dp: Numbers of replicas; where None, the next three doublings of the largest one,
                and no rows where the run carries no prediction.
            changes: What else is to differ from the run, by the names of
                :class:`ddp_profiler.predict.request.Request`: ``accumulation``,
                ``bucket_cap_mb``, ``bandwidth_gbps``, ``gradient_dtype``, ``ranks_per_node``,
                ``reduce_once``, ``bucket_view``.

        Raises:
            InputError: A ``dp`` is given and the run carries no prediction.
            UsageError: The run does not carry this one, or a number is out of its range.
        """
        if dp is None:
            if changes:
                raise UsageError("Changes are given, and no dp.", "Add dp=N or dp=[N, ...].")
            return frames.predictions(self._outlook.predictions)
        if self._loaded.predictor is None:
            raise InputError(self._loaded.why_not)
        sizes = [dp] if isinstance(dp, int) else list(dp)
        try:
            found = [self._loaded.predictor.predict(Request(one, **changes)) for one in sizes]
        except DdpProfilerError as error:
            raise type(error)(
                options_as_arguments(error.message, _ARGUMENTS),
                options_as_arguments(error.remedy, _ARGUMENTS),
            ) from None
        return frames.predictions(found)

    def back_test(self) -> DataFrame:
        """Returns a row a measured level that is predicted from the others, with the error."""
        predictor = self._loaded.predictor
        if predictor is None:
            return frames.back_test(())
        # There is one too where no more ranks can be predicted.
        tests = self._outlook.back_tests or predictor.back_test()
        return frames.back_test(tests.tests)

    def figure(self, name: str, level: str | None = None) -> Figure:
        """Draws a figure.

        Args:
            name: ``step_parts``, ``scaling``, ``waterfall``, ``rank_heat_map``,
                ``bucket_timeline``, ``allreduce`` (against the link's bound) or ``batch_split``.
            level: For the waterfall, the heat map and the timeline: the level to draw, else the
                largest one that has it. The others draw all levels.

        Raises:
            UsageError: No such figure or level.
            InputError: The run does not hold what the figure shows.
        """
        if name not in FIGURES:
            raise UsageError(f"There is no figure {name!r}.", f"Choose one of: {_list(FIGURES)}.")
        if level is not None:
            if name not in _OF_ONE_LEVEL:
                raise UsageError(
                    f"The figure {name} shows all levels.",
                    f"Leave level out; {_list(_OF_ONE_LEVEL)} take one.",
                )
            self._check(level)
        found = self._draw(name, level)
        if found is None:
            where = f" at {level}" if level is not None else ""
            raise InputError(
                f"{self.folder} holds nothing for the figure {name}{where}: it needs "
                f"{FIGURES[name]}."
            )
        return found

    def figures(self) -> dict[str, Figure]:
        """Draws all figures that the run has what is needed for, by name."""
        drawn = {name: self._draw(name, None) for name in FIGURES}
        return {name: figure for name, figure in drawn.items() if figure is not None}

    def _draw(self, name: str, level: str | None) -> Figure | None:
        if name == "rank_heat_map":
            detail = self._detail(level, lambda one: one.heat_map is not None)
            if detail is None or detail.heat_map is None:
                return None
            return step_plots.rank_heat_map(detail.level, detail.heat_map)
        if name == "bucket_timeline":
            detail = self._detail(level, lambda one: one.timeline is not None)
            if detail is None or detail.timeline is None:
                return None
            return step_plots.bucket_timeline(detail.level, detail.timeline)
        summary = self.summary
        if level is not None:
            chosen = tuple(one for one in summary.levels if one.id == level)
            summary = replace(summary, levels=chosen)
        drawn: Figure | None = getattr(plots, name)(summary)
        return drawn

    def _detail(
        self, level: str | None, has_it: Callable[[LevelDetail], bool]
    ) -> LevelDetail | None:
        """Returns the details of a level, or of the largest one that has something to show."""
        shown = {one.level: one for one in self._loaded.details if has_it(one)}
        if level is None:
            found = largest([one for one in self.summary.levels if one.id in shown])
            level = found.id if found else None
        return shown.get(level) if level is not None else None

    def _of(self, level: str | None, frame: DataFrame) -> DataFrame:
        self._check(level)
        return frames.only(frame, level)

    def _check(self, level: str | None) -> None:
        known = [one.id for one in self.summary.levels]
        if level is not None and level not in known:
            raise UsageError(f"There is no level {level!r}.", f"This run has: {_list(known)}.")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def load_run(folder: str | Path) -> LoadedRun:
    """Reads a run folder, also one of a run that failed or was cut.

    Args:
        folder: Such as ``runs/NAME``.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    path = Path(folder)
    return LoadedRun(path, load_in_full(path))

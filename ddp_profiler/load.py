"""From a run folder to its summary: the step between reading and rendering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_profiler.analysis.comparability import Launch
from ddp_profiler.analysis.detail import LevelDetail, LevelSteps
from ddp_profiler.analysis.parts import Columns
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.summary import (
    summarize_every_step,
    summarize_in_detail,
    summarize_run,
)
from ddp_profiler.errors import InputError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.predict.outlook import Outlook, look_ahead
from ddp_profiler.predict.prediction import Predictor, predictor_of
from ddp_profiler.record import paths, reader
from ddp_profiler.schema import RunInfo


@dataclass(frozen=True)
class Loaded:
    """All that a report shows of a run.

    Attributes:
        summary: The content of ``summary.json``.
        details: Single steps of the levels that are worth it.
        outlook: What more ranks would bring.
    """

    summary: Summary
    details: tuple[LevelDetail, ...]
    outlook: Outlook


@dataclass(frozen=True)
class LoadedInFull:
    """All that is known of a run.

    Attributes:
        info: The content of ``run.json``.
        summary: The content of ``summary.json``.
        details: A level's ranks against each other and a typical step, for each level with
            instrumented steps.
        steps: Every step of every level.
        predictor: Predicts what was not measured; None where the run carries no prediction.
        why_not: Why then.
    """

    info: RunInfo
    summary: Summary
    details: tuple[LevelDetail, ...]
    steps: tuple[LevelSteps, ...]
    predictor: Predictor | None
    why_not: str


def load_summary(folder: Path) -> Summary:
    """Reads a run folder and derives its summary.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    summary = summarize_run(*_read(folder))
    predictor, _ = predictor_of(summary)
    return with_gains(summary, predictor)


def load_report(folder: Path) -> Loaded:
    """Reads a run folder and derives all that a report shows.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    summary, details = summarize_in_detail(*_read(folder))
    predictor, why_not = predictor_of(summary)
    return Loaded(with_gains(summary, predictor), details, look_ahead(predictor, why_not))


def load_in_full(folder: Path) -> LoadedInFull:
    """Reads a run folder and derives all that is known of it, single steps included.

    A run that failed before its first step is read as well: it has no steps, and says why.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    info = reader.read_run_info(folder)
    failed_early = info.status == "failed" and not paths.rank_files(folder)
    read = (info, {}, []) if failed_early else _read(folder)
    summary, details, steps = summarize_every_step(*read)
    predictor, why_not = predictor_of(summary)
    return LoadedInFull(info, with_gains(summary, predictor), details, steps, predictor, why_not)


def _read(folder: Path) -> tuple[RunInfo, Mapping[int, Columns], list[int]]:
    """Returns the run's description, each rank's spans, and the ranks whose record was cut."""
    info = reader.read_run_info(folder)
    found = paths.rank_files(folder)
    if not found:
        raise InputError(f"{folder} holds no rank-*.arrows: nothing was measured.", "Run it again.")
    columns, incomplete = {}, []
    for rank in found:
        spans = reader.read_rank(folder, rank)
        if spans.run_id != info.run_id:
            raise InputError(
                f"{found[rank]} belongs to the run {spans.run_id}, not to {info.run_id}.",
                "Keep the files of different runs in folders of their own.",
            )
        columns[rank] = spans.columns
        if not spans.complete:
            incomplete.append(rank)
    return info, columns, incomplete


def load_launch(folder: Path) -> Launch:
    """Reads a run folder as one launch of a comparison.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    facts = reader.read_run_info(folder).facts
    return Launch(str(folder), load_summary(folder), {one.id: one.parameters for one in facts})

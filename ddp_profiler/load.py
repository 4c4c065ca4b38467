"""From a run folder to its summary: the step between reading and rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_profiler.analysis.comparability import Launch
from ddp_profiler.analysis.detail import LevelDetail, LevelSteps
from ddp_profiler.analysis.parts import Columns
from ddp_profiler.analysis.rank_record import RankRecord, rank_record, without_kineto
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.summary import join, join_in_detail, join_in_full
from ddp_profiler.errors import InputError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.predict.outlook import Outlook, look_ahead
from ddp_profiler.predict.prediction import Predictor, predictor_of
from ddp_profiler.record import reader
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
    summary = join(*_read(folder))
    predictor, _ = predictor_of(summary)
    return with_gains(summary, predictor)


def load_report(folder: Path) -> Loaded:
    """Reads a run folder and derives all that a report shows.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    info, records, incomplete, unbegun = _read(folder)
    summary, details = join_in_detail(info, records, _spans_of(folder), incomplete, unbegun)
    predictor, why_not = predictor_of(summary)
    return Loaded(with_gains(summary, predictor), details, look_ahead(predictor, why_not))


def load_in_full(folder: Path) -> LoadedInFull:
    """Reads a run folder and derives all that is known of it, single steps included.

    A run that failed before its first step is read as well: it has no steps, and says why.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    info = reader.read_run_info(folder)
    found, unbegun = reader.begun_records(folder)
    failed_early = info.status == "failed" and not found
    records, incomplete, unbegun = ([], [], unbegun) if failed_early else _read(folder)[1:]
    summary, details, steps = join_in_full(info, records, _spans_of(folder), incomplete, unbegun)
    predictor, why_not = predictor_of(summary)
    return LoadedInFull(info, with_gains(summary, predictor), details, steps, predictor, why_not)


def _spans_of(folder: Path) -> Callable[[int], Columns]:
    """Returns what reads the spans of a rank that :func:`_read` has accepted."""
    return lambda rank: without_kineto(reader.read_rank(folder, rank).columns)


def _read(folder: Path) -> tuple[RunInfo, list[RankRecord], list[int], tuple[str, ...]]:
    """Reads a run's records.

    Returns:
        The run's description; what each rank gives; the ranks whose record was cut; the names
        of files that never came to hold anything.

    One rank's spans are held at a time: what is kept of them is much smaller.
    """
    info = reader.read_run_info(folder)
    found, unbegun = reader.begun_records(folder)
    if not found:
        first = "".join(
            f" Rank {f.rank} failed in {f.phase}: {f.message}." for f in info.failures[:1]
        )
        raise InputError(
            f"{folder} holds no {'rank-*.arrows with spans' if unbegun else 'rank-*.arrows'}: "
            f"nothing was measured.{first}",
            "Run it again.",
        )
    most = max(found)
    if most >= info.world_size:
        raise InputError(
            f"{found[most]} is of a rank that the run of {info.world_size} ranks does not have.",
            "Keep the files of different runs in folders of their own.",
        )
    records, incomplete = [], []
    for rank in found:
        spans = reader.read_rank_of(folder, rank, info.run_id)
        records.append(rank_record(info, rank, spans.columns))
        if not spans.complete:
            incomplete.append(rank)
    return info, records, incomplete, unbegun


def load_launch(folder: Path) -> Launch:
    """Reads a run folder as one launch of a comparison.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    facts = reader.read_run_info(folder).facts
    return Launch(str(folder), load_summary(folder), {one.id: one.parameters for one in facts})

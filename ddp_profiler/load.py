"""From a run folder to its summary: the step between reading and rendering."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_profiler.analysis.comparability import Launch
from ddp_profiler.analysis.detail import LevelDetail
from ddp_profiler.analysis.parts import Columns
from ddp_profiler.analysis.rank_record import RankRecord, rank_record, without_kineto
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.summary import join, join_in_detail
from ddp_profiler.errors import InputError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.predict.outlook import Outlook, look_ahead
from ddp_profiler.predict.prediction import predictor_of
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
    info, records, incomplete = _read(folder)

    def spans_of(rank: int) -> Columns:
        return without_kineto(reader.read_rank(folder, rank).columns)

    summary, details = join_in_detail(info, records, spans_of, incomplete)
    predictor, why_not = predictor_of(summary)
    return Loaded(with_gains(summary, predictor), details, look_ahead(predictor, why_not))


def _read(folder: Path) -> tuple[RunInfo, list[RankRecord], list[int]]:
    """Returns the run's description, what each rank gives, and the ranks whose record was cut.

    One rank's spans are held at a time: what is kept of them is much smaller.
    """
    info = reader.read_run_info(folder)
    found = paths.rank_files(folder)
    if not found:
        raise InputError(f"{folder} holds no rank-*.arrows: nothing was measured.", "Run it again.")
    records, incomplete = [], []
    for rank in found:
        spans = reader.read_rank(folder, rank)
        if spans.run_id != info.run_id:
            raise InputError(
                f"{found[rank]} belongs to the run {spans.run_id}, not to {info.run_id}.",
                "Keep the files of different runs in folders of their own.",
            )
        records.append(rank_record(info, rank, spans.columns))
        if not spans.complete:
            incomplete.append(rank)
    return info, records, incomplete


def load_launch(folder: Path) -> Launch:
    """Reads a run folder as one launch of a comparison.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    facts = reader.read_run_info(folder).facts
    return Launch(str(folder), load_summary(folder), {one.id: one.parameters for one in facts})

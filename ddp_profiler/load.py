"""From a run folder to its summary: the step between reading and rendering."""

from __future__ import annotations

from pathlib import Path

from ddp_profiler.analysis.comparability import Launch
from ddp_profiler.analysis.results import Summary
from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.errors import InputError
from ddp_profiler.predict.findings import with_gains
from ddp_profiler.record import paths, reader


def load_summary(folder: Path) -> Summary:
    """Reads a run folder and derives its summary.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
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
    return with_gains(summarize_run(info, columns, incomplete))


def load_launch(folder: Path) -> Launch:
    """Reads a run folder as one launch of a comparison.

    Raises:
        InputError: The folder holds no readable run, or files of another run.
    """
    facts = reader.read_run_info(folder).facts
    return Launch(str(folder), load_summary(folder), {one.id: one.parameters for one in facts})

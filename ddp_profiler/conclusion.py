"""What a run ends with: its figures beside the record, and the text that is shown."""

from __future__ import annotations

from pathlib import Path

from ddp_profiler.analysis.results import Summary
from ddp_profiler.errors import CheckFailed
from ddp_profiler.load import load_report
from ddp_profiler.record import paths, writer
from ddp_profiler.report import console, plots
from ddp_profiler.report.page import render


def conclude(folder: Path, *, color: bool) -> tuple[Summary, str]:
    """Analyses a finished run and writes ``summary.json``, the plots and ``report.html``.

    Args:
        folder: The run folder.
        color: Whether the text is shown where colours are.

    Returns:
        The summary, and the text: the table, and where the files are.

    Raises:
        InputError: The folder holds no readable run.
    """
    found = load_report(folder)
    summary = found.summary
    writer.write_json(paths.summary_file(folder), summary)
    saved = plots.save_all(summary, folder)
    page = render.save(summary, found.details, found.outlook, folder)
    lines = [f"  {path}" for path in (paths.summary_file(folder), *saved)]
    table = console.render(summary, color=color)
    return summary, "\n".join([table, *lines, f"Run folder: {folder}", f"Report: {page}", ""])


def check_kept_batch(summary: Summary) -> str:
    """Compares the global batches of a study whose user wanted it kept.

    Returns:
        What could not be compared, in words; empty where all are known to be equal.

    Raises:
        CheckFailed: They differ.
    """
    argument = summary.run.settings.get("keep_global_batch")
    if argument is None:
        return ""
    seen = {level.id: level.batch_check.observed for level in summary.levels}
    numbers = {samples for samples in seen.values() if samples is not None}
    listed = ", ".join(
        f"{name} {'not known' if samples is None else samples}" for name, samples in seen.items()
    )
    if len(numbers) > 1:
        raise CheckFailed(
            f"--keep-global-batch {argument}: the global batch did not stay; observed samples a "
            f"step: {listed}.",
            "So this is no strong scaling. Name the argument that sets the batch of one rank, or "
            "the accumulation, and nothing else.",
        )
    if None not in seen.values():
        return ""
    return (
        f"--keep-global-batch {argument}: whether the global batch stayed is not known; "
        f"observed samples a step: {listed}."
    )


def check_expectation(summary: Summary) -> None:
    """Compares the observed global batch with the one that the user expects.

    Raises:
        CheckFailed: They differ at a level that the user's word is about.
    """
    wrong = [
        f"{level.id} {level.batch_check.observed}"
        for level in summary.levels
        if level.batch_check.declared is not None
        and level.batch_check.observed != level.batch_check.declared
    ]
    if wrong:
        expected = summary.run.settings["expect_global_batch"]
        raise CheckFailed(
            f"The global batch is not {expected} samples a step; observed: {', '.join(wrong)}.",
            "It is micro-batch x accumulation x dp; see the table above.",
        )

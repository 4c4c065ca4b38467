"""What other settings would gain, as findings of a run."""

from __future__ import annotations

from dataclasses import replace

from ddp_profiler import units
from ddp_profiler.analysis.results import Finding, Summary
from ddp_profiler.errors import DdpProfilerError
from ddp_profiler.predict.prediction import Predictor
from ddp_profiler.predict.proposals import Proposal, propose

_SHOWN = 3


def with_gains(summary: Summary, predictor: Predictor | None) -> Summary:
    """Returns the summary with a finding for each change that is predicted to gain.

    Args:
        summary: A run's.
        predictor: Made of it; None of a run that carries no prediction, as that of a script.
    """
    if predictor is None:
        return summary
    try:
        found = propose(predictor)
    except DdpProfilerError:
        return summary
    known = {finding.id for finding in summary.findings}
    # A missing no_sync is told already, with its gain.
    if "needless-reductions" in known:
        found = tuple(proposal for proposal in found if proposal.setting != "reduce_once")
    return replace(
        summary, findings=(*summary.findings, *(_finding(one) for one in found[:_SHOWN]))
    )


def _finding(proposal: Proposal) -> Finding:
    low, high = proposal.gain_interval90
    caveat = f" But {proposal.caveat}." if proposal.caveat else ""
    return Finding(
        id="expected-gain",
        severity="info",
        message=f"{proposal.level}: {proposal.text}: predicted to save "
        f"{units.ms(proposal.gain_ms)} ms a step ({proposal.gain_pct:.0f} %).{caveat}",
        evidence=f"replayed {units.ms(proposal.before_ms)} ms now and "
        f"{units.ms(proposal.after_ms)} ms then; 90 % interval of the saving: {units.ms(low)} to "
        f"{units.ms(high)} ms",
        expected_gain_ms=proposal.gain_ms,
        expected_gain_pct=proposal.gain_pct,
    )

"""A short table of what each rank was doing when a run failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddp_profiler.schema import Failure, RankPhase

_MOST_ROWS = 8
_HOST_WIDTH = 20
_PHASE_WIDTH = 48


def tells_more(failures: Sequence[Failure], phases: Sequence[RankPhase]) -> bool:
    """Tells whether a table says more than the first failure's message.

    It does not where there is one rank only, or where all ranks failed alike.
    """
    alike = {(failure.phase, failure.message) for failure in failures}
    failed = {failure.rank for failure in failures}
    return len(phases) > 1 and not (len(alike) == 1 and failed == {p.rank for p in phases})


def render(failures: Sequence[Failure], phases: Sequence[RankPhase]) -> str:
    """Returns the table: rank, host, last phase, and what became of the rank.

    At most 8 ranks are shown: those without a sign of life first, then those that failed, then
    those in another phase than most.

    Args:
        failures: The first one first.
        phases: One a rank.
    """
    order = {failure.rank: place for place, failure in reversed(list(enumerate(failures)))}
    usual = Counter(p.phase for p in phases).most_common(1)[0][0]

    def weight(p: RankPhase) -> tuple[bool, float, bool, int]:
        return (
            p.responds is not False,
            order.get(p.rank, float("inf")),
            p.phase == usual,
            p.rank,
        )

    shown = sorted(sorted(phases, key=weight)[:_MOST_ROWS], key=lambda p: p.rank)
    signals = {failure.rank: failure.signal for failure in reversed(failures)}
    rows = [("rank", "host", "last phase", "")]
    for p in shown:
        if p.rank in order:
            state = "failed first" if order[p.rank] == 0 else "failed"
            state += f" ({signals[p.rank]})" if signals[p.rank] else ""
        elif p.responds is False:
            state = "no sign of life"
        else:
            state = "alive" if p.responds else ""
        if p.place and p.rank not in order:
            state += f", at {p.place}"
        rows.append(
            (str(p.rank), _cut(p.hostname, _HOST_WIDTH), _cut(p.phase, _PHASE_WIDTH), state)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"  {row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    left = [p for p in phases if p not in shown]
    if left:
        kinds = Counter(p.phase for p in left)
        commonest = _cut(kinds.most_common(1)[0][0], _PHASE_WIDTH)
        where = f"all in {commonest}" if len(kinds) == 1 else f"most in {commonest}"
        lines.append(f"  and {len(left)} more, {where}")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."

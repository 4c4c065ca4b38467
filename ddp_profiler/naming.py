"""Names of ranks in words, for errors and for results alike."""

from __future__ import annotations

from collections.abc import Iterable


def name_ranks(numbers: Iterable[int]) -> str:
    """Returns rank numbers as words, in runs.

    >>> name_ranks([3]), name_ranks([0, 1]), name_ranks([5, 0, 1, 2])
    ('rank 3', 'ranks 0, 1', 'ranks 0-2, 5')
    >>> name_ranks(range(0, 40, 2))
    'ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more'
    """
    given = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in given:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs[:8]]
    more = sum(map(len, runs[8:]))
    text = ", ".join(shown) + (f" and {more} more" if more else "")
    return f"rank{'s' if len(given) > 1 else ''} {text}"

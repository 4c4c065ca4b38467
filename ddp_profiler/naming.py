"""Names of ranks in words, for errors and for results alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping


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


def options_as_arguments(
    text: str, arguments: Mapping[str, str], flags: Collection[str] = ()
) -> str:
    """Turns options of the command line into arguments of a function.

    >>> options_as_arguments("--bucket-cap-mb 0 is below 1.", {"bucket-cap-mb": "bucket_cap_mb"})
    'bucket_cap_mb=0 is below 1.'
    >>> options_as_arguments("--debug shows it; torchrun --out A.", {"debug": "debug"}, ["debug"])
    'debug=True shows it; torchrun --out A.'

    Args:
        text: What holds them.
        arguments: The argument of each option, by the option's name without dashes. Others
            stay, such as those of other programs.
        flags: Options that take no value.
    """
    names = "|".join(map(re.escape, sorted(arguments)))

    def argument(found: re.Match[str]) -> str:
        if found[1] in flags:
            return f"{arguments[found[1]]}=True"
        return arguments[found[1]] + ("=" if found[0][-1] == " " else "")

    return re.sub(rf"(?<![\w-])--({names})(?![\w-])(?: (?=[-\d.]))?", argument, text)

"""Text as shown to people: numbers with units, and lines on stderr."""

from __future__ import annotations

import contextlib
import itertools
import sys

from ddp_profiler.naming import name_ranks

NOTHING = "-"
"""Shown where a figure does not apply."""


def ms(value: float | None) -> str:
    """Returns a time in ms with three significant digits where that is below a second.

    >>> ms(0.01234), ms(3.14159), ms(42.195), ms(1234.5), ms(None)
    ('0.01', '3.14', '42.2', '1234', '-')
    """
    if value is None:
        return NOTHING
    magnitude = abs(value)
    digits = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{digits}f}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Returns a fraction as per cent.

    >>> percent(0.1234), percent(None)
    ('12.3 %', '-')
    """
    return NOTHING if fraction is None else f"{fraction * 100:.{digits}f} %"


def rate(value: float | None) -> str:
    """Returns a rate with four significant digits.

    >>> rate(12.3456), rate(1234567.0), rate(None)
    ('12.35', '1234567', '-')
    """
    if value is None:
        return NOTHING
    magnitude = abs(value)
    digits = 3 if magnitude < 10 else 2 if magnitude < 100 else 1 if magnitude < 1000 else 0
    return f"{value:.{digits}f}"


def nbytes(value: int | float | None) -> str:
    """Returns a size in decimal units, as bandwidths are.

    >>> nbytes(512), nbytes(25_000_000), nbytes(None)
    ('512 B', '25.0 MB', '-')
    """
    if value is None:
        return NOTHING
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"


def decimal(value: float | None, unit: str) -> str:
    """Returns a quantity of any size with three significant digits and a decimal prefix.

    >>> decimal(123.4e9, "FLOP/s"), decimal(4.8e12, "B/s"), decimal(5e7, "B/s"), decimal(None, "B")
    ('123 GFLOP/s', '4.8 TB/s', '50 MB/s', '-')
    """
    if value is None:
        return NOTHING
    limits = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, prefix = next((pair for pair in limits if abs(value) >= pair[0]), (1.0, ""))
    return f"{float(f'{value / scale:.3g}'):g} {prefix}{unit}"


def duration(seconds: float | None) -> str:
    """Returns a long time in its two largest units.

    >>> duration(0.5), duration(42.04), duration(3725.0), duration(200000.0), duration(None)
    ('0.50 s', '42.0 s', '1 h 2 min', '2 d 8 h', '-')
    """
    if seconds is None:
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    sizes = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, length), (smaller, short) in itertools.pairwise(sizes):
        # Rounded first, so that no 60 minutes stand beside hours.
        whole = round(seconds / short) * short
        if whole >= length:
            rest = whole % length // short
            return f"{whole // length} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.0f} s"


def significant(value: float | None) -> str:
    """Returns a number of any size with two significant digits.

    >>> significant(0.0000123), significant(None)
    ('1.2e-05', '-')
    """
    return NOTHING if value is None else f"{value:.2g}"


def about(value: float | None) -> str:
    """Returns a number of 0 or more with two significant digits and no exponent.

    >>> about(0.0), about(3.14), about(912.3), about(123456.0), about(None)
    ('0', '3.1', '910', '120000', '-')
    """
    if value is None:
        return NOTHING
    rounded = float(f"{value:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{max(rounded, 0.0):.2g}"


ranks = name_ranks
"""Returns rank numbers as words, in runs, as error messages have them."""


def printable(text: object) -> str:
    r"""Returns a text from a file with its control characters escaped, safe for a terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def tell(program: str, text: str) -> None:
    """Shows lines on stderr after a program's name; what names hold is made safe for a terminal.

    They are one write: ``print`` makes two, between which another rank may write. Where nobody
    reads stderr any more nothing is shown: training and measuring go on.
    """
    safe = "\n".join(map(printable, text.split("\n")))
    with contextlib.suppress(OSError, ValueError, AttributeError):  # The last where it is None.
        sys.stderr.write(f"{program}: {safe}\n")
        sys.stderr.flush()

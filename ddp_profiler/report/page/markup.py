"""HTML and SVG elements whose text and attributes are escaped, and the scales of charts.

Charts are drawn here and not by matplotlib: its SVG has fixed colours and text as outlines, so
it would follow neither a dark page nor a narrow one, and takes ten times the bytes. These use
per cent across, so that they stretch with the page while text keeps its size, and classes, so
that the style sheet decides on colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ddp_profiler import units

_MOST_TICKS = 7


def safe(text: object) -> Markup:
    r"""Returns a text escaped for HTML, with its control characters made visible.

    >>> safe("<script>\x00")
    Markup('&lt;script&gt;\\x00')
    """
    return text if isinstance(text, Markup) else escape(units.printable(text))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Returns an element; what is not Markup is escaped, None is left out.

    >>> element("text", "a<b", class_="label", text_anchor="end", x=None)
    Markup('<text class="label" text-anchor="end">a&lt;b</text>')

    Args:
        name: Its name.
        children: What it holds.
        attributes: By name; ``_`` stands for ``-``, and one at the end is dropped.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(safe(child) for child in children if child is not None)
    # Keys are ours, and all else went through safe.
    return Markup(f"<{name}{written}>{inner}</{name}>")


def joined(parts: Sequence[Markup]) -> Markup:
    """Returns elements one after the other."""
    return Markup("").join(parts)


def across(percent: float) -> str:
    """Returns a place or a length across a chart.

    >>> across(12.34567), across(50.0)
    ('12.35%', '50%')
    """
    return f"{percent:.2f}".rstrip("0").rstrip(".") + "%"


def number(value: float) -> str:
    """Returns a length in px."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Scale:
    """Maps values to places; logarithmic or linear.

    Attributes:
        low: The least value.
        high: The largest; above ``low``.
        begin: Where the least value lies.
        end: Where the largest one lies; may be less than ``begin``.
        log: Whether equal factors are equal lengths; both values are then above 0.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the place of a value."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self, most: int = _MOST_TICKS) -> list[float]:
        """Returns about so many round values in the scale: 1, 2 and 5 times powers of ten.

        >>> Scale(0, 10, 0, 100).ticks(), Scale(3, 300, 0, 100, log=True).ticks()
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [5.0, 10.0, 20.0, 50.0, 100.0, 200.0])
        """
        if not self.high > self.low:
            return [self.low]
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
                found = [f * 10.0**e for e in range(first, last + 1) for f in steps]
                found = [v for v in found if self.low <= v <= self.high]
                if len(found) <= most:
                    return found
            return found[:: -(-len(found) // most)]
        rough = (self.high - self.low) / (most - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
        begin, end = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(begin, end + 1)]


def thinned(values: Sequence[float], most: int = _MOST_TICKS) -> list[float]:
    """Returns every so many of the values, the last one always."""
    each = max(1, -(-len(values) // most))
    return list(values[::-1][::each][::-1])

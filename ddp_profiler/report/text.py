"""What all text that is shown has in common: its width, its console, its tables."""

from __future__ import annotations

import io
import re

from rich import box
from rich.console import Console
from rich.table import Table

from ddp_profiler import units

WIDTH = 80
"""Columns of a terminal that every text fits."""

_ASCII_BOX = {
    code: "-" if chr(code) in "─━┄┅┈┉╌╍═╴╶╸╺╼╾" else "|" if chr(code) in "│┃┆┇┊┋╎╏║╵╷╹╻╽╿" else "+"
    for code in range(0x2500, 0x2580)
}

_STEERS = re.compile(
    "(\x1b\\[[0-9;]*m)|[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def text_console(output: io.StringIO, *, color: bool) -> Console:
    """Returns a console that writes plain text, with escapes for colour only where asked for."""
    return Console(
        file=output,
        width=WIDTH,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )


def simple_table() -> Table:
    """Returns a table without a frame, and with no column yet."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def table_of(*columns: tuple[str, str]) -> Table:
    """Returns such a table with columns: (header, ``right`` for figures, else ``left``)."""
    table = simple_table()
    for header, side in columns:
        right = side == "right"
        table.add_column(
            header, justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    return table


def ms_of_ns(time_ns: int | None) -> str:
    """Returns a time in ns as ms for a cell; a sign for nothing where it is None."""
    return units.ms(None if time_ns is None else time_ns / 1e6)


def for_encoding(text: str, encoding: str | None) -> str:
    r"""Returns a text that a stream of this encoding can take.

    A text that it can take already stays as it is. Else the lines of tables become ASCII,
    and other characters that cannot be encoded are escaped. So are those that steer a terminal
    or the direction of text, but for colours: names are made safe where they are put in, and
    this is for one that was forgotten.

    >>> for_encoding("── é ±", "ascii"), for_encoding("── é ±", "utf-8")
    ('-- \\xe9 \\xb1', '── é ±')
    >>> for_encoding("\x1b[1mbold\x1b[0m \x1b]0;title\x07", "utf-8") == (
    ...     "\x1b[1mbold\x1b[0m " + r"\x1b]0;title\x07"
    ... )
    True

    Args:
        text: Any text.
        encoding: As ``sys.stdout.encoding`` says; None for a stream that takes everything.
    """
    text = _STEERS.sub(lambda found: found[1] or units.printable(found[0]), text)
    if encoding is None:
        return text
    try:
        text.encode(encoding)
        return text
    except LookupError:
        encoding = "ascii"
    except UnicodeEncodeError:
        pass
    return text.translate(_ASCII_BOX).encode(encoding, "backslashreplace").decode(encoding)

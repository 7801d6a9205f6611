"""A terminal with a recorded session: `omni-up.ansi`, what `omni up` printed, ANSI colours included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from rich.console import Console
from rich.style import Style
from rich.text import Text

from docs.pictures.style import MONO, page

COLUMNS: Final = 100
CELL: Final = 7.8  # width of a character of 13 px; each run of text is stretched to it, whatever the font
LINE: Final = 19.0
MARGIN: Final = 18.0
BAR: Final = 34.0
ANSI: Final = {2: "green", 3: "yellow"}


def draw(recording: str) -> str:
    """The view of a terminal of `COLUMNS` columns of a recording with ANSI colours."""
    console = Console(width=COLUMNS)
    shown = Text.from_ansi(recording.rstrip()).wrap(console, COLUMNS)
    rows = [list(_runs(console, line)) for line in shown]
    body = [
        f'<path class="bar" d="M1,{BAR:g} V11 a10,10 0 0 1 10,-10 H{_width() - 11:g} a10,10 0 0 1 10,10 V{BAR:g} z"/>',
        *(f'<circle class="dim" cx="{x}" cy="17" r="5.5" opacity=".45"/>' for x in (22, 41, 60)),
    ]
    for number, row in enumerate(rows):
        y = BAR + MARGIN + LINE * (number + 0.5)
        for column, text, kind in row:
            body.append(
                f'<text class="{kind}" x="{MARGIN + CELL * column:g}" y="{y:g}" textLength="{CELL * len(text):g}"'
                f' lengthAdjust="spacingAndGlyphs">{escape(text, quote=False)}</text>'
            )
    height = BAR + 2 * MARGIN + LINE * len(rows)
    label = "omni up in a terminal: " + " / ".join(line.plain.strip() for line in shown if line.plain.strip())
    style = f"text {{ font: 13px {MONO} }}\n"
    return page(_width(), height, label, style, body)


def _width() -> float:
    return 2 * MARGIN + CELL * COLUMNS


def _runs(console: Console, line: Text) -> Iterator[tuple[int, str, str]]:
    """Column, text and CSS classes of each run of words of one style. Wide gaps end a run: SVG would close them."""
    column = 0
    for segment in line.render(console):
        for run in re.finditer(r"\S+(?: \S+)*", segment.text):
            yield column + run.start(), run.group(), _classes(segment.style)
        column += len(segment.text)


def _classes(style: Style | None) -> str:
    if style is None:
        return "ink"
    colour = ANSI.get(style.color.number or 0) if style.color else None
    return (colour or ("dim" if style.dim else "ink")) + " bold" * bool(style.bold)

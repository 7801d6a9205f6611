"""Draws the pictures of this folder: ``make pictures``. A test compares them with what is drawn.

``omni-up.svg``: a recorded terminal (``omni-up.ansi``). ``request.svg``: the way of one request.
Not here: pictures of a pipeline, which `omni plan -o svg` draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.style import Style
from rich.text import Text

FOLDER: Final = Path(__file__).parent
MONO: Final = 'ui-monospace, "SF Mono", SFMono-Regular, Menlo, Consolas, monospace'
SANS: Final = 'ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# Light, and dark where the reader's system asks for it.
COLOURS: Final = """\
.page { fill: #ffffff; stroke: #d0d7de } .bar { fill: #f6f8fa }
.ink { fill: #1f2328 } .dim { fill: #6e7781 } .green { fill: #1a7f37 } .yellow { fill: #9a6700 }
.bold { font-weight: 600 }
.box { fill: #eef4fc; stroke: #8aa4c8 } .lane { stroke: #d0d7de; stroke-dasharray: 4 4 }
.http { stroke: #57606a } .control { stroke: #2f6fde } .data { stroke: #bf3989 }
.tip-http { fill: #57606a } .tip-control { fill: #2f6fde } .tip-data { fill: #bf3989 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #30363d } .bar { fill: #161b22 }
  .ink { fill: #f0f6fc } .dim { fill: #9198a1 } .green { fill: #3fb950 } .yellow { fill: #d29922 }
  .box { fill: #131d2e; stroke: #4d6f9e } .lane { stroke: #30363d }
  .http { stroke: #9198a1 } .control { stroke: #58a6ff } .data { stroke: #f778ba }
  .tip-http { fill: #9198a1 } .tip-control { fill: #58a6ff } .tip-data { fill: #f778ba }
}
"""


def page(width: float, height: float, label: str, style: str, body: Iterator[str] | list[str]) -> str:
    """A whole SVG file. label: what it shows, for readers who cannot see it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" aria-label="{escape(label)}">',
        f"<style>\n{style}{COLOURS}</style>",
        f'<rect class="page" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# A terminal.

COLUMNS: Final = 100
CELL: Final = 7.8  # width of a character of 13 px; each run of text is stretched to it, whatever the font
LINE: Final = 19.0
MARGIN: Final = 18.0
BAR: Final = 34.0
ANSI: Final = {2: "green", 3: "yellow"}


def terminal(recording: str) -> str:
    """What a terminal of `COLUMNS` columns shows of a recording with ANSI colours."""
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


# A request.


class Lane(NamedTuple):
    name: str
    under: str
    x: float


class Arrow(NamedTuple):
    source: int
    target: int
    plane: str  # http, control, data
    text: str
    gap: float = 36.0  # below the one before


class Work(NamedTuple):
    """A lane does something itself."""

    lane: int
    lines: tuple[str, ...]
    gap: float = 20.0


LANES: Final = (
    Lane("client", "curl, openai", 90),
    Lane("coordinator", "process, HTTP", 330),
    Lane("encode", "stage, process front", 610),
    Lane("speak", "stage, process voice", 890),
)
STEPS: Final = (
    Arrow(0, 1, "http", "POST /v1/chat/completions", 30),
    Work(1, ("admits the request,", "binds it to instances")),
    Arrow(1, 2, "control", "Submit: request, bindings", 30),
    Work(2, ("opens the payload,", "calls your function")),
    Arrow(2, 3, "data", "tensors: shared memory, or tcp", 30),
    Arrow(2, 3, "control", "DataReady: where they lie", 30),
    Work(3, ("reads them in place,", "calls your function")),
    Arrow(3, 2, "control", "Release: the memory is free", 30),
    Arrow(3, 1, "control", "Stream: a chunk of the answer", 34),
    Arrow(1, 0, "http", "data: {…}", 30),
    Arrow(3, 1, "control", "Complete: this stage is through", 34),
    Arrow(1, 0, "http", "data: [DONE]", 30),
)
PLANES: Final = (
    ("http", "HTTP"),
    ("control", "control plane: small messages over ZeroMQ, from process to process"),
    ("data", "data plane: tensors and long values, past the coordinator"),
)
TOP: Final = 74.0


def request() -> str:
    """A sequence diagram: a streamed answer of two stages in two processes."""
    width = LANES[-1].x + 110
    arrows: list[str] = []
    y = TOP
    for step in STEPS:
        y += step.gap
        if isinstance(step, Work):
            arrows += _box(LANES[step.lane].x, y, step.lines)
            y += 20.0 * len(step.lines)
        else:
            arrows += _arrow(step, y)
    bottom = y + 18
    lanes = [line for lane in LANES for line in _lane(lane, bottom)]
    legend = [line for number, plane in enumerate(PLANES) for line in _legend(*plane, 20, bottom + 24 + 22 * number)]
    style = (
        f"text {{ font: 13px {SANS} }}\n.name {{ font-size: 15px; font-weight: 600 }}\n"
        ".lane { stroke-width: 1.2 }\n.box { stroke-width: 1.2 }\n.arrow { stroke-width: 1.8; fill: none }\n"
        ".data.arrow { stroke-width: 4 }\n"
    )
    tips = [
        f'<marker id="tip-{plane}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10"'
        f' markerUnits="userSpaceOnUse" orient="auto"><path class="tip-{plane}" d="M0,1 L10,5 L0,9 z"/></marker>'
        for plane, _ in PLANES
    ]
    said = "; ".join(
        f"{LANES[step.source].name} to {LANES[step.target].name}: {step.text}"
        for step in STEPS
        if isinstance(step, Arrow)
    )
    label = f"The way of a request through two stages. {said}."
    return page(width, bottom + 24 + 22 * len(PLANES) + 4, label, style, [*tips, *lanes, *arrows, *legend])


def _lane(lane: Lane, bottom: float) -> list[str]:
    return [
        f'<line class="lane" x1="{lane.x:g}" y1="{TOP - 6:g}" x2="{lane.x:g}" y2="{bottom:g}"/>',
        f'<text class="ink name" x="{lane.x:g}" y="34" text-anchor="middle">{lane.name}</text>',
        f'<text class="dim" x="{lane.x:g}" y="54" text-anchor="middle">{lane.under}</text>',
    ]


def _box(x: float, y: float, lines: tuple[str, ...]) -> list[str]:
    top, height = y - 14.0, 18.0 * len(lines) + 12
    return [
        f'<rect class="box" x="{x - 82:g}" y="{top:g}" width="164" height="{height:g}" rx="6"/>',
        *(
            f'<text class="ink" x="{x:g}" y="{top + 19 + 18 * number:g}" text-anchor="middle">{line}</text>'
            for number, line in enumerate(lines)
        ),
    ]


def _arrow(arrow: Arrow, y: float) -> list[str]:
    a, b = LANES[arrow.source].x, LANES[arrow.target].x
    inset = 4 if b > a else -4
    way = f"M{a + inset:g},{y:g} H{b - inset:g}"
    return [
        f'<path class="arrow {arrow.plane}" d="{way}" marker-end="url(#tip-{arrow.plane})"/>',
        f'<text class="ink" x="{_middle(arrow):g}" y="{y - 7:g}" text-anchor="middle">{arrow.text}</text>',
    ]


def _middle(arrow: Arrow) -> float:
    """Between the two lanes nearest to the target, so that no lane runs through the words."""
    beside = arrow.target + (1 if arrow.source > arrow.target else -1)
    return (LANES[beside].x + LANES[arrow.target].x) / 2


def _legend(plane: str, text: str, x: float, y: float) -> list[str]:
    return [
        f'<path class="arrow {plane}" d="M{x:g},{y - 4:g} h30" marker-end="url(#tip-{plane})"/>',
        f'<text class="dim" x="{x + 42:g}" y="{y:g}">{text}</text>',
    ]


PICTURES: Final[dict[str, Callable[[], str]]] = {
    "omni-up.svg": lambda: terminal((FOLDER / "omni-up.ansi").read_text()),
    "request.svg": request,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()

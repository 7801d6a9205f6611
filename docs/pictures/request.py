"""The way of one request through two stages, as a sequence diagram."""

from __future__ import annotations

from typing import Final, NamedTuple

from docs.pictures.style import SANS, page


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
    Arrow(3, 1, "control", "Complete: this stage has finished", 34),
    Arrow(1, 0, "http", "data: [DONE]", 30),
)
PLANES: Final = (
    ("http", "HTTP"),
    ("control", "control plane: small messages over ZeroMQ, from process to process"),
    ("data", "data plane: tensors and long values, past the coordinator"),
)
TOP: Final = 74.0


def draw() -> str:
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
    steps = "; ".join(
        f"{LANES[step.source].name} to {LANES[step.target].name}: {step.text}"
        for step in STEPS
        if isinstance(step, Arrow)
    )
    label = f"The way of a request through two stages. {steps}."
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
    """The place between the two lanes nearest to the target, so that no lane runs through the words."""
    beside = arrow.target + (1 if arrow.source > arrow.target else -1)
    return (LANES[beside].x + LANES[arrow.target].x) / 2


def _legend(plane: str, text: str, x: float, y: float) -> list[str]:
    return [
        f'<path class="arrow {plane}" d="M{x:g},{y - 4:g} h30" marker-end="url(#tip-{plane})"/>',
        f'<text class="dim" x="{x + 42:g}" y="{y:g}">{text}</text>',
    ]

"""The cost of a stage's visit beside the bare prototype, as bars. The figures are `hops.json`, of one run of
``python -m benchmarks.hops --json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from docs.pictures.style import SANS, page

FIGURES: Final = Path(__file__).with_name("hops.json")
LEFT: Final = 110.0  # where bars begin
UNIT: Final = 150.0  # of a ratio of 1
ROW: Final = 40.0
TOP: Final = 92.0
BAR: Final = 18.0


class Visit(msgspec.Struct):
    """cpu_ratio: processor time of a visit, ours by the prototype's."""

    cpu_us: tuple[float, float]
    cpu_ratio: float


class Figures(msgspec.Struct):
    visits: dict[str, Visit]


def figures() -> Figures:
    return msgspec.json.decode(FIGURES.read_bytes(), type=Figures)


def draw() -> str:
    visits = figures().visits
    width, height = LEFT + 4 * UNIT, TOP + ROW * len(visits) + 28
    body = [
        '<text class="bold ink" x="24" y="34">Processor time of a visit of a stage</text>',
        '<text class="dim" x="24" y="56">by that of a bare prototype of the same design, in the same run</text>',
    ]
    for mark in range(1, 4):
        x = LEFT + mark * UNIT
        body.append(f'<line class="lane" x1="{x:g}" x2="{x:g}" y1="{TOP - 10:g}" y2="{height - 24:g}"/>')
        body.append(f'<text class="dim" x="{x:g}" y="{TOP - 16:g}" text-anchor="middle">{mark}x</text>')
    for index, (label, visit) in enumerate(visits.items()):
        y = TOP + index * ROW
        end = LEFT + visit.cpu_ratio * UNIT
        body += [
            f'<text class="ink" x="{LEFT - 12:g}" y="{y + BAR - 4:g}" text-anchor="end">{label}</text>',
            f'<rect class="box" x="{LEFT:g}" y="{y:g}" width="{end - LEFT:g}" height="{BAR:g}" rx="3"/>',
            f'<text class="ink" x="{end + 8:g}" y="{y + BAR - 4:g}">{visit.cpu_ratio:.2f}x</text>',
        ]
    style = f"text {{ font: 14px {SANS} }}\n"
    label = "Processor time of a visit by that of a bare prototype: " + ", ".join(
        f"{name} {visit.cpu_ratio:.2f}x" for name, visit in visits.items()
    )
    return page(width, height, label, style, body)

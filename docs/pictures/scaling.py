"""Curves of `benchmarks/scale.py`, drawn from the figures of one run: ``--json docs/pictures/scaling.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.scale import COST, JOIN_S, WORST, Figures
from docs.pictures.style import SANS, page

FILE: Final = Path(__file__).with_name("scaling.json")
STYLE: Final = f"""\
text {{ font-family: {SANS}; font-size: 13px }} .title {{ font-size: 14px }}
.line {{ fill: none; stroke-width: 2 }}
"""
WIDTH, HEIGHT, MARGIN, GAP = 330.0, 190.0, 64.0, 44.0

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    title: str
    unit: str
    points: Points
    limit: float | None = None  #: The target: a dashed line.


def draw() -> str:
    figures = msgspec.json.decode(FILE.read_bytes(), type=Figures)
    body: list[str] = []
    for number, panel in enumerate(panels(figures)):
        left = MARGIN + number % 2 * (WIDTH + MARGIN + GAP)
        top = 66 + number // 2 * (HEIGHT + 92)
        body += _panel(panel, left, top)
    width, height = 2 * (WIDTH + MARGIN) + GAP + 30, 2 * (HEIGHT + 92) + 30
    label = "Curves over the number of instances: time to join, cost of a request, time to replace all, worst load"
    return page(width, height, label, STYLE, body)


def panels(figures: Figures) -> list[Panel]:
    one = [each for each in figures.joined if each.coordinators == 1]
    rolls = [each for each in figures.changed if each.what == "roll"]
    return [
        Panel(
            "All instances have joined",
            "seconds",
            [(each.instances, each.join_s) for each in one],
            JOIN_S,
        ),
        Panel(
            "A request at the coordinator",
            "processor time, divided by that with ten instances",
            [(each.instances, each.cost) for each in figures.served],
            COST,
        ),
        Panel(
            "All instances are replaced",
            "seconds, under load, 50 at a time",
            [(each.instances, each.seconds) for each in rolls],
        ),
        Panel(
            "Load of the worst instance of a group",
            "divided by the mean; four coordinators, simulated",
            [(each.instances, each.worst) for each in figures.simulated],
            WORST,
        ),
    ]


def _panel(panel: Panel, left: float, top: float) -> Iterator[str]:
    points = sorted(panel.points)
    xs = [x for x, _ in points]
    ys = [y for _, y in points] + ([panel.limit] if panel.limit is not None else [])
    low, high = math.log(min(xs)), math.log(max(xs))
    most = max(ys) * 1.15

    def place(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * (math.log(x) - low) / (high - low), top + HEIGHT * (1 - y / most)

    yield f'<text class="ink bold title" x="{left - 40:g}" y="{top - 32:g}">{escape(panel.title)}</text>'
    yield f'<text class="dim" x="{left - 40:g}" y="{top - 15:g}">{escape(panel.unit)}</text>'
    for part in (0.0, 0.5, 1.0):
        y = top + HEIGHT * (1 - part)
        yield f'<path class="lane" d="M{left:g} {y:g}h{WIDTH:g}"/>'
        yield f'<text class="dim" x="{left - 8:g}" y="{y + 4:g}" text-anchor="end">{most * part:.3g}</text>'
    for x in sorted(set(xs)):
        px, _ = place(x, 0)
        yield f'<text class="dim" x="{px:.1f}" y="{top + HEIGHT + 18:g}" text-anchor="middle">{x:,g}</text>'
    if panel.limit is not None:
        _, y = place(xs[0], panel.limit)
        yield f'<path class="http" stroke-dasharray="6 4" d="M{left:g} {y:.1f}h{WIDTH:g}"/>'
        yield f'<text class="dim" x="{left + WIDTH:g}" y="{y - 5:.1f}" text-anchor="end">target {panel.limit:g}</text>'
    placed = [place(x, y) for x, y in points]
    yield f'<path class="line control" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in placed)}"/>'
    for (x, y), (_, value) in zip(placed, points, strict=True):
        yield f'<circle class="tip-control" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
        yield f'<text class="ink" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{value:.3g}</text>'

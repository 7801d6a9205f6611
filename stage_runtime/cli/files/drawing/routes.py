"""The ways of the lines between boxes that have their places.

Here: which lines there are, at which side and height each meets a box, its curve and its label. Not here: the boxes
(`picture`), colours (`svg`). Pure. Called by `picture`; `svg` asks it for paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.cli.files.drawing.arranging import Point, Size

REQUEST, ANSWER = "\0request", "\0answer"  # no stage can be called so
NEAR = 34.0  # a stage at most so far below is reached by a straight arrow
BULGE = 30.0  # how far a line to another stage of the same process leaves its column

BoxKind = Literal["pod", "process", "stage", "end"]
Side = Literal["left", "right", "top", "bottom"]


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A rectangle with a title and a smaller line."""

    kind: BoxKind
    name: str
    title: str
    note: str = ""
    gpu: str = ""  #: Such as ``GPU 0, 1``.
    corner: Point
    size: Size

    @property
    def right(self) -> float:
        return self.corner.x + self.size.width

    @property
    def bottom(self) -> float:
        return self.corner.y + self.size.height

    @property
    def centre(self) -> Point:
        return Point(self.corner.x + self.size.width / 2, self.corner.y + self.size.height / 2)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A line before it has a way."""

    source: str
    target: str
    kind: Literal["normal", "stream", "kv", "http"]
    transport: str = "http"
    label: str = ""


class DrawnLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line and its way: SVG path data, and the place of its label."""

    wish: Wish
    path: str
    middle: Point


def wishes(plan: PipelinePlan) -> list[Wish]:
    """All lines of a plan; of two between the same stages one has the label."""
    found = [Wish(source=REQUEST, target=plan.current.entry, kind="http")]
    labelled: set[tuple[str, str, str]] = set()
    for edge in plan.edges:
        label = "" if edge.transport == "in_process" else edge.relay.replace("_", " ")
        if edge.kind == "kv":
            label = f"KV, {label}"
        repeated = (edge.source, edge.target, label) in labelled
        labelled.add((edge.source, edge.target, label))
        found.append(
            Wish(
                source=edge.source,
                target=edge.target,
                kind=edge.kind,
                transport=edge.transport,
                label="" if repeated else label,
            )
        )
    return [*found, *(Wish(source=stage, target=ANSWER, kind="http") for stage in plan.current.terminals)]


def route(wanted: Sequence[Wish], bends: Sequence[tuple[Point, ...]], boxes: Iterable[Box]) -> Iterable[DrawnLine]:
    """The way of each line.

    bends: per line, the points in the columns between its ends that are kept free for it.
    """
    at = {box.name: box for box in boxes if box.kind in ("stage", "end")}
    sides = [_sides(at[one.source], at[one.target]) for one in wanted]
    leaving, arriving = _ports(wanted, bends, sides, at)
    for index, one in enumerate(wanted):
        points = (leaving[index], *bends[index], arriving[index])
        yield _line(one, points, sides[index])


def _sides(source: Box, target: Box) -> tuple[Side, Side]:
    if target.corner.x >= source.right:
        return "right", "left"
    if target.right <= source.corner.x:
        return "left", "right"
    if 0 <= target.corner.y - source.bottom <= NEAR:
        return "bottom", "top"
    return "right", "right"


def _ports(
    wanted: Sequence[Wish],
    bends: Sequence[tuple[Point, ...]],
    sides: Sequence[tuple[Side, Side]],
    at: Mapping[str, Box],
) -> tuple[dict[int, Point], dict[int, Point]]:
    """The points at which lines leave and reach their boxes: spread over each side, in the order of their other
    ends.
    """
    users: dict[tuple[str, Side], list[tuple[float, int, bool]]] = {}
    for index, one in enumerate(wanted):
        source, target = at[one.source], at[one.target]
        out, into = sides[index]
        beyond = bends[index][0] if bends[index] else target.centre
        before = bends[index][-1] if bends[index] else source.centre
        users.setdefault((source.name, out), []).append((_rank(beyond, out), index, True))
        users.setdefault((target.name, into), []).append((_rank(before, into), index, False))
    leaving: dict[int, Point] = {}
    arriving: dict[int, Point] = {}
    for (name, side), lines in users.items():
        for place, (_, index, leaves) in enumerate(sorted(lines), 1):
            port = _port(at[name], side, place / (len(lines) + 1))
            (leaving if leaves else arriving)[index] = port
    return leaving, arriving


def _rank(other: Point, side: Side) -> float:
    return other.x if side in ("top", "bottom") else other.y


def _port(box: Box, side: Side, share: float) -> Point:
    match side:
        case "left":
            return Point(box.corner.x, box.corner.y + box.size.height * share)
        case "right":
            return Point(box.right, box.corner.y + box.size.height * share)
        case "top":
            return Point(box.corner.x + box.size.width * share, box.corner.y)
        case "bottom":
            return Point(box.corner.x + box.size.width * share, box.bottom)


def _line(wish: Wish, points: tuple[Point, ...], sides: tuple[Side, Side]) -> DrawnLine:
    first, last = points[0], points[-1]
    start = f"M{first.x:.1f},{first.y:.1f}"
    if sides[0] == "bottom":
        path = f"{start} L{last.x:.1f},{last.y:.1f}"
        return DrawnLine(wish=wish, path=path, middle=Point((first.x + last.x) / 2, (first.y + last.y) / 2))
    if sides == ("right", "right"):
        out = max(first.x, last.x) + BULGE
        path = f"{start} C{out:.1f},{first.y:.1f} {out:.1f},{last.y:.1f} {last.x:.1f},{last.y:.1f}"
        return DrawnLine(wish=wish, path=path, middle=Point(out - BULGE / 4, (first.y + last.y) / 2))
    curves = "".join(_curve(here, there) for here, there in pairwise(points))
    here, there = points[:2] if len(points) == 2 else points[-2:]
    return DrawnLine(wish=wish, path=start + curves, middle=Point((here.x + there.x) / 2, (here.y + there.y) / 2))


def _curve(here: Point, there: Point) -> str:
    """A cubic piece that leaves and arrives horizontally, so that pieces meet smoothly."""
    reach = (there.x - here.x) / 2
    return f" C{here.x + reach:.1f},{here.y:.1f} {there.x - reach:.1f},{there.y:.1f} {there.x:.1f},{there.y:.1f}"

"""What the picture of a plan shows: boxes in boxes, and the lines between stages.

Here: pods hold processes hold stages, each level arranged by itself, from the inside out; what each box says. Not
here: colours and SVG (`svg`). Pure. Called by `svg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from omnipipeline_spec.plan import EdgePlan, GroupPlan, PipelinePlan, StagePlan, UnitPlan
from stage_runtime.cli.drawing.arranging import Arrangement, Point, Size, arrange

REQUEST, ANSWER = "\0request", "\0answer"  # no stage can be called so

STAGE_HEIGHT = 56.0
GAP_X, GAP_Y = 84.0, 26.0
INNER_GAP_X, INNER_GAP_Y = 56.0, 16.0
PADDING, HEADING = 14.0, 24.0
TITLE_PX, SMALL_PX = 15.0, 11.5
SHORTEST_CURVE = 26.0

Kind = Literal["pod", "process", "stage", "end"]


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A rectangle with a title and a smaller line."""

    kind: Kind
    name: str
    title: str
    note: str = ""
    gpu: str = ""  #: Such as ``GPU 0, 1``.
    corner: Point
    size: Size


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """An edge; ``points`` are its ends and what it passes, each entered and left horizontally unless it leads back."""

    kind: Literal["normal", "stream", "http"]
    transport: str
    label: str
    points: tuple[Point, ...]
    back: bool = False


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    boxes: tuple[Box, ...]  #: Outer ones first.
    lines: tuple[Line, ...]
    size: Size


class _Nested(msgspec.Struct, frozen=True, kw_only=True):
    """A box whose inside is arranged; corners are relative to its own."""

    size: Size
    boxes: tuple[Box, ...]


def draw(plan: PipelinePlan) -> Picture:
    """Boxes and lines of a plan, from the client's request on the left to its answer on the right."""
    group_of = {stage.name: stage.group for unit in plan.units for stage in unit.stages}
    unit_of = {group.name: unit.name for unit in plan.units for group in unit.groups}
    nested = {unit.name: _unit(unit, plan, group_of) for unit in plan.units}
    outer = [(unit_of[group_of[edge.source]], unit_of[group_of[edge.target]]) for edge in plan.edges]
    outer.append((REQUEST, unit_of[group_of[plan.current.entry]]))
    outer += [(unit_of[group_of[stage]], ANSWER) for stage in plan.current.terminals]
    ends = {REQUEST: _end(plan, REQUEST, Point(0, 0)), ANSWER: _end(plan, ANSWER, Point(0, 0))}
    sizes = {REQUEST: ends[REQUEST].size, **{name: one.size for name, one in nested.items()}, ANSWER: ends[ANSWER].size}
    found = arrange(sizes, outer, gap_x=GAP_X, gap_y=GAP_Y, ranks={REQUEST: 0, ANSWER: -1})
    boxes = [_moved(box, found.places[name]) for name, one in nested.items() for box in one.boxes]
    boxes += [_end(plan, name, found.places[name]) for name in ends]
    return Picture(boxes=tuple(boxes), lines=tuple(_lines(plan, boxes, found, group_of, unit_of)), size=found.extent)


def text_width(text: str, px: float) -> float:
    """An estimate on the safe side for a sans-serif font; SVG cannot measure before it is shown."""
    narrow = sum(character in "iljt.,:;|!'()[]fr /" for character in text)
    return px * (0.62 * (len(text) - narrow) + 0.36 * narrow)


def _end(plan: PipelinePlan, name: str, corner: Point) -> Box:
    if name == REQUEST:
        routes = ", ".join((*plan.coordinator.serves, "/v1/pipeline")) if plan.coordinator.serves else "/v1/pipeline"
        title, note = "request", routes if len(routes) < 28 else f"{len(plan.coordinator.serves)} OpenAI routes"
    else:
        title, note = "answer", "JSON or a stream"
    width = max(text_width(title, TITLE_PX), text_width(note, SMALL_PX)) + 2 * PADDING + 8
    return Box(kind="end", name=name, title=title, note=note, corner=corner, size=Size(width, STAGE_HEIGHT))


def _unit(unit: UnitPlan, plan: PipelinePlan, group_of: Mapping[str, str]) -> _Nested:
    groups = {group.name: _group(group, unit, plan) for group in unit.groups}
    if len(groups) == 1:
        return next(iter(groups.values()))
    edges = [(group_of[e.source], group_of[e.target]) for e in plan.edges if group_of[e.source] != group_of[e.target]]
    title = f"pod {unit.name}{_times(plan.replicas[unit.name])}"
    return _enclose("pod", unit.name, title, _gpus_of_pod(unit), groups, edges)


def _group(group: GroupPlan, unit: UnitPlan, plan: PipelinePlan) -> _Nested:
    stages = {stage.name: _stage(stage, unit) for stage in unit.stages if stage.name in group.stages}
    edges = [(edge.source, edge.target) for edge in plan.edges]
    title = group.name if group.tp_size == 1 else f"{group.name} (ranks 0-{group.tp_size - 1})"
    times = _times(plan.replicas[unit.name]) if len(unit.groups) == 1 else ""
    note = "" if len(unit.groups) > 1 else "pod"
    return _enclose("process", group.name, f"{title}{times}", note, stages, edges)


def _stage(stage: StagePlan, unit: UnitPlan) -> _Nested:
    gpu = "GPU " + ", ".join(str(unit.gpu_ids[position]) for position in stage.gpus) if stage.gpus else ""
    note = stage.factory if len(stage.factory) <= 34 else f"…{stage.factory[-33:]}"
    title_width = text_width(stage.name, TITLE_PX) * 1.06 + (text_width(gpu, SMALL_PX) + 22 if gpu else 0)
    size = Size(max(title_width, text_width(note, SMALL_PX), 76.0) + 2 * PADDING, STAGE_HEIGHT)
    box = Box(kind="stage", name=stage.name, title=stage.name, note=note, gpu=gpu, corner=Point(0, 0), size=size)
    return _Nested(size=size, boxes=(box,))


def _enclose(
    kind: Kind,
    name: str,
    title: str,
    note: str,
    inside: Mapping[str, _Nested],
    edges: Iterable[tuple[str, str]],
) -> _Nested:
    found = arrange({key: one.size for key, one in inside.items()}, edges, gap_x=INNER_GAP_X, gap_y=INNER_GAP_Y)
    heading = text_width(title, SMALL_PX) * 1.1 + text_width(note, SMALL_PX) + 24
    size = Size(max(found.extent.width, heading) + 2 * PADDING, found.extent.height + HEADING + PADDING + 4)
    shift = Point((size.width - found.extent.width) / 2, HEADING + 4)
    frame = Box(kind=kind, name=name, title=title, note=note, corner=Point(0, 0), size=size)
    moved = (
        _moved(box, Point(shift.x + found.places[key].x, shift.y + found.places[key].y))
        for key, one in inside.items()
        for box in one.boxes
    )
    return _Nested(size=size, boxes=(frame, *moved))


def _moved(box: Box, by: Point) -> Box:
    return msgspec.structs.replace(box, corner=Point(box.corner.x + by.x, box.corner.y + by.y))


def _times(replicas: int) -> str:
    return f" x{replicas}" if replicas > 1 else ""


def _gpus_of_pod(unit: UnitPlan) -> str:
    return f"{len(unit.gpu_ids)} GPU{'' if len(unit.gpu_ids) == 1 else 's'}" if unit.gpu_ids else ""


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A line before it has found its places at the sides of boxes."""

    source: str
    target: str
    kind: Literal["normal", "stream", "http"]
    transport: str
    label: str
    bends: tuple[Point, ...] = ()


def _lines(
    plan: PipelinePlan,
    boxes: Sequence[Box],
    found: Arrangement,
    group_of: Mapping[str, str],
    unit_of: Mapping[str, str],
) -> Iterable[Line]:
    def bends(source: str, target: str) -> tuple[Point, ...]:
        return found.bends.get(
            (unit_of.get(group_of.get(source, ""), source), unit_of.get(group_of.get(target, ""), target)), ()
        )

    def wish(edge: EdgePlan) -> _Wish:
        label = edge.relay.replace("_", " ")
        return _Wish(
            source=edge.source,
            target=edge.target,
            kind=edge.kind,
            transport=edge.transport,
            label="" if edge.transport == "in_process" else label,
            bends=bends(edge.source, edge.target),
        )

    wishes = [wish(edge) for edge in plan.edges]
    entry = plan.current.entry
    wishes.append(_Wish(source=REQUEST, target=entry, kind="http", transport="", label="", bends=bends(REQUEST, entry)))
    for stage in plan.current.terminals:
        wishes.append(
            _Wish(source=stage, target=ANSWER, kind="http", transport="", label="", bends=bends(stage, ANSWER))
        )
    at = {box.name: box for box in boxes if box.kind in ("stage", "end")}
    leaving = _ports(wishes, at, outgoing=True)
    arriving = _ports(wishes, at, outgoing=False)
    for index, one in enumerate(wishes):
        yield _line(one, at[one.source], at[one.target], leaving[index], arriving[index])


def _ports(wishes: Sequence[_Wish], at: Mapping[str, Box], *, outgoing: bool) -> dict[int, float]:
    """Heights at which lines leave (or reach) their box: spread over its side, in the order of their other ends."""
    by_box: dict[str, list[int]] = {}
    for index, wish in enumerate(wishes):
        by_box.setdefault(wish.source if outgoing else wish.target, []).append(index)
    heights: dict[int, float] = {}
    for name, indices in by_box.items():
        indices.sort(key=lambda index: _other_end(wishes[index], at, outgoing=outgoing))
        box = at[name]
        for place, index in enumerate(indices, 1):
            heights[index] = box.corner.y + box.size.height * place / (len(indices) + 1)
    return heights


def _other_end(wish: _Wish, at: Mapping[str, Box], *, outgoing: bool) -> tuple[float, str]:
    if wish.bends:
        return (wish.bends[0] if outgoing else wish.bends[-1]).y, wish.kind
    box = at[wish.target if outgoing else wish.source]
    return box.corner.y + box.size.height / 2, wish.kind  # two lines between two boxes: the same order at both ends


def _line(wish: _Wish, source: Box, target: Box, leaves: float, arrives: float) -> Line:
    start = Point(source.corner.x + source.size.width, leaves)
    end = Point(target.corner.x, arrives)
    back = end.x < start.x + SHORTEST_CURVE / 2
    if back:
        start = Point(source.corner.x + source.size.width / 2, source.corner.y + source.size.height)
        end = Point(target.corner.x + target.size.width / 2, target.corner.y + target.size.height)
    bends = () if back else tuple(bend for bend in wish.bends if start.x < bend.x < end.x)
    return Line(kind=wish.kind, transport=wish.transport, label=wish.label, points=(start, *bends, end), back=back)


def curve(line: Line) -> str:
    """The line as an SVG path: cubic pieces that meet smoothly."""
    first, last = line.points[0], line.points[-1]
    path = f"M{first.x:.1f},{first.y:.1f}"
    if line.back:
        dip = max(first.y, last.y) + 46
        return f"{path} C{first.x:.1f},{dip:.1f} {last.x:.1f},{dip:.1f} {last.x:.1f},{last.y:.1f}"
    for here, there in pairwise(line.points):
        reach = max((there.x - here.x) / 2, SHORTEST_CURVE / 2)
        path += f" C{here.x + reach:.1f},{here.y:.1f} {there.x - reach:.1f},{there.y:.1f} {there.x:.1f},{there.y:.1f}"
    return path


def middle(line: Line) -> Point:
    """Where a label stands: half way along the first piece."""
    here, there = line.points[0], line.points[1]
    if line.back:
        return Point((here.x + there.x) / 2, max(here.y, there.y) + 36)
    return Point((here.x + there.x) / 2, (here.y + there.y) / 2)

"""The content of a plan's picture: boxes in boxes, and the lines between stages.

Here: pods hold processes hold stages, each level arranged by itself, from the inside out; the text of each box. The
stages of a process stand below each other: so each has both sides free for its lines. Not here: the lines' ways
(`routes`), colours and SVG (`svg`). Pure. Called by `svg`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omnipipeline_spec.types.plan import GroupPlan, PipelinePlan, StagePlan, UnitPlan
from stage_runtime.cli.files.drawing import routes
from stage_runtime.cli.files.drawing.arranging import Point, Size, arrange
from stage_runtime.cli.files.drawing.routes import ANSWER, REQUEST, Box, BoxKind, DrawnLine

STAGE_HEIGHT = 56.0
GAP_X, GAP_Y = 76.0, 24.0
INNER_GAP_X, INNER_GAP_Y = 64.0, 16.0
STAGE_GAP = 26.0
PADDING, HEADING = 14.0, 24.0
LONGEST_NOTE = 30
TITLE_PX, SMALL_PX = 15.0, 11.5


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    boxes: tuple[Box, ...]  #: Outer ones first.
    lines: tuple[DrawnLine, ...]
    size: Size


class _Nested(msgspec.Struct, frozen=True, kw_only=True):
    """A box whose inside is arranged; corners are relative to its own."""

    size: Size
    boxes: tuple[Box, ...]


def draw(plan: PipelinePlan) -> Picture:
    """Boxes and lines of a plan, from the client's request on the left to its answer on the right."""
    group_of = {stage.name: stage.group for unit in plan.units for stage in unit.stages}
    unit_of = {stage.name: unit.name for unit in plan.units for stage in unit.stages}
    wishes = routes.wishes(plan)
    nested = {unit.name: _unit(unit, plan, group_of) for unit in plan.units}
    ends = {name: _end(plan, name, Point(0, 0)) for name in (REQUEST, ANSWER)}
    sizes = {REQUEST: ends[REQUEST].size, **{name: one.size for name, one in nested.items()}, ANSWER: ends[ANSWER].size}
    outer = [(unit_of.get(one.source, one.source), unit_of.get(one.target, one.target)) for one in wishes]
    found = arrange(sizes, outer, gap_x=GAP_X, gap_y=GAP_Y, ranks={REQUEST: 0, ANSWER: -1})
    boxes = [_moved(box, found.places[name]) for name, one in nested.items() for box in one.boxes]
    boxes += [_end(plan, name, found.places[name]) for name in ends]
    lines = routes.route(wishes, [found.bends.get(edge, ()) for edge in outer], boxes)
    return Picture(boxes=tuple(boxes), lines=tuple(lines), size=found.extent)


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
    found = arrange({name: one.size for name, one in groups.items()}, edges, gap_x=INNER_GAP_X, gap_y=INNER_GAP_Y)
    boxes = tuple(_moved(box, found.places[name]) for name, one in groups.items() for box in one.boxes)
    return _framed("pod", unit.name, title, _gpus_of_pod(unit), _Nested(size=found.extent, boxes=boxes))


def _group(group: GroupPlan, unit: UnitPlan, plan: PipelinePlan) -> _Nested:
    stages = {stage.name: _stage(stage, unit) for stage in unit.stages if stage.name in group.stages}
    order = _downstream_last(group.stages, plan)
    title = f"process {group.name}" if group.tp_size == 1 else f"{group.tp_size} processes {group.name}"
    times = _times(plan.replicas[unit.name]) if len(unit.groups) == 1 else ""
    note = "" if len(unit.groups) > 1 else "pod"
    stacked = _stacked([stages[name] for name in order])
    return _framed("process", group.name, f"{title}{times}", note, stacked)


def _stage(stage: StagePlan, unit: UnitPlan) -> _Nested:
    gpu = "GPU " + ", ".join(str(unit.gpu_ids[position]) for position in stage.gpus) if stage.gpus else ""
    note = _function(stage.factory)
    title_width = text_width(stage.name, TITLE_PX) * 1.06 + (text_width(gpu, SMALL_PX) + 22 if gpu else 0)
    size = Size(max(title_width, text_width(note, SMALL_PX), 76.0) + 2 * PADDING, STAGE_HEIGHT)
    box = Box(kind="stage", name=stage.name, title=stage.name, note=note, gpu=gpu, corner=Point(0, 0), size=size)
    return _Nested(size=size, boxes=(box,))


def _function(factory: str) -> str:
    """The function with its module, without the packages: ``talker:create``."""
    module, _, name = factory.replace(":", ".").rpartition(".")
    short = f"{module.rpartition('.')[2]}:{name}"
    return short if len(short) <= LONGEST_NOTE else f"…{short[1 - LONGEST_NOTE :]}"


def _downstream_last(stages: Sequence[str], plan: PipelinePlan) -> list[str]:
    """Stages of one process from top to bottom, as work flows through the whole pipeline."""
    names = list(plan.current.stages)
    one_size = dict.fromkeys(names, Size(1, 1))
    columns = arrange(one_size, [(edge.source, edge.target) for edge in plan.edges], gap_x=1, gap_y=1).places
    return sorted(stages, key=lambda name: (columns[name].x, names.index(name)))


def _stacked(inside: Sequence[_Nested]) -> _Nested:
    width = max(one.size.width for one in inside)
    boxes: list[Box] = []
    top = 0.0
    for one in inside:
        widened = [msgspec.structs.replace(box, size=Size(width, box.size.height)) for box in one.boxes]
        boxes.extend(_moved(box, Point(0, top)) for box in widened)
        top += one.size.height + STAGE_GAP
    return _Nested(size=Size(width, top - STAGE_GAP), boxes=tuple(boxes))


def _framed(kind: BoxKind, name: str, title: str, note: str, inside: _Nested) -> _Nested:
    heading = text_width(title, SMALL_PX) * 1.1 + text_width(note, SMALL_PX) + 24
    size = Size(max(inside.size.width, heading) + 2 * PADDING, inside.size.height + HEADING + PADDING + 4)
    shift = Point((size.width - inside.size.width) / 2, HEADING + 4)
    frame = Box(kind=kind, name=name, title=title, note=note, corner=Point(0, 0), size=size)
    return _Nested(size=size, boxes=(frame, *(_moved(box, shift) for box in inside.boxes)))


def _moved(box: Box, by: Point) -> Box:
    return msgspec.structs.replace(box, corner=Point(box.corner.x + by.x, box.corner.y + by.y))


def _times(replicas: int) -> str:
    return f" x{replicas}" if replicas > 1 else ""


def _gpus_of_pod(unit: UnitPlan) -> str:
    return f"{len(unit.gpu_ids)} GPU{'' if len(unit.gpu_ids) == 1 else 's'}" if unit.gpu_ids else ""

"""The picture of a plan as SVG that needs nothing else: no fonts, no scripts, light and dark.

Here: how things look. Not here: what is shown and where (`picture`). Called by `cli.files.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.cli.files.drawing import picture
from stage_runtime.cli.files.drawing.picture import Picture
from stage_runtime.cli.files.drawing.routes import Box, DrawnLine

MARGIN = 22.0
TITLE_HEIGHT = 40.0
LEGEND_HEIGHT = 40.0
LEGEND = (
    ("normal", "in_process", "same process, by reference"),
    ("normal", "same_pod", "same pod, shared memory or CUDA IPC"),
    ("normal", "network", "between pods"),
    ("stream", "network", "stream of chunks"),
)
LEGEND_OF_KV = ("kv", "network", "KV blocks of prompts")

_STYLE = """
text { font: 11.5px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #57606a }
.name { font-size: 15px; font-weight: 600; fill: #1f2328 }
.heading { font-size: 18px; font-weight: 600; fill: #1f2328 }
.frame { font-weight: 600; fill: #424a53 }
.mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 10.5px }
.page { fill: #ffffff }
.pod { fill: #f6f8fa; stroke: #8c959f; stroke-dasharray: 6 4 }
.process { fill: #eef4fc; stroke: #b6cbe6 }
.stage { fill: #ffffff; stroke: #8aa4c8; stroke-width: 1.2 }
.end { fill: #1f2328; stroke: none }
.ontop { fill: #ffffff } .faint { fill: #b7bfc8 }
.gpu { fill: #1a7f37 } .gpu-text { fill: #ffffff; font-size: 10.5px; font-weight: 600 }
.line { fill: none; stroke-width: 1.7 }
.in_process { stroke: #8c959f } .same_pod { stroke: #1a7f83 } .network { stroke: #2f6fde } .http { stroke: #57606a }
.stream { stroke-dasharray: 3 4; stroke-linecap: round; stroke-width: 2.1 }
.tip-in_process { fill: #8c959f } .tip-same_pod { fill: #1a7f83 } .tip-network { fill: #2f6fde }
.tip-http { fill: #57606a }
.label { fill: #ffffff; opacity: .92 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 } .name, .heading { fill: #f0f6fc } .frame { fill: #c9d1d9 }
  .page { fill: #0d1117 } .pod { fill: #12171e; stroke: #656c76 } .process { fill: #131d2e; stroke: #2c4a75 }
  .stage { fill: #0d1117; stroke: #4d6f9e } .end { fill: #f0f6fc } .ontop { fill: #0d1117 } .faint { fill: #57606a }
  .gpu { fill: #3fb950 } .gpu-text { fill: #0d1117 } .label { fill: #0d1117 }
  .same_pod { stroke: #39c5cf } .network { stroke: #58a6ff } .http { stroke: #9198a1 }
  .tip-same_pod { fill: #39c5cf } .tip-network { fill: #58a6ff } .tip-http { fill: #9198a1 }
}
"""


def render(plan: PipelinePlan) -> str:
    """The whole document."""
    drawn = picture.draw(plan)
    legend = (*LEGEND, *([LEGEND_OF_KV] if any(edge.kind == "kv" for edge in plan.edges) else []))
    legend_width = sum(picture.text_width(text, 11.5) + 66 for _, _, text in legend)
    width = max(drawn.size.width, legend_width) + 2 * MARGIN
    height = drawn.size.height + 2 * MARGIN + TITLE_HEIGHT + LEGEND_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" aria-label="{_quoted(_summary(plan))}">',
            f"<style>{_STYLE}</style>",
            *(_tip(name) for name in ("in_process", "same_pod", "network", "http")),
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="10"/>',
            _text("heading", plan.pipeline, MARGIN, MARGIN + 12),
            _text("", _summary(plan), MARGIN + picture.text_width(plan.pipeline, 18) * 1.1 + 14, MARGIN + 12),
            f'<g transform="translate({(width - drawn.size.width) / 2:.1f},{MARGIN + TITLE_HEIGHT:.1f})">',
            *_body(drawn),
            "</g>",
            *_legend(legend, MARGIN, height - MARGIN - 2),
            "</svg>\n",
        ]
    )


def _summary(plan: PipelinePlan) -> str:
    stages = sum(len(unit.stages) for unit in plan.units)
    times = plan.replicas
    processes = sum(len(group.processes) * times[unit.name] for unit in plan.units for group in unit.groups)
    gpus = sum(len(unit.gpu_ids) * times[unit.name] for unit in plan.units)
    counts = [(stages, "stage"), (processes, "process"), (sum(times.values()), "pod"), (gpus, "GPU")]
    return ", ".join(f"{n} {noun}{'' if n == 1 else 'es' if noun == 'process' else 's'}" for n, noun in counts if n)


def _body(drawn: Picture) -> Iterable[str]:
    frames = [box for box in drawn.boxes if box.kind in ("pod", "process")]
    for box in sorted(frames, key=lambda box: box.kind):  # pods under the processes in them
        yield _frame(box)
    for line in drawn.lines:
        yield _path(line)
    for box in drawn.boxes:
        if box.kind in ("stage", "end"):
            yield from _card(box)
    for line in drawn.lines:
        if line.wish.label:
            yield _label(line)


def _frame(box: Box) -> str:
    x, y = box.corner.x, box.corner.y
    parts = [_rect(box.kind, box, 12), _text("frame", box.title, x + picture.PADDING, y + 18)]
    if box.note:
        right = x + box.size.width - picture.PADDING - picture.text_width(box.note, picture.SMALL_PX)
        parts.append(_text("", box.note, right, y + 18))
    return "".join(parts)


def _card(box: Box) -> Iterable[str]:
    x, y = box.corner.x, box.corner.y
    round_end = box.kind == "end"
    yield _rect(box.kind, box, box.size.height / 2 if round_end else 8)
    if round_end:
        centre = x + box.size.width / 2
        yield _text("name ontop", box.title, centre, y + 25, anchor="middle")
        yield _text("faint", box.note, centre, y + 41, anchor="middle")
        return
    yield _text("name", box.title, x + picture.PADDING, y + 24)
    yield _text("mono", box.note, x + picture.PADDING, y + 42)
    if box.gpu:
        chip = picture.text_width(box.gpu, 10.5) + 14
        left = x + box.size.width - picture.PADDING / 2 - chip
        yield f'<rect class="gpu" x="{left:.1f}" y="{y + 9:.1f}" width="{chip:.1f}" height="18" rx="9"/>'
        yield _text("gpu-text", box.gpu, left + chip / 2, y + 22, anchor="middle")


def _path(line: DrawnLine) -> str:
    return _stroke(line.wish.transport, line.wish.kind, line.path)


def _stroke(transport: str, kind: str, path: str) -> str:
    dashed = " stream" if kind == "stream" else ""
    strokes = ' stroke-dasharray="9 4"' if kind == "kv" else ""
    return f'<path class="line {transport}{dashed}"{strokes} d="{path}" marker-end="url(#tip-{transport})"/>'


def _label(line: DrawnLine) -> str:
    at, label = line.middle, line.wish.label
    width = picture.text_width(label, 11.5) + 8
    back = f'<rect class="label" x="{at.x - width / 2:.1f}" y="{at.y - 8:.1f}" width="{width:.1f}" height="16" rx="4"/>'
    return back + _text("", label, at.x, at.y + 4, anchor="middle")


def _legend(legend: Sequence[tuple[str, str, str]], left: float, y: float) -> Iterable[str]:
    for kind, transport, text in legend:
        yield _stroke(transport, kind, f"M{left:.1f},{y - 4:.1f} H{left + 30:.1f}")
        yield _text("", text, left + 40, y)
        left += picture.text_width(text, 11.5) + 66


def _tip(name: str) -> str:
    return (
        f'<marker id="tip-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tip-{name}" d="M0,1 L10,5 L0,9 z"/></marker>'
    )


def _rect(classes: str, box: Box, radius: float) -> str:
    return (
        f'<rect class="{classes}" x="{box.corner.x:.1f}" y="{box.corner.y:.1f}" width="{box.size.width:.1f}" '
        f'height="{box.size.height:.1f}" rx="{radius:.0f}"/>'
    )


def _text(classes: str, text: str, x: float, y: float, *, anchor: str = "start") -> str:
    held = f' class="{classes}"' if classes else ""
    at = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{held} x="{x:.1f}" y="{y:.1f}"{at}>{escape(text)}</text>'


def _quoted(text: str) -> str:
    return escape(text, {'"': "&quot;"})

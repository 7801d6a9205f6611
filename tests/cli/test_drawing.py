"""The picture of a plan: nothing overlaps, every edge is there, the document is well formed."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import Disaggregation, GpuMemory, PipelineConfig, PrefillPlacement, StageConfig
from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.cli.files.drawing import mermaid, picture, svg
from stage_runtime.cli.files.drawing.arranging import Arrangement, Size, arrange
from stage_runtime.cli.files.drawing.routes import Box

SVG = "{http://www.w3.org/2000/svg}"


def omni_plan() -> PipelinePlan:
    """A fan-out and fan-in that leads back into one process, a TP stage, a shared GPU, two terminals."""
    shared = GpuMemory(fraction=0.4)
    return planning.plan(
        PipelineConfig(
            name="omni",
            stages=[
                StageConfig(name="front", process="cpu", factory="pkg.front:f", next=["image", "sound", "join"]),
                StageConfig(name="image", process="image", factory="m:f", gpu=0, gpu_memory=shared, next="join"),
                StageConfig(name="sound", process="sound", factory="m:f", gpu=0, gpu_memory=shared, next="join"),
                StageConfig(
                    name="join",
                    process="cpu",
                    factory="m:f",
                    wait_for=["front", "image", "sound"],
                    merge_fn="m:g",
                    next="thinker",
                ),
                StageConfig(
                    name="thinker", factory="m:f", gpu=[1, 2], tp_size=2, next=["text", "talker"], stream_to=["talker"]
                ),
                StageConfig(name="text", process="text", factory="m:f", terminal=True),
                StageConfig(name="talker", process="talker", factory="m:f", gpu=3, terminal=True),
            ],
        )
    )


def overlap(one: Box, other: Box) -> bool:
    apart_x = one.right <= other.corner.x or other.right <= one.corner.x
    apart_y = one.bottom <= other.corner.y or other.bottom <= one.corner.y
    return not (apart_x or apart_y)


def inside(inner: Box, outer: Box) -> bool:
    across = outer.corner.x <= inner.corner.x and inner.right <= outer.right
    return across and outer.corner.y <= inner.corner.y and inner.bottom <= outer.bottom


def test_boxes_of_one_kind_never_overlap_and_stages_lie_in_their_process() -> None:
    plan = omni_plan()
    boxes = picture.draw(plan).boxes
    by_kind = {kind: [box for box in boxes if box.kind == kind] for kind in ("pod", "process", "stage")}
    assert {kind: len(held) for kind, held in by_kind.items()} == {"pod": 1, "process": 6, "stage": 7}
    for held in by_kind.values():
        assert not any(overlap(one, other) for one, other in itertools.combinations(held, 2))
    processes = {box.name: box for box in by_kind["process"]}
    for box in by_kind["stage"]:
        assert inside(box, processes[plan.current.stages[box.name]])


def test_every_edge_and_both_ends_of_the_way_are_drawn_once() -> None:
    plan = omni_plan()
    drawn = sorted((line.wish.source, line.wish.target, line.wish.kind) for line in picture.draw(plan).lines)
    ends = [("\0request", "front", "http"), ("text", "\0answer", "http"), ("talker", "\0answer", "http")]
    assert drawn == sorted([*plan.current.edges, *ends])


def test_the_svg_is_well_formed_and_names_every_stage() -> None:
    document = ElementTree.fromstring(svg.render(omni_plan()))
    texts = {element.text for element in document.iter(f"{SVG}text")}
    assert {"front", "image", "sound", "join", "thinker", "text", "talker", "GPU 1, 2", "2 processes thinker"} <= texts
    assert document.get("aria-label") == "7 stages, 7 processes, 5 pods, 4 GPUs"


def test_names_cannot_break_out_of_the_pictures() -> None:
    plan = omni_plan()
    wild = plan.__class__(**{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "pipeline": '<x>&"'})
    assert ElementTree.fromstring(svg.render(wild)) is not None


def test_mermaid_names_stages_by_numbers_so_that_no_name_is_a_keyword() -> None:
    plan = planning.plan(
        PipelineConfig(name="p", stages=[StageConfig(name="end", process="graph", factory="m:f", terminal=True)])
    )
    assert mermaid.render(plan) == (
        "flowchart LR\n  request([request])\n  answer([answer])\n"
        '  subgraph u0["pod graph"]\n    subgraph u0g0["process graph"]\n      s0["end"]\n    end\n  end\n'
        "  request --> s0\n  s0 --> answer\n"
    )


names = [f"n{number}" for number in range(9)]
edges = st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=24)


def placed(found: Arrangement) -> list[Box]:
    return [
        Box(kind="stage", name=name, title="", corner=corner, size=Size(40, 20))
        for name, corner in found.places.items()
    ]


@given(edges)
def test_any_graph_is_arranged_without_overlaps_cycles_included(given_edges: list[tuple[str, str]]) -> None:
    found = arrange(dict.fromkeys(names, Size(40, 20)), given_edges, gap_x=10, gap_y=5)
    boxes = placed(found)
    assert len(boxes) == len(names)
    assert not any(overlap(one, other) for one, other in itertools.combinations(boxes, 2))
    assert all(0 <= b.corner.x and b.right <= found.extent.width + 1e-6 for b in boxes)
    assert all(-1e-6 <= b.corner.y and b.bottom <= found.extent.height + 1e-6 for b in boxes)


@given(st.permutations(names), st.data())
def test_edges_without_a_cycle_all_lead_to_the_right(order: list[str], data: st.DataObject) -> None:
    forward = [(a, b) for a, b in data.draw(edges) if order.index(a) < order.index(b)]
    found = arrange(dict.fromkeys(names, Size(40, 20)), forward, gap_x=10, gap_y=5)
    assert all(found.places[a].x < found.places[b].x for a, b in forward)


def test_an_edge_over_several_columns_gets_a_row_that_touches_no_box() -> None:
    chain = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]
    found = arrange(dict.fromkeys("abcd", Size(40, 20)), chain, gap_x=10, gap_y=5)
    assert len(found.bends["a", "d"]) == 2
    for bend in found.bends["a", "d"]:
        assert not any(b.corner.x <= bend.x <= b.right and b.corner.y <= bend.y <= b.bottom for b in placed(found))


def test_a_column_that_is_asked_for_is_kept() -> None:
    found = arrange(
        {"a": Size(1, 1), "b": Size(1, 1), "end": Size(1, 1)}, [("a", "b")], gap_x=1, gap_y=1, ranks={"end": -1}
    )
    assert found.places["end"].x == pytest.approx(found.places["b"].x)


def test_the_edge_of_kv_blocks_is_drawn_with_its_relay_and_a_line_of_its_own() -> None:
    think = StageConfig(
        name="think",
        process="thinker",
        factory="m:f",
        terminal=True,
        disaggregation=Disaggregation(prefill=PrefillPlacement(process="apart")),
    )
    drawn = planning.plan(PipelineConfig(name="pair", stages=[think]))
    assert '  s1 ==>|"KV, tcp"| s0' in mermaid.render(drawn)
    picture_of_pair, picture_alone = (
        svg.render(planning.plan(PipelineConfig(name="pair", stages=[one])))
        for one in (think, StageConfig(name="think", process="thinker", factory="m:f", terminal=True))
    )
    assert "KV, tcp" in picture_of_pair and "KV blocks of prompts" in picture_of_pair
    assert "KV" not in picture_alone

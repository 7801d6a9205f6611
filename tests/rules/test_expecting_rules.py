"""The source of every edge says how it ends; so every stage ends, whoever routes, streams, skips or leaves early."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.flow.expecting import Expecting, Outlook
from stage_runtime.rules.flow.gathering import Gathering
from tests.thoroughness import examples

OPEN, NO_PAYLOAD, SKIPPED = Outlook.OPEN, Outlook.NO_PAYLOAD, Outlook.SKIPPED


def after(inputs: str, streams: str, events: list[str]) -> Expecting:
    expecting = Expecting(inputs, streams)
    for event in events:
        name, _, source = event.partition(" ")
        match name:
            case "skip":
                expecting.skip(source)
            case "ended":
                expecting.ended(source)
            case "payload":
                expecting.payload()
            case "begin":
                expecting.begin()
            case "no":
                expecting.no_payload()
    return expecting


@pytest.mark.parametrize(
    ("inputs", "streams", "events", "outlook"),
    [
        ("a", "s", [], OPEN),
        ("a", "", ["skip a"], SKIPPED),
        ("ab", "", ["skip a"], OPEN),
        ("ab", "", ["skip a", "skip b"], SKIPPED),
        ("ab", "", ["skip a", "payload", "skip b"], OPEN),
        ("a", "s", ["skip a"], OPEN),
        ("a", "s", ["skip a", "ended s"], SKIPPED),
        ("a", "st", ["skip a", "ended s"], OPEN),
        ("a", "s", ["ended s"], OPEN),
        ("a", "s", ["begin", "ended s"], OPEN),
        ("a", "s", ["begin", "skip a"], NO_PAYLOAD),
        ("a", "s", ["skip a", "begin", "ended s"], NO_PAYLOAD),
        ("a", "s", ["payload", "ended s"], OPEN),
        ("", "s", [], OPEN),
        ("", "s", ["begin"], NO_PAYLOAD),
        ("", "s", ["ended s"], SKIPPED),
        ("ab", "s", ["no payload", "ended s"], SKIPPED),
        ("ab", "s", ["no payload", "begin"], NO_PAYLOAD),
    ],
)
def test_what_may_still_come_follows_from_how_each_edge_ended(
    inputs: str, streams: str, events: list[str], outlook: Outlook
) -> None:
    assert after(inputs, streams, events).outlook is outlook


@pytest.mark.parametrize(
    ("inputs", "streams", "events", "complete"),
    [
        ("a", "", [], False),
        ("a", "", ["payload"], True),
        ("ab", "", ["payload"], True),
        ("a", "s", ["payload"], False),
        ("a", "st", ["payload", "ended s"], False),
        ("a", "st", ["payload", "ended s", "ended t"], True),
        ("a", "s", ["begin", "ended s"], False),
        ("a", "s", ["begin", "ended s", "skip a"], True),
        ("a", "s", ["begin", "ended s", "no payload"], True),
        ("", "s", ["begin"], False),
        ("", "s", ["begin", "ended s"], True),
        ("a", "s", ["skip a", "ended s"], False),
    ],
)
def test_input_is_complete_when_its_payload_and_the_ends_of_all_streams_are_here(
    inputs: str, streams: str, events: list[str], complete: bool
) -> None:
    assert after(inputs, streams, events).complete is complete


@pytest.mark.parametrize(
    ("static", "steps", "possible"),
    [
        (True, ["arrive a"], True),
        (True, ["arrive a", "skip b"], False),
        (False, ["arrive a", "skip b"], True),  # c may still say who is waited for
        (False, ["skip a", "skip b", "skip c"], False),
        (False, ["arrive a", "skip b", "arrive c"], False),  # all is known, and the hook has not said
        (False, ["arrive a", "resolve a", "skip b", "skip c"], True),
        (False, ["arrive a", "resolve ab", "skip b"], False),
        (False, ["skip b", "arrive a", "resolve ab"], False),
    ],
)
def test_a_fan_in_is_possible_while_nothing_that_it_waits_for_was_skipped(
    static: bool, steps: list[str], possible: bool
) -> None:
    gathering = Gathering("join", ("a", "b", "c"), static=static)
    for step in steps:
        name, _, what = step.partition(" ")
        match name:
            case "arrive":
                gathering.arrive(what, object())
            case "skip":
                gathering.skip(what)
            case "resolve":
                gathering.resolve(list(what))
    assert gathering.possible is possible


class Node:
    """A stage of the model: what it will do when its turn comes."""

    def __init__(self, name: int, draw: Any, later: list[int]) -> None:
        some = st.lists(st.sampled_from(later), unique=True) if later else st.just(list[int]())
        self.name = name
        self.next: list[int] = draw(some)
        self.stream_to: list[int] = draw(some)
        self.routes: list[int] = draw(st.lists(st.sampled_from(self.next), unique=True)) if self.next else []
        self.chunks: dict[int, int] = {target: draw(st.integers(0, 2)) for target in self.stream_to}
        self.explicit_ends = draw(st.lists(st.sampled_from(self.stream_to), unique=True)) if self.stream_to else []
        self.joins: bool = draw(st.booleans())
        self.leaves_early: bool = draw(st.booleans())
        self.state = "waiting"


@st.composite
def graphs(draw: Any) -> list[Node]:
    count = draw(st.integers(1, 6))
    nodes = [Node(name, draw, list(range(name + 1, count))) for name in range(count)]
    reached = {target for node in nodes for target in (*node.next, *node.stream_to)}
    nodes[0].next += sorted(set(range(1, count)) - reached)  # a spec with a stage that nothing reaches is refused
    return nodes


@pytest.mark.proves("skipped-stage")
@settings(max_examples=examples(300))
@given(graphs(), st.integers(0, 1 << 32))
def test_every_stage_ends_or_is_skipped_in_any_graph_and_any_order_of_events(nodes: list[Node], seed: int) -> None:
    order = random.Random(seed)
    inputs = {node.name: [str(one.name) for one in nodes if node.name in one.next] for node in nodes}
    streams = {node.name: [str(one.name) for one in nodes if node.name in one.stream_to] for node in nodes}
    expecting = {
        node.name: Expecting(["-1"] if node.name == 0 else inputs[node.name], streams[node.name]) for node in nodes
    }
    gathering = {
        node.name: Gathering("g", inputs[node.name], static=True)
        for node in nodes
        if node.joins and node.name and inputs[node.name]
    }
    under_way: list[tuple[int, int, str]] = [(-1, 0, "payload")]
    open_chunks: Counter[tuple[str, int]] = Counter()

    def over(node: Node, state: str) -> None:
        assert node.state == "waiting"
        node.state = state
        done = state == "done"
        for target in node.next:
            under_way.append((node.name, target, "payload" if done and target in node.routes else "skip"))
        for target in node.stream_to:
            ends = "end" if done and target in node.explicit_ends else "close"
            under_way.extend((node.name, target, "chunk") for _ in range(node.chunks[target] if done else 0))
            under_way.append((node.name, target, ends))

    while under_way:
        source, name, what = order.choice(under_way)
        if what in ("end", "close") and (source, name, "chunk") in under_way:
            what = "chunk"  # an end never overtakes a chunk: the consumer counts
        under_way.remove((source, name, what))
        node, mine = nodes[name], expecting[name]
        if node.state != "waiting":
            continue
        joined = gathering.get(name)
        match what:
            case "payload":
                if joined is not None:
                    joined.arrive(str(source), object())
                if joined is None or joined.complete:
                    mine.payload()
            case "skip":
                mine.skip(str(source))
                if joined is not None:
                    joined.skip(str(source))
            case "chunk":
                mine.begin()
            case "end" | "close":
                mine.ended(str(source))
                open_chunks[str(source), name] += 1
                if what == "end":
                    mine.begin()
        if joined is not None and not joined.possible:
            mine.no_payload()
        if mine.outlook is SKIPPED:
            over(node, "skipped")
            continue
        read = node.leaves_early or all(open_chunks[one, name] for one in streams[name])
        has_payload = mine._payload or mine.outlook is NO_PAYLOAD or node.leaves_early
        if mine.begun and read and has_payload:
            over(node, "done")
    assert {node.name for node in nodes if node.state == "waiting"} == set()

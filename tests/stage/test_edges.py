"""Edges: whether an instance is in this process is asked once, and again when the process is another one."""

from __future__ import annotations

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.stage.outputs.edges import EDGES_KEPT, ClientEdge, Edges, LocalEdge, RemoteEdge
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.messages import Message, StreamStalled
from tests.stage.stage_kit import plan


class Input:
    """The input of stage ``b``, which runs in this process."""

    def __init__(self) -> None:
        self.stalled: list[tuple[str, str, bool]] = []

    def source_stalled(self, source: str, instance: str, stalled: bool) -> None:
        self.stalled.append((source, instance, stalled))


class Channels:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, peer: str, message: Message) -> bool:
        self.sent.append((peer, message))
        return True


def not_lost(work: RequestWork, error: BaseException) -> None:
    raise AssertionError from error


def made() -> tuple[Edges, ProcessContext, Input, Channels]:
    process = ProcessContext("me")
    b, channels = Input(), Channels()
    process.inputs = {"b": b}  # type: ignore[dict-item]
    process.channels = channels  # type: ignore[assignment]
    return Edges(plan("a", next=("b", "c")), process, not_lost), process, b, channels


def test_an_instance_is_bound_once_to_this_process_or_to_another() -> None:
    edges, _, _, _ = made()
    here, there = edges.to("b", "me"), edges.to("b", "other")
    assert (type(here), type(there), type(edges.client("cc"))) == (LocalEdge, RemoteEdge, ClientEdge)
    assert edges.to("b", "me") is here
    assert edges.to("b", "other") is there
    assert type(edges.to("c", "me")) is RemoteEdge, "bound to this process, which has no such stage: never reached"
    edges.to("nobody's", "me")
    assert edges.to("nobody's", "me") is not edges.to("nobody's", "me"), "what messages name at will is not kept"


def test_under_another_incarnation_everything_is_bound_again() -> None:
    edges, process, _, _ = made()
    edges.to("b", "me")
    process.incarnation = "me again"
    edges.clear()
    assert type(edges.to("b", "me")) is RemoteEdge
    assert type(edges.to("b", "me again")) is LocalEdge


def test_instances_that_come_and_go_are_forgotten() -> None:
    edges, _, _, _ = made()
    first = edges.to("b", "other")
    for number in range(EDGES_KEPT):
        edges.to("b", f"instance {number}")
    assert edges.to("b", "other") is not first


def test_that_a_stage_waits_for_its_target_is_reported_where_the_target_is() -> None:
    edges, _, b, channels = made()
    edges.stalled("b", "me", True)
    edges.stalled("b", "other", True)
    edges.stalled(COORDINATOR, "cc", False)
    assert b.stalled == [("a", "me", True)]
    assert channels.sent == [("other", StreamStalled("a", "b", True)), ("cc", StreamStalled("a", COORDINATOR, False))]

"""Ranks 1.. of a TP stage: rank 0's steps in order, and nothing begun twice."""

from __future__ import annotations

from typing import Any

from stage_runtime.engines import events
from stage_runtime.relays import payloads
from stage_runtime.relays.fetching import Fetched
from stage_runtime.stage.tensor_parallel import Follower, FollowerInbox
from stage_runtime.wire.messages import Body, RankWork
from stage_runtime.wire.values import OmniRequest


def step(follower: Follower, index: int, kind: str, fields: dict[str, Any] | None = None) -> None:
    if fields is None:
        follower.work(RankWork(index, kind, "r1"), None)
        return
    extracted = payloads.extract(fields, where="payload", as_fields=True)
    body = Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())
    follower.work(RankWork(index, kind, "r1", body), Fetched(body, None))


def start(follower: Follower, index: int) -> None:
    step(follower, index, "start", {"request": OmniRequest(id="r1"), "data": index})


def chunk(follower: Follower, index: int) -> None:
    fields = {"data": index, "modality": None, "metadata": None, "source": "s", "index": 0, "request": None}
    step(follower, index, "chunk", fields)


def test_steps_that_overtake_each_other_are_followed_in_rank_0s_order() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    step(follower, 1, "nothing")
    assert len(inbox) == 0
    start(follower, 0)
    first, second = inbox.get(), inbox.get(timeout=0.0)
    assert isinstance(first, events.Start) and first.payload.data == 0
    assert second is None  # as rank 0 saw nothing within its timeout


def test_a_chunk_after_this_rank_is_through_belongs_to_the_work_that_is_over() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    start(follower, 0)
    begun = inbox.get()
    assert isinstance(begun, events.Start)
    follower.over("r1")
    chunk(follower, 1)
    late = inbox.get()
    assert isinstance(late, events.ChunkIn)
    assert late.work is begun.work and late.work.over


def test_the_same_id_begins_anew_after_it_was_over() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    start(follower, 0)
    first = inbox.get()
    follower.over("r1")
    start(follower, 1)
    second = inbox.get()
    assert isinstance(first, events.Start) and isinstance(second, events.Start)
    assert second.work is not first.work and not second.work.over

"""Ranks 1.. of a TP stage: rank 0's steps in order, and nothing begun twice."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.engines import events
from stage_runtime.payloads import encoding
from stage_runtime.stage.ranks.rank_following import REMEMBERED, Follower, FollowerInbox
from stage_runtime.stage.ranks.tensor_parallel import WorkKey
from stage_runtime.transfers.receiving import Fetched
from stage_runtime.wire.messages import RankWork
from stage_runtime.wire.parts import Body
from stage_runtime.wire.values import OmniRequest

KEY = WorkKey("cc", "r1", 1)


def step(
    follower: Follower, index: int, kind: str, fields: dict[str, Any] | None = None, *, key: WorkKey = KEY
) -> None:
    whose = (key.request_id, key.owner, key.attempt)
    if fields is None:
        follower.work(RankWork(index, kind, *whose), None)
        return
    extracted = encoding.extract(fields, where="payload", as_fields=True)
    body = Body(extracted.value_bytes, tuple(extracted.refs), extracted.flat())
    follower.work(RankWork(index, kind, *whose, body), Fetched(body, None))


def start(follower: Follower, index: int, key: WorkKey = KEY) -> None:
    step(follower, index, "start", {"request": OmniRequest(id=key.request_id), "data": index}, key=key)


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
    begun.work.over = True
    chunk(follower, 1)
    late = inbox.get()
    assert isinstance(late, events.ChunkIn)
    assert late.work is begun.work and late.work.over


def test_the_next_attempt_begins_anew() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    start(follower, 0)
    first = inbox.get()
    assert isinstance(first, events.Start)
    first.work.over = True
    start(follower, 1, KEY._replace(attempt=2))
    second = inbox.get()
    assert isinstance(first, events.Start) and isinstance(second, events.Start)
    assert second.work is not first.work and not second.work.over


def test_a_request_under_way_is_known_however_many_others_come_and_end_meanwhile() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    start(follower, 0)
    long = inbox.get()
    assert isinstance(long, events.Start)
    for index in range(1, REMEMBERED + 2):
        start(follower, index, KEY._replace(attempt=index + 1))
        short = inbox.get()
        assert isinstance(short, events.Start)
        short.work.over = True
    step(follower, REMEMBERED + 2, "abort")
    aborted = inbox.get()
    assert isinstance(aborted, events.Abort)
    assert aborted.work is long.work  # the engine would go on with one that it does not know


@pytest.mark.proves("same-request-id")
def test_two_coordinators_requests_of_one_id_are_two_requests_at_a_follower() -> None:
    inbox = FollowerInbox()
    follower = Follower(inbox)
    theirs = KEY._replace(owner="dd")
    start(follower, 0)
    start(follower, 1, theirs)
    step(follower, 2, "abort")
    first, second, aborted = inbox.get(), inbox.get(), inbox.get()
    assert isinstance(first, events.Start) and isinstance(second, events.Start) and isinstance(aborted, events.Abort)
    assert second.work is not first.work
    assert aborted.work is first.work

"""Notifications to instances: each of them fits into its message."""

from __future__ import annotations

import asyncio

from stage_runtime.coordinator.ending.notifications import EndedNotifier
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Ended, Message
from stage_runtime.wire.parts import ID_LIMIT
from tests.patience import patience


async def test_every_instance_is_told_of_all_requests_that_end_within_a_tick_however_many_they_are() -> None:
    told: dict[str, list[str]] = {"aa": [], "bb": []}
    complete = asyncio.Event()
    ids = [f"{number:0{ID_LIMIT}}" for number in range(10_000)]  # 1.3 MB: more than a frame may have

    def send(instance: str, message: Message) -> bool:
        codec.check(message)
        assert isinstance(message, Ended)
        told[instance] += [request_id for request_id, _ in message.requests]
        if all(len(each) == len(ids) for each in told.values()):
            complete.set()
        return True

    notifier = EndedNotifier(asyncio.get_running_loop(), send)
    for request_id in ids:
        notifier.add(("aa", "bb"), request_id, 1)
    await asyncio.wait_for(complete.wait(), patience(10))
    assert told == {"aa": ids, "bb": ids}

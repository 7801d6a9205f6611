"""A process has several coordinators: how often it beats, and by which of them first frames may go."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator

import pytest

from benchmarks.scalelab.fakes import GROUPS, LightInstance
from stage_runtime.wire.messages import Members, Welcome
from stage_runtime.wire.parts import Member


@pytest.fixture
async def instance() -> AsyncIterator[LightInstance]:
    with tempfile.TemporaryDirectory(prefix="omni") as folder:
        made = LightInstance(GROUPS[0], "one", folder=folder, coordinators=(), loop=asyncio.get_running_loop())
        yield made
        await made.close()


def welcome(instance: LightInstance, coordinator: str, beat_s: float) -> None:
    via = f"ipc:///none/{coordinator}"
    instance.channels.connect("", via)
    me = Member(coordinator, "coordinator", "", "", via, {}, ())
    message = Welcome(f"{via}.publish", me, via, beat_s)
    assert instance.introduced(coordinator, message)
    instance.received(coordinator, message)


async def test_a_process_beats_as_rarely_as_any_of_its_coordinators_asks_for(instance: LightInstance) -> None:
    welcome(instance, "old", 16.0)
    welcome(instance, "new", 0.0)
    assert instance.beat_s == 16.0, "the one that knows few members yet does not speak for the other"
    instance.received("new", Members(beat_s=4.0))
    assert instance.beat_s == 16.0
    instance.received("old", Members(beat_s=2.0))
    assert instance.beat_s == 4.0
    instance.received("new", Members(gone=("somebody",)))
    assert instance.beat_s == 4.0, "it said nothing of beats"


async def test_what_a_coordinator_asked_for_is_forgotten_with_it(instance: LightInstance) -> None:
    welcome(instance, "old", 16.0)
    welcome(instance, "new", 2.0)
    instance.lost("old")
    assert instance.beat_s == 2.0
    instance.received("old", Members(beat_s=16.0))
    assert instance.beat_s == 2.0, "it is not a coordinator of this process now"
    instance.lost("new")
    assert instance.beat_s == 0.0


async def test_first_frames_may_go_by_any_coordinator_that_is_known(instance: LightInstance) -> None:
    for coordinator in ("old", "new", "newest"):
        welcome(instance, coordinator, 0.0)
    assert list(instance.channels.detours()) == ["old", "new", "newest"]
    instance.lost("old")
    assert list(instance.channels.detours()) == ["new", "newest"]

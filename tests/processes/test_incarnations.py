"""The life of a stage process: incarnations one after the other, and draining."""

from __future__ import annotations

import asyncio
import contextlib

from stage_runtime.processes.stages.draining import StageDrain
from stage_runtime.processes.stages.incarnations import Incarnations


async def test_a_fenced_process_closes_its_planes_and_goes_on_as_somebody_else_until_the_end() -> None:
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    lives = Incarnations(over)
    first = lives.current
    events: list[str] = []

    def begin(stack: contextlib.AsyncExitStack) -> None:
        name = "first" if lives.current == first else "second"
        events.append(f"{name} opens")
        stack.callback(events.append, f"{name} closes")
        asyncio.get_running_loop().call_soon(lives.fence if name == "first" else lambda: over.set_result(0))

    await lives.run(begin, lambda incarnation: events.append(f"renewed: {incarnation != first}"))
    assert events == ["first opens", "first closes", "renewed: True", "second opens", "second closes"]


async def test_what_was_fenced_twice_is_renewed_once() -> None:
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    lives = Incarnations(over)
    renewed = 0

    def begin(_: contextlib.AsyncExitStack) -> None:
        if renewed == 0:
            lives.fence()
            lives.fence()
        else:
            asyncio.get_running_loop().call_soon(over.set_result, 0)

    def renew(_: str) -> None:
        nonlocal renewed
        renewed += 1

    await lives.run(begin, renew)
    assert renewed == 1


async def test_draining_ends_when_every_coordinator_has_nothing_bound_here_and_nothing_is_left_to_send() -> None:
    drain = StageDrain()
    coordinators, idle = {"c1", "c2"}, False
    drain.unbound("c1")
    draining = asyncio.create_task(drain.run(coordinators=lambda: coordinators, idle=lambda: idle, most_s=60))
    await asyncio.sleep(0)
    drain.unbound("c2")
    assert not draining.done(), "something is left to send"
    idle = True
    async with asyncio.timeout(10):
        await draining


async def test_what_was_unbound_from_the_incarnation_before_says_nothing_of_this_one() -> None:
    drain = StageDrain()
    drain.unbound("c1")
    drain.reset()
    questions = 0

    def idle() -> bool:
        nonlocal questions
        questions += 1
        return True

    await drain.run(coordinators=lambda: {"c1"}, idle=idle, most_s=0.01)
    assert questions == 0, "c1 may have bound something to it"

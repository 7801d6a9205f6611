"""DELETE at the coordinator that does not own the request: the other one aborts it, through an instance."""

from __future__ import annotations

import asyncio

import pytest

from stage_runtime.wire.messages import ForwardAbort, ForwardAbortReply
from tests.coordinator.manager_kit import ME, CoordinatorHarness, coordinator_harness, error_of, new_request


def questions(made: CoordinatorHarness, incarnation: str) -> list[ForwardAbort]:
    return [one for one in made.channels.sent[incarnation] if isinstance(one, ForwardAbort)]


async def caller(made: CoordinatorHarness, request_id: str = "theirs") -> asyncio.Task[bool]:
    task = asyncio.create_task(made.manager.forward_abort(request_id, "DELETE"))
    await asyncio.sleep(0)
    return task


async def test_an_abort_that_another_coordinator_passes_on_ends_the_request_and_says_so() -> None:
    async with coordinator_harness() as made:
        handle = made.manager.admit(new_request("mine"))
        made.coordinator.received("f1", ForwardAbort("mine", "other", "DELETE"))
        assert made.channels.sent["f1"][-1] == ForwardAbortReply("mine", "other", True)
        assert (await error_of(handle)).code == "cancelled"
        made.coordinator.received("v1", ForwardAbort("mine", "other", "DELETE"))
        assert made.channels.sent["v1"][-1] == ForwardAbortReply("mine", "other", False), "once"


async def test_every_instance_is_asked_and_the_owner_s_yes_is_enough() -> None:
    async with coordinator_harness() as made:
        answer = await caller(made)
        assert questions(made, "f1") == questions(made, "v1") == [ForwardAbort("theirs", ME, "DELETE")]
        made.coordinator.received("v1", ForwardAbortReply("theirs", ME, True, 1))
        assert await asyncio.wait_for(answer, 60)


@pytest.mark.parametrize("request_id", ["x" * 129, "", "\udc80"], ids=["long", "empty", "surrogate"])
async def test_an_id_that_no_request_can_have_is_asked_of_nobody(request_id: str) -> None:
    async with coordinator_harness() as made:
        assert not await made.manager.forward_abort(request_id, "DELETE")
        assert questions(made, "f1") == questions(made, "v1") == []


async def test_a_caller_that_goes_away_leaves_the_question_to_those_that_ask_the_same() -> None:
    async with coordinator_harness() as made:
        gone, again = await caller(made), await caller(made)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        made.coordinator.received("v1", ForwardAbortReply("theirs", ME, True, 1))
        assert await asyncio.wait_for(again, 60)
        await caller(made)
        assert len(questions(made, "f1")) == 2, "nobody asks any more, so the next one is asked anew"


async def test_no_is_known_as_soon_as_everybody_has_answered_or_is_gone() -> None:
    async with coordinator_harness() as made:
        answer = await caller(made)
        again = await caller(made)
        assert len(questions(made, "f1")) == 1, "one question for two who ask the same"
        made.coordinator.received("f1", ForwardAbortReply("theirs", ME, False, 0))
        await asyncio.sleep(0)
        assert not answer.done()
        made.coordinator.lost("v1")
        assert list(await asyncio.gather(answer, again)) == [False, False]

"""Instances that come after an adapter was loaded or dropped: what a coordinator gives them first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stage_runtime.coordinator.questions.adapters import AdapterChanges
from stage_runtime.coordinator.questions.stage_operations import OperationResult, OperationResults
from stage_runtime.errors import RequestError
from stage_runtime.rules.members.adapters import MOST_CHANGES
from stage_runtime.wire.messages import AdminCall, AdminReply, Ready
from tests.coordinator.manager_kit import CoordinatorHarness, coordinator_harness
from tests.patience import patience

PATIENCE_S = patience(60.0)


def calls(made: CoordinatorHarness, instance: str) -> list[AdminCall]:
    return [one for one in made.channels.sent[instance] if isinstance(one, AdminCall)]


async def answered(
    made: CoordinatorHarness, instance: str, number: int, value: Any, error: str | None = None
) -> AdminCall:
    """The instance's call of this number, once it has come, and its answer to it."""
    async with asyncio.timeout(PATIENCE_S):
        while len(calls(made, instance)) <= number:
            await asyncio.sleep(0)
    call = calls(made, instance)[number]
    made.coordinator.received(instance, AdminReply(call.call_id, call.stage, 0, value, error))
    return call


async def operate(made: CoordinatorHarness, number: int, operation: str, **arguments: str) -> None:
    """An operator's, which the first instance carries out."""
    asked = made.coordinator.operations.ask(operation, ["split"], arguments, timeout_s=PATIENCE_S)
    await asyncio.gather(asked, answered(made, "f1", number, []))


def ready(made: CoordinatorHarness) -> list[str]:
    return sorted(name for name, one in made.membership.state.instances.items() if one.ready)


async def test_an_instance_that_comes_later_is_given_adapters_before_it_takes_requests() -> None:
    async with coordinator_harness() as made:
        await operate(made, 0, "load_adapter", name="sql", path="/a/sql")
        await operate(made, 1, "load_adapter", name="tone", path="/a/tone")
        await operate(made, 2, "unload_adapter", name="sql")
        await operate(made, 3, "reset_prefix_cache")
        made.join("f2", "front")
        made.join("v2", "voice")  # of other stages: it is given nothing
        assert ready(made) == ["f1", "v1", "v2"] and calls(made, "v2") == []
        first = await answered(made, "f2", 0, ["tone"])
        assert (first.operation, first.arguments) == ("load_adapter", {"name": "tone", "path": "/a/tone"})
        assert ready(made) == ["f1", "v1", "v2"]
        second = await answered(made, "f2", 1, None, "unload_adapter: no adapter 'sql'")
        assert (second.operation, second.arguments) == ("unload_adapter", {"name": "sql"})
        async with asyncio.timeout(PATIENCE_S):
            while "f2" not in ready(made):
                await asyncio.sleep(0)
        assert len(calls(made, "f2")) == 2 and len(calls(made, "f1")) == 4


async def test_an_instance_that_ends_while_it_is_given_adapters_takes_no_requests() -> None:
    async with coordinator_harness() as made:
        await operate(made, 0, "load_adapter", name="sql", path="/a/sql")
        made.join("f2", "front")
        async with asyncio.timeout(PATIENCE_S):
            while not calls(made, "f2"):
                await asyncio.sleep(0)
        made.coordinator.lost("f2")
        await asyncio.gather(*made.coordinator._tasks)
        assert ready(made) == ["f1", "v1"]


async def test_what_no_engine_has_carried_out_is_not_remembered_and_the_oldest_is_forgotten() -> None:
    async with coordinator_harness() as made:
        changes = AdapterChanges(made.coordinator.operations)

        def note(name: Any, error: str | None = None) -> None:
            one = OperationResult(stage="split", group="front", instance="f1", error=error)
            changes.note(OperationResults(operation="load_adapter", failed=0, results=[one]), {"name": name})

        note("sql", error="no such folder")
        note(7)
        assert not changes.due(["split"])
        for number in range(MOST_CHANGES + 1):
            note(f"a{number}")
        assert list(changes._changes["split"]) == [f"a{number}" for number in range(1, MOST_CHANGES + 1)]
        assert changes.due(["shout", "split"]) and not changes.due(["shout"])


async def test_an_instance_that_never_answers_is_waited_for_once_and_not_for_each_adapter() -> None:
    async with coordinator_harness() as made:
        now, waited = [100.0], []
        changes = AdapterChanges(made.coordinator.operations, within_s=60.0, clock=lambda: now[0])
        for name in ("sql", "tone", "law"):
            one = OperationResult(stage="split", group="front", instance="f1")
            changes.note(OperationResults(operation="load_adapter", failed=0, results=[one]), {"name": name})

        async def silent(*_arguments: Any, timeout_s: float, **_options: Any) -> OperationResults:
            waited.append(timeout_s)
            now[0] += min(timeout_s, 45.0)
            one = OperationResult(stage="split", group="front", instance="f2", error="no answer")
            return OperationResults(operation="load_adapter", failed=1, results=[one])

        made.coordinator.operations.ask = silent  # type: ignore[method-assign]
        await changes.give("f2", ["split"])
        assert waited == [60.0, 15.0, 0.0]


async def test_an_adapter_that_one_instance_refuses_is_dropped_by_the_others() -> None:
    async with coordinator_harness() as made:
        made.join("f2", "front")
        adapters = made.coordinator.adapters
        loading = asyncio.create_task(adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
        for name in ("f1", "f2"):
            assert (await answered(made, name, 0, {})).operation == "list_adapters"
        for number in range(2):
            await answered(made, "v1", number, None, "this stage takes no operations")
        with pytest.raises(RequestError) as other:
            await adapters.unload("sql", timeout_s=PATIENCE_S)
        assert (other.value.code, other.value.message) == (
            "duplicate_request",
            "the adapter 'sql' is being loaded or unloaded",
        )
        await answered(made, "f1", 1, ["sql"])
        await answered(made, "f2", 1, None, "load_adapter: /a/sql: this folder does not exist")
        dropped = await answered(made, "f1", 2, [])
        assert (dropped.operation, dropped.arguments) == ("unload_adapter", {"name": "sql"})
        with pytest.raises(RequestError) as failed:
            await loading
        assert (failed.value.code, failed.value.param) == ("not_found", "lora_path")
        assert len(calls(made, "f2")) == 2 and not adapters.due(["split"])


async def test_adapters_are_refused_while_there_is_no_instance_that_takes_them() -> None:
    async with coordinator_harness() as made:
        adapters = made.coordinator.adapters
        loading = asyncio.create_task(adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
        for instance, number in (("f1", 0), ("v1", 0), ("v1", 1)):
            await answered(made, instance, number, None, "this stage takes no adapters")
        with pytest.raises(RequestError) as none:
            await loading
        assert none.value.code == "not_found"
        made.coordinator.lost("f1")
        made.coordinator.lost("v1")
        with pytest.raises(RequestError) as gone:
            await adapters.unload("sql", timeout_s=PATIENCE_S)
        assert gone.value.code == "unavailable"


AWAY = pytest.mark.parametrize(
    "error",
    [
        "EngineDeadError: engine 0 has ended",
        "the engine crashed: EngineDeadError: gone",
        "RequestError: load_adapter: engines are being started or ended",
    ],
)


@AWAY
async def test_nothing_is_loaded_while_an_engine_cannot_say_what_it_has(error: str) -> None:
    async with coordinator_harness() as made:
        made.join("f2", "front")
        loading = asyncio.create_task(made.coordinator.adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
        await answered(made, "f1", 0, {})
        await answered(made, "f2", 0, None, error)
        for number in range(2):
            await answered(made, "v1", number, None, "this stage takes no operations")
        with pytest.raises(RequestError) as away:
            await loading
        assert (away.value.code, away.value.message) == ("unavailable", f"stage split: {error}")
        assert len(calls(made, "f1")) == 1 and not made.coordinator.adapters.due(["split"])


@AWAY
async def test_an_engine_that_ends_while_it_loads_or_drops_is_not_the_clients_fault(error: str) -> None:
    async with coordinator_harness() as made:
        adapters, second = made.coordinator.adapters, 0
        for change in (
            adapters.load("two", "/a/two", timeout_s=PATIENCE_S),
            adapters.unload("sql", timeout_s=PATIENCE_S),
        ):
            changing = asyncio.create_task(change)
            await answered(made, "f1", second, {"sql": "/a/sql"})
            for number in (second, second + 1):
                await answered(made, "v1", number, None, "this stage takes no operations")
            await answered(made, "f1", second + 1, None, error)
            with pytest.raises(RequestError) as away:
                await changing
            assert (away.value.code, away.value.message) == ("unavailable", error)
            second += 2


async def test_only_instances_that_lack_an_adapter_are_asked_to_load_it() -> None:
    async with coordinator_harness() as made:
        made.join("f2", "front")
        adapters = made.coordinator.adapters
        loading = asyncio.create_task(adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
        await answered(made, "f1", 0, {"sql": "/a/sql"})
        await answered(made, "f2", 0, {})
        for number in range(2):
            await answered(made, "v1", number, None, "this stage takes no operations")
        asked = await answered(made, "f2", 1, ["sql"])
        assert (asked.operation, asked.arguments) == ("load_adapter", {"name": "sql", "path": "/a/sql"})
        await loading
        assert len(calls(made, "f1")) == 1 and adapters.due(["split"])


HELD: dict[str, dict[str, str | None]] = {"split": {"sql": "/a/sql", "old": None}, "elsewhere": {"x": "/x"}}


async def test_a_coordinator_learns_adapters_from_instances_and_gives_them_to_those_without() -> None:
    async with coordinator_harness() as made:
        assert made.hello("f2", "front")
        made.coordinator.received("f2", Ready(HELD))
        given = await answered(made, "f1", 0, ["sql"])  # it was ready before, and had not reported any
        assert (given.operation, given.arguments) == ("load_adapter", {"name": "sql", "path": "/a/sql"})
        async with asyncio.timeout(PATIENCE_S):
            while len(calls(made, "f1")) < 2:
                await asyncio.sleep(0)
        assert calls(made, "f1")[1].operation == "unload_adapter"
        assert "f2" in ready(made) and calls(made, "f2") == [] and calls(made, "v1") == []


async def test_an_adapter_is_given_on_after_all_that_reported_it_are_gone() -> None:
    async with coordinator_harness() as made:
        made.coordinator.received("f1", Ready({}))
        made.coordinator.received("f1", Ready({"split": {"sql": "/a/sql"}}))  # another coordinator had it load
        made.coordinator.lost("f1")
        made.join("f2", "front")
        assert (await answered(made, "f2", 0, ["sql"])).arguments == {"name": "sql", "path": "/a/sql"}


async def test_what_another_coordinator_has_dropped_is_not_given_on() -> None:
    async with coordinator_harness() as made:
        await operate(made, 0, "load_adapter", name="sql", path="/a/sql")
        made.coordinator.received("f1", Ready({"split": {"sql": "/a/sql"}}))
        made.coordinator.received("f1", Ready({"split": {"sql": None}}))
        made.join("f2", "front")
        assert (await answered(made, "f2", 0, None, "no adapter 'sql'")).operation == "unload_adapter"
        assert len(calls(made, "f1")) == 1


@pytest.mark.parametrize("again", [False, True], ids=["alone", "while it is loaded again"])
async def test_an_adapter_that_loads_after_its_client_was_told_that_it_failed_is_dropped(again: bool) -> None:
    async with coordinator_harness() as made:
        adapters, operations = made.coordinator.adapters, made.coordinator.operations
        ask = operations.ask

        async def impatient(operation: str, stages: Any, arguments: Any, **options: Any) -> OperationResults:
            return await ask(operation, stages, arguments, **{**options, "timeout_s": LISTED[operation]})

        operations.ask = impatient  # type: ignore[method-assign]
        loading = asyncio.create_task(adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
        await answered(made, "f1", 0, {})
        for number in range(2):
            await answered(made, "v1", number, None, "this stage takes no operations")
        with pytest.raises(RequestError, match="no answer within 0 s") as failed:
            await loading
        assert failed.value.code == "unavailable"
        if again:
            loading = asyncio.create_task(adapters.load("sql", "/a/sql", timeout_s=PATIENCE_S))
            await asyncio.sleep(0)
        await answered(made, "f1", 1, ["sql"])
        made.coordinator.received("f1", Ready({"split": {"sql": "/a/sql"}}))
        if again:
            await answered(made, "f1", 2, {})
            for number in range(2, 4):
                await answered(made, "v1", number, None, "this stage takes no operations")
            await asyncio.gather(loading, return_exceptions=True)
        dropped = calls(made, "f1")[-1]
        assert (dropped.operation, dropped.arguments) == ("unload_adapter", {"name": "sql"})
        made.coordinator.received("f1", Ready({"split": {"sql": None}}))
        made.join("f2", "front")
        async with asyncio.timeout(PATIENCE_S):
            while not calls(made, "f2"):
                await asyncio.sleep(0)
        assert calls(made, "f2")[0].operation == "unload_adapter"


LISTED = {"list_adapters": PATIENCE_S, "load_adapter": 0.0, "unload_adapter": PATIENCE_S}


async def test_an_answer_that_comes_late_is_told_once_and_none_of_an_instance_that_is_gone_or_failed() -> None:
    async with coordinator_harness() as made:
        operations, told = made.coordinator.operations, []
        made.join("f2", "front")
        for _ in range(2):
            await operations.ask("x", ["split"], {}, timeout_s=0.0, late=lambda *one: told.append(one))
        for call in calls(made, "f1"):
            error = None if call is calls(made, "f1")[0] else "it failed"
            for _ in range(2):
                made.coordinator.received("f1", AdminReply(call.call_id, call.stage, 0, [], error))
        made.coordinator.lost("f2")
        for call in calls(made, "f2"):
            made.coordinator.received("f2", AdminReply(call.call_id, call.stage, 0, [], None))
        assert told == [("f1", "split")]
        assert not operations._late

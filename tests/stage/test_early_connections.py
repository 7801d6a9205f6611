"""When a stage process begins to connect the relay to an instance that it will send to."""

from __future__ import annotations

import pytest

import stage_runtime as omni
from stage_runtime.wire.messages import Members
from stage_runtime.wire.parts import Member
from tests.stage.stage_kit import OWNER, plan, world


def members(name: str) -> Members:
    return Members(joined=(Member(name, "b", "b", "1", f"ipc:///{name}", {}, ("b",)),))


@pytest.mark.proves("first-large-payload")
@pytest.mark.parametrize(("nbytes", "prepared"), [(120_000, ["pc"]), (10, [])])
async def test_a_new_instance_is_connected_to_when_it_is_met_where_payloads_went_by_relay(
    nbytes: int, prepared: list[str]
) -> None:
    def bulk(payload: omni.StagePayload) -> bytes:
        return b"x" * nbytes

    def length(payload: omni.StagePayload) -> int:
        return len(payload.data)

    async with world() as made:
        for name in ("pb", "pc"):
            made.process(name, [plan("b", terminal=True, inputs_from=("a",))], {"b": length})
        made.process("pa", [plan("a", next=("b",))], {"a": bulk})
        made.stage_of["b"] = "pb"
        made.send(OWNER, "pa", members("pb"))
        await made.settle()
        made.submit("one", "a")
        await made.until(lambda: made.results() == {"one": nbytes})
        assert made.relays["pa"].prepared == [], "how large the payloads are was not known"
        made.send(OWNER, "pa", members("pc"))
        await made.settle()
        assert made.relays["pa"].prepared == prepared
        assert made.relays["pc"].prepared == [], "it sends nothing to its source"

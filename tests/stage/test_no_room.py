"""A stage process at a limit: coordinators hear of each link that it cannot make, and the log of the limit once."""

from __future__ import annotations

from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.wire.messages import Members, PeerUnreachable
from stage_runtime.wire.parts import Member
from tests.stage.stage_kit import OWNER, plan, world


def length(payload: omni.StagePayload) -> int:
    return len(payload.data)


async def test_a_limit_is_logged_once_until_there_is_room_again(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as made:
        host = made.process("pa", [plan("a", next=("b",))], {"a": length})
        channels: Any = host.process.channels

        async def meet(*names: str) -> None:
            members = (Member(name, "b", "b", "1", f"ipc:///{name}", {}, ("b",)) for name in names)
            made.send(OWNER, "pa", Members(joined=tuple(members)))
            await made.settle()

        channels.full = "no descriptor is left: raise the hard limit"
        await meet("p1", "p2")
        await meet("p3")
        assert [one.peer for one in made.received if isinstance(one, PeerUnreachable)] == ["p1", "p2", "p3"]
        assert host.process.counters["limits"] == 3
        lines = [one for one in caplog.messages if "raise the hard limit" in one]
        assert len(lines) == 1 and "p1" in lines[0]

        channels.full = ""
        await meet("p4")
        channels.full = "no descriptor is left: raise the hard limit"
        await meet("p5")
        assert "p5" in caplog.messages[-1]

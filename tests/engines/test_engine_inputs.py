"""The input thread of an engine process reads messages here without sockets and threads."""

from __future__ import annotations

import msgspec

from stage_runtime.engines.autoregressive.core.busy_loop import RequestType
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.engine_messages import AddHeader, EngineCoreRequestType, Refused
from stage_runtime.engines.autoregressive.process.inputs import Inputs
from stage_runtime.engines.autoregressive.process.serial import MsgpackEncoder
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from tests.engines.counting_core import counting


def add(name: str, wave: int = 0) -> list[memoryview]:
    request = EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())
    header = msgspec.msgpack.encode(AddHeader(name, 0, wave))
    return [memoryview(frame) for frame in (EngineCoreRequestType.ADD.value, header, *MsgpackEncoder().encode(request))]


def inputs() -> tuple[Inputs, list[Refused]]:
    refused: list[Refused] = []
    made = Inputs(
        counting().core,
        refuse=lambda client, one: refused.append(one),
        answer=lambda client, output: None,
        utilities=lambda name: None,
        clients=1,
    )
    return made, refused


def test_a_request_s_wave_is_looked_at_when_the_loop_takes_the_request_and_not_before() -> None:
    made, refused = inputs()
    waves: list[int] = []
    made.on_wave = waves.append
    made.take(add("a", 3))
    made.take(add("b", 4))
    assert waves == []
    taken = []
    while (item := made.get(block=False)) is not None:  # nothing can come between a wave and its request
        assert item[0] is RequestType.ADD
        taken.append((item[1][0].request_id, list(waves)))
    assert taken == [("a", [3]), ("b", [3, 4])]
    assert refused == []

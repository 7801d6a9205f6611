"""``python -m tests.engines.front_end ENDED KIND ADDRESS``: a front end of engines that another process has started.

It asks for three tokens and prints them, asks for 5,000 slow ones, prints ``waiting`` when the first has come, and
waits to be killed; or, with ENDED ``close``, ends by itself. KIND: of client. ADDRESS: what it must know, as digits.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import Coordination, FrontEnd
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from tests.engines.counting_core import LAUNCHED

LAUNCH = EngineLaunch(factory=LAUNCHED, kwargs={"step_s": 0.02})


def ask(name: str, count: int) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams(max_tokens=count))


async def made(kind: str, address: bytes) -> AsyncMPClient:
    if kind == "own engine":
        coordination = msgspec.msgpack.decode(address, type=Coordination)
        return await DPAsyncMPClient.start(LAUNCH, coordination=coordination, ranks=(1,))
    joins = msgspec.msgpack.decode(address, type=FrontEnd)
    one: Any = DPLBAsyncMPClient if kind == "all engines" else AsyncMPClient
    client: AsyncMPClient = await one.start(EngineLaunch(factory=""), joins=joins)
    return client


async def main(ended: str, kind: str, address: str) -> None:
    async with await made(kind, bytes.fromhex(address)) as client:
        await client.add_request_async(ask("theirs", 3))
        tokens: list[int] = []
        while len(tokens) < 3:
            tokens += [token for one in (await client.get_output_async()).outputs for token in one.new_token_ids]
        print(tokens, flush=True)
        if ended == "close":
            return
        await client.add_request_async(ask("long", 5000))
        while not (await client.get_output_async()).outputs:
            pass
        print("waiting", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Every client of an engine does these alike, wherever the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stage_runtime.engines.autoregressive.clients.abstract import UtilityFailed
from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.inproc import InprocClient
from stage_runtime.engines.autoregressive.clients.making import make_client
from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.process.messages.engine_messages import EngineCoreOutputs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import Extension
from stage_runtime.errors import RequestError
from stage_runtime.rules.autoregressive.requests import Hold
from tests.engines.counting_core import LAUNCHED

PATIENCE_S = 100.0
LAUNCH = EngineLaunch(factory=LAUNCHED, kwargs={"step_s": 0.005})  # no request ends before it is aborted


def ask(name: str, first: int = 1, count: int = 3, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[first] * 32, params=SamplingParams(max_tokens=count), **fields
    )


class Blocking:
    """A client of a program without an event loop, by the names of the others."""

    def __init__(self, client: InprocClient | SyncMPClient) -> None:
        self.client = client

    @property
    def reqs_in_flight(self) -> dict[str, int]:
        return self.client.reqs_in_flight

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.client.add_request(request)

    async def extend_request_async(self, name: str, more: Extension) -> None:
        self.client.extend_request(name, more)

    async def release_requests_async(self, names: list[str]) -> None:
        self.client.release_requests(names)

    async def abort_requests_async(self, names: list[str]) -> None:
        self.client.abort_requests(names)

    async def get_output_async(self) -> EngineCoreOutputs:
        return self.client.get_output(PATIENCE_S)

    async def call_each_async(self, method: str) -> list[Any]:
        return [self.client.call_utility(method, timeout_s=PATIENCE_S)]

    async def close(self) -> None:
        self.client.close()


def attached(client: AsyncMPClient) -> AsyncMPClient:
    client.attach()
    return client


CLIENTS: dict[str, Callable[[], Any]] = {
    "in this process": lambda: Blocking(InprocClient(LAUNCH)),
    "without an event loop": lambda: Blocking(SyncMPClient(LAUNCH)),
    "one engine": lambda: attached(make_client(LAUNCH)),
    "two engines": lambda: attached(make_client(LAUNCH, engines=2)),
}


async def ends(client: Any, *names: str) -> dict[str, list[int] | str]:
    """The tokens of each request, or the code with which it was refused."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    over: dict[str, list[int] | str] = {}
    while over.keys() < set(names):
        given = await client.get_output_async()
        for output in given.outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish is not None:
                over[output.request_id] = tokens[output.request_id]
        over.update({one.request_id: one.code for one in given.refused})
    return over


@pytest.mark.parametrize("kind", CLIENTS)
async def test_every_client_keeps_the_contract_of_clients(kind: str) -> None:
    client = CLIENTS[kind]()
    try:
        for name, first in (("a", 5), ("unknown token", 5000)):
            await client.add_request_async(ask(name, first))
        assert await ends(client, "a", "unknown token") == {"a": [6, 7, 8], "unknown token": "invalid_request"}

        await client.add_request_async(ask("twice", hold=Hold.REMOTE_KV))
        with pytest.raises(RequestError) as refused:
            await client.add_request_async(ask("twice"))
        assert refused.value.code == "duplicate_request"
        await client.release_requests_async(["twice", "never seen"])
        assert await ends(client, "twice") == {"twice": [2, 3, 4]}

        await client.add_request_async(ask("open", open=True))
        await client.extend_request_async("open", Extension(prompt_token_ids=[9], last=True))
        await client.extend_request_async("never seen", Extension(last=True))
        assert await ends(client, "open") == {"open": [10, 11, 12]}

        await client.add_request_async(ask("aborted", count=400))
        for names in (["aborted"], ["aborted", "never seen"]):
            await client.abort_requests_async(names)
        assert client.reqs_in_flight == {}
        await client.add_request_async(ask("after"))
        tokens: list[int] = []
        while len(tokens) < 3:
            given = await client.get_output_async()
            assert "aborted" not in {one.request_id for one in given.outputs if one.finish is not None}
            tokens += [token for one in given.outputs if one.request_id == "after" for token in one.new_token_ids]
        assert tokens == [2, 3, 4]

        with pytest.raises(UtilityFailed, match="ValueError: as asked"):
            await client.call_each_async("fail")
        stats = [msgspec.to_builtins(one) for one in await client.call_each_async("stats")]
        assert [one[:2] for one in stats] == [[0, 0]] * len(stats)
        assert sum(await client.call_each_async("reset_prefix_cache")) > 0
        assert sum(await client.call_each_async("reset_prefix_cache")) == 0
    finally:
        await client.close()

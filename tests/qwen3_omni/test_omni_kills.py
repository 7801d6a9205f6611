"""Each process of examples/qwen3_omni is killed while requests are in it: they are sent again, or end with an error."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.e2e.local_pipelines import Client, at_rest, eventually, holds
from tests.qwen3_omni.omni_cases import Case, body

# Kills each time: of stages e2e/test_deaths.py, of engines engines/test_process_stage.py and e2e/test_engines_apart.py.
pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples/qwen3_omni/pipeline.yaml"
#: Every answer is so long that a kill after its first sound comes in its middle.
FRAMES, TOKENS = 250, 250
SETTINGS = (
    f"stages.talker.factoryArgs.params.max_tokens={FRAMES}",
    f"stages.talker.factoryArgs.params.min_tokens={FRAMES}",
    "control.heartbeatSeconds=0.25",
    "coordinator.hold.seconds=200",  # a process is loaded again meanwhile
)
HEARD = Case("heard", ("hi", (96, 64), 0.7, "what?"), tokens=TOKENS)
#: Stages that have given all they have of a request before its answer begins.
EARLY = ("eyes", "ears")


class Ended(NamedTuple):
    """The end of a streamed answer. error: its code and stage, or None where the answer is whole."""

    text: str
    sound: bytes
    error: tuple[str, str] | None
    done: bool


class Asking:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=250.0)

    async def close(self) -> None:
        await self._http.aclose()

    async def whole(self, **changes: Any) -> dict[str, Any]:
        """The message of an answer that is not streamed; an answer of pcm16, so that bytes can be compared."""
        response = await self._http.post("/v1/chat/completions", json=_body(**changes))
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        return {"content": message["content"], "sound": (message.get("audio") or {}).get("data")}

    async def streamed(self, begun: asyncio.Event, **changes: Any) -> Ended:
        """begun: set when its last modality's first piece has come."""
        text, sound, error, done = "", b"", None, False
        asked = _body(**changes)
        async with self._http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = (event["error"]["code"], event["error"].get("stage"))
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    sound += base64.b64decode((choice["delta"].get("audio") or {}).get("data") or "")
                if sound or (text and "audio" not in asked):
                    begun.set()
        return Ended(text, sound, error, done)


def _body(**changes: Any) -> dict[str, Any]:
    found = {**body(HEARD, min_tokens=TOKENS, audio={"voice": "chelsie", "format": "pcm16"}), **changes}
    if found["modalities"] == ["text"]:
        del found["audio"]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tiny_omni: str) -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        changed = [f"endpoints.basePath={folder}/run", f"modelPath={tiny_omni}", *SETTINGS]
        with (Path(folder) / "log").open("a") as log:
            running = LocalPipeline(
                EXAMPLE,
                overrides=changed,
                options=LocalOptions(port=0),
                on_line=lambda name, line: print(f"{name}: {line}", file=log, flush=True),
            )
            async with running:
                yield running
        print((Path(folder) / "log").read_text()[-12_000:])


@pytest.mark.parametrize("group", ["talker", "thinker", "voice", "front"])
async def test_a_kill_in_mid_stream_ends_what_has_streamed_and_repeats_the_rest(
    pipeline: LocalPipeline, group: str
) -> None:
    asking = Asking(pipeline.url)
    async with Client(pipeline.url) as client:
        expected = await asking.whole()
        before = (await client.metrics())["omnipipeline_requests_retried_total"]
        begun = [asyncio.Event(), asyncio.Event()]
        streams = [asyncio.create_task(asking.streamed(one)) for one in begun]
        rest = [asyncio.create_task(asking.whole()) for _ in range(2)]
        await asyncio.gather(*(one.wait() for one in begun))
        await eventually(lambda: holds(client, group, 4))
        only_text = asyncio.create_task(asking.streamed(asyncio.Event(), modalities=["text"]))
        os.kill(pipeline.pids()[group], signal.SIGKILL)
        for ended in await asyncio.gather(*streams):
            assert ended.error is not None and not ended.done, (ended.text[-20:], len(ended.sound))
            assert ended.error[0] == "unavailable"
        assert await asyncio.gather(*rest) == [expected, expected]
        beside = await only_text
        if group in ("talker", "voice"):
            assert (beside.error, beside.done, beside.text) == (None, True, expected["content"]), "others go on"
        assert (await client.metrics())["omnipipeline_requests_retried_total"] >= before + 2
        await pipeline.ready()
        await nothing_held(client)
        assert await asking.whole() == expected
    await asking.close()


@pytest.mark.parametrize("group", EARLY)
async def test_a_killed_encoder_s_requests_are_sent_again_and_what_is_past_it_goes_on(
    pipeline: LocalPipeline, group: str
) -> None:
    """Frozen before it is killed: it has requests then. The thinker reported that all its input of `past` is here when
    it began it, long before the kill: nothing of that answer needs the encoder."""
    asking = Asking(pipeline.url)
    async with Client(pipeline.url) as client:
        expected = await asking.whole()
        before = (await client.metrics())["omnipipeline_requests_retried_total"]
        begun = asyncio.Event()
        past = asyncio.create_task(asking.streamed(begun))
        await begun.wait()
        killed = pipeline.pids()[group]
        os.kill(killed, signal.SIGSTOP)
        rest = [asyncio.create_task(asking.whole()) for _ in range(3)]
        await eventually(lambda: holds(client, group, 3))
        os.kill(killed, signal.SIGKILL)
        assert await asyncio.gather(*rest) == [expected] * 3
        assert await past == Ended(expected["content"], base64.b64decode(expected["sound"]), error=None, done=True)
        assert (await client.metrics())["omnipipeline_requests_retried_total"] >= before + 3
        await pipeline.ready()
        await nothing_held(client)
    await asking.close()


async def nothing_held(client: Client) -> None:
    """No request, slot, block of a KV cache or state of a vocoder is left."""
    await at_rest(client)

    async def given_back() -> bool:
        gauges = [one["gauges"] for one in (await client.status())["instances"]]
        used = [value for one in gauges for name, value in one.items() if name.split(":")[0] in HELD]
        assert len(used) >= 6
        return not any(used)

    await eventually(given_back, what="blocks, rows or states are left")


#: Names of gauges that are 0 when no request is under way.
HELD = ("engine_kv_blocks_used", "engine_waiting", "engine_running")

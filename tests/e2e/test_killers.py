"""A request that kills the process it runs in: it ends after two deaths, its neighbours are served."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from omnipipeline_spec.cluster import Hold
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from tests.e2e.local_pipelines import Client, at_rest, coordinator, eventually, holds, replicas, running
from tests.thoroughness import rows


def killers(count: int, **fields: Any) -> PipelineConfig:
    return PipelineConfig(
        name="killers",
        serves=["chat"],
        stages=[
            StageConfig(name="front", process="front", factory="killer_stages:front", next=["chat"]),
            StageConfig(name="chat", process="chat", factory="killer_stages:chat", terminal=True, **fields),
        ],
        process_groups=replicas(chat=count),
        coordinator=coordinator(hold=Hold(seconds=3)),
    )


def deaths(base: Path) -> int:
    return (base / "log").read_text().count("with these requests under way")


@pytest.mark.long
@pytest.mark.proves("killer-request")
@pytest.mark.parametrize(("count", "stream"), rows([(1, False), (1, True), (2, True), (2, False)], each_run=2))
async def test_a_request_that_kills_its_process_ends_after_two_deaths_and_its_neighbours_are_served(
    count: int, stream: bool, base: Path
) -> None:
    async with running(killers(count), base) as pipeline, Client(pipeline.url) as looking:
        async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none") as client:  # repeats twice

            async def ask(text: str) -> str | None:
                messages = [{"role": "user", "content": text}]
                answer = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
                return answer.choices[0].message.content

            neighbours = [asyncio.create_task(ask(f"wait {base / 'go on'}")) for _ in range(4)]
            await eventually(lambda: holds(looking, "chat", 4))
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "die now"}],
                    stream=stream,
                    extra_headers={"x-request-id": "the-killer"},
                )
            assert (caught.value.code, caught.value.response.headers["x-should-retry"]) == ("stage_failed", "false")
            (base / "go on").touch()
            assert await asyncio.gather(*neighbours) == ["heard wait"] * 4
            assert await ask("hello") == "heard hello"
        await at_rest(looking)
    assert deaths(base) == 2
    assert "request the-killer was under way at each of these instances of 'chat'" in (base / "log").read_text()


async def test_a_stage_that_cannot_load_again_is_gone_for_clients_and_balancers_until_it_can(base: Path) -> None:
    broken = base / "broken"
    async with running(killers(1, factory_args={"broken": str(broken)}), base) as pipeline:
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=100) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

            async def health() -> int:
                return (await client.get("/health")).status_code

            async def is_healthy(status: int) -> bool:
                return await health() == status

            assert await health() == 200
            broken.touch()
            os.kill(pipeline.pids()["chat"], signal.SIGKILL)
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await eventually(lambda: is_healthy(503))
            assert (await waiting).status_code == 503, "it was expected, and does not come"
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 3
            broken.unlink()
            await eventually(lambda: is_healthy(200))
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.proves("finished-part-ends")
async def test_a_streamed_answer_goes_on_when_a_stage_ends_whose_part_is_over(base: Path) -> None:
    async with (
        running(killers(1), base) as pipeline,
        openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"begin {base / 'go on'}"}], stream=True
        )
        texts, killed = [], pipeline.pids()["front"]
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            if texts[-1] == "first ":
                os.kill(killed, signal.SIGKILL)
                await eventually(lambda: pipeline.pids().get("front", killed) != killed)
                (base / "go on").touch()
        assert "".join(texts) == "first heard begin"


@pytest.mark.proves("finished-part-ends")
async def test_a_stream_goes_on_when_an_encoder_and_then_its_own_source_end_that_are_done(base: Path) -> None:
    def stage(name: str, **fields: Any) -> StageConfig:
        return StageConfig(name=name, process=name, factory=f"killer_stages:{name}", **fields)

    spec = PipelineConfig(
        name="talkers",
        stages=[
            stage("front", next="look"),
            stage("look", next="think"),
            stage("think", next="speak", stream_to="speak"),
            stage("speak", terminal=True),
        ],
    )
    files = {"thought": str(base / "thought"), "spoken": str(base / "spoken")}
    async with running(spec, base) as pipeline, Client(pipeline.url) as client:

        async def end(name: str, then: str) -> None:
            killed = pipeline.pids()[name]
            os.kill(killed, signal.SIGKILL)
            await eventually(lambda: pipeline.pids().get(name, killed) != killed)
            Path(files[then]).touch()

        came = asyncio.Semaphore(0)
        asking = asyncio.create_task(client.streamed("", came=came, **files))
        await came.acquire()
        await end("look", "thought")
        await came.acquire()
        await came.acquire()
        await end("think", "spoken")
        streamed = await asking
        assert [data["data"] for _, data in streamed] == ["first", "last", "heard all", ["first", "last"]]
        await at_rest(client)

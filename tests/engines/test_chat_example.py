"""examples/chat as it stands, with a tiny model: OpenAI's client, streams, many users at once."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import openai

from stage_runtime.processes.local import LocalOptions, LocalPipeline
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/chat/pipeline.yaml"
USERS = 16


def expected(question: str, count: int) -> str:
    """Until the end token, as far as ``count`` goes."""
    messages = [{"role": "user", "content": question}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return str(tiny_tokenizer().decode(alone("llama", prompt, count), skip_special_tokens=True))


async def ask(client: openai.AsyncOpenAI, user: int) -> tuple[str, str | None, int]:
    stream: Any = await client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": f"user {user % 5}: hello"}],
        max_tokens=8 + user % 3,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finish, tokens = "", None, 0
    async for event in stream:
        tokens = event.usage.completion_tokens if event.usage else tokens
        for choice in event.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, tokens


async def test_sixteen_users_of_a_chat_server_in_one_file_get_the_answers_of_each_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        tiny_model("llama").save_pretrained(f"{folder}/model")
        tiny_tokenizer().save_pretrained(f"{folder}/model")
        overrides = [f"endpoints.basePath={folder}", f"stages.chat.factoryArgs.model={folder}/model"]
        overrides += ["stages.chat.factoryArgs.threads=1"]
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
                answers = await asyncio.gather(*(ask(client, user) for user in range(USERS)))
            assert answers == [
                (expected(f"user {user % 5}: hello", 8 + user % 3), "length", 8 + user % 3) for user in range(USERS)
            ]
            async with httpx.AsyncClient(base_url=running.url) as http:
                metrics = (await http.get("/metrics")).text
                refused = await http.post("/v1/chat/completions", json={"model": "chat", "messages": []})
            assert 'stage="chat"' in metrics
            assert "omnipipeline_engine_kv_blocks{" in metrics
            assert refused.status_code == 400

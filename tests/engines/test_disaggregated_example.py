"""examples/disaggregated as it stands, with a tiny model: the answers of one engine, and prompts from another one."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.engines.generation_kit import alone, tiny_model, tiny_tokenizer
from tests.patience import patience

EXAMPLE = Path(__file__).parents[2] / "examples/disaggregated/pipeline.yaml"


def expected(question: str, count: int, kind: str = "llama") -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return str(tiny_tokenizer().decode(alone(kind, prompt, count), skip_special_tokens=True))


async def kv_metrics(url: str) -> str:
    """`/metrics`, once it has blocks that prefill has sent and decode received: numbers come with beats."""
    async with httpx.AsyncClient(base_url=url) as http, asyncio.timeout(patience(60)):
        while True:
            metrics = (await http.get("/metrics")).text
            if all(re.search(f"engine_kv_{way}_blocks_total.* [1-9]", metrics) for way in ("sent", "received")):
                return metrics
            await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_prompts_of_the_disaggregated_example_are_computed_by_the_other_group() -> None:
    questions = [f"{number}: a question of a user that is longer than two blocks of the cache" for number in range(6)]
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        tiny_model("llama").save_pretrained(f"{folder}/model")
        tiny_tokenizer().save_pretrained(f"{folder}/model")
        overrides = [f"endpoints.basePath={folder}", f"stages.chat.factoryArgs.model={folder}/model"]
        overrides += ["stages.chat.factoryArgs.remote_prefill_tokens=1"]
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

                async def ask(question: str) -> Any:
                    messages: Any = [{"role": "user", "content": question}]
                    made = await client.chat.completions.create(model="disaggregated", messages=messages, max_tokens=8)
                    return made.choices[0].message.content, made.usage

                answers = await asyncio.gather(*map(ask, questions))
            assert [text for text, _usage in answers] == [expected(question, 8) for question in questions]
            # what another engine has computed was not cached
            assert {usage.prompt_tokens_details.cached_tokens for _text, usage in answers} == {0}
            await kv_metrics(running.url)


@pytest.mark.timeout(400)
@pytest.mark.nightly  # ranks as threads cross each time, in test_kv_ranks.py
@pytest.mark.parametrize(("prefill", "decode", "kind"), [(2, 1, "llama"), (1, 2, "llama"), (2, 4, "gpt_neox")])
async def test_prompts_cross_between_groups_of_different_numbers_of_ranks(prefill: int, decode: int, kind: str) -> None:
    questions = [f"{number}: a question of a user that is longer than two blocks of the cache" for number in range(3)]
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        tiny_model(kind).save_pretrained(f"{folder}/model")
        tiny_tokenizer().save_pretrained(f"{folder}/model")
        spec = yaml.safe_load(EXAMPLE.read_text())
        (stage,) = spec["spec"]["stages"]
        stage["factoryArgs"] = {"model": f"{folder}/model", "remote_prefill_tokens": 1}
        given = stage["disaggregation"]["prefill"]
        for where, ranks, first in ((given, prefill, 0), (stage, decode, prefill)):
            if ranks > 1:
                where.update(tpSize=ranks, gpu=list(range(first, first + ranks)))
        Path(folder, "pipeline.yaml").write_text(json.dumps(spec))
        options = LocalOptions(port=0, cpu=True)
        overrides = [f"endpoints.basePath={folder}"]
        async with (
            LocalPipeline(Path(folder, "pipeline.yaml"), overrides=overrides, options=options) as running,
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        ):

            async def ask(question: str) -> str | None:
                messages: Any = [{"role": "user", "content": question}]
                made = await client.chat.completions.create(model="disaggregated", messages=messages, max_tokens=8)
                return made.choices[0].message.content

            answers = await asyncio.gather(*map(ask, questions))
            assert answers == [expected(question, 8, kind) for question in questions]
            found = await kv_metrics(running.url)
        (failed,) = {line.split()[-1] for line in found.splitlines() if "kv_failed_total{" in line and '"chat"' in line}
        assert float(failed) == 0

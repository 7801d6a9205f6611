"""Adapters where clients and operators meet them: examples/chat with a tiny model and its adapters, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.engines.generation_kit import alone_with, tiny_model, tiny_tokenizer
from tests.engines.lora_kit import adapter, merged
from tests.patience import patience

EXAMPLE = Path(__file__).parents[2] / "examples/chat/pipeline.yaml"
PATIENCE_S = patience(100.0)
MESSAGES = [{"role": "user", "content": "say it"}]
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def expected(model: Any) -> list[int]:
    prompt = tiny_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    return alone_with(model, prompt["input_ids"], 8)


async def ask(http: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, **ASKED, **more})


async def told(http: httpx.AsyncClient, model: str) -> tuple[str, list[int]]:
    answer = await ask(http, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["model"], answer.json()["choices"][0]["token_ids"]


async def operate(http: httpx.AsyncClient, operation: str, **arguments: Any) -> Any:
    body = {"operation": operation, "stages": ["chat"], "arguments": arguments}
    answer = await http.post("/operations", json=body)
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["results"]
    return one["value"] if one["error"] is None else one["error"]


async def until(http: httpx.AsyncClient, path: str, done: Callable[[str], bool]) -> str:
    """The answer of a route once beats have brought it."""
    async with asyncio.timeout(PATIENCE_S):
        while not done(text := (await http.get(path)).text):
            await asyncio.sleep(0.05)
    return text


@contextlib.asynccontextmanager
async def serving(folder: str, settings: dict[str, Any]) -> AsyncIterator[tuple[LocalPipeline, httpx.AsyncClient]]:
    """The example with a tiny model. settings: of its stage, beside those of the model."""
    tiny_model("llama").save_pretrained(f"{folder}/model")
    tiny_tokenizer().save_pretrained(f"{folder}/model")
    settings = {"model": f"{folder}/model", "threads": 1, **settings}
    overrides = [f"stages.chat.factoryArgs.{name}={value}" for name, value in settings.items()]
    overrides += [f"endpoints.basePath={folder}"]
    async with (
        LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        yield running, http


async def test_a_client_chooses_an_adapter_by_its_model_and_operators_load_and_drop_them() -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        paths = {name: adapter(Path(folder, name), seed=seed) for seed, name in enumerate(("one", "two"), 1)}
        tokens = {name: expected(merged("llama", path)) for name, path in paths.items()}
        base = expected(tiny_model("llama"))
        assert len({tuple(base), *map(tuple, tokens.values())}) == 3
        settings = {"adapters.one": paths["one"], "max_adapters": 2}
        async with serving(folder, settings) as (_running, http):
            found = await until(http, "/v1/models", lambda text: '"one"' in text)
            listed = json.loads(found)["data"]
            assert [(one["id"], one.get("parent")) for one in listed] == [("chat", None), ("one", "chat")]
            assert (await http.get("/v1/models/one")).json() == listed[1]
            answers = list(await asyncio.gather(told(http, "one"), told(http, "chat"), told(http, "one")))
            assert answers == [("one", tokens["one"]), ("chat", base), ("one", tokens["one"])]
            await other_routes_choose_too(http, tokens["one"])
            await unknown_names_are_refused(http, "two", "loaded: one")
            assert await operate(http, "load_adapter", name="two", path=paths["two"]) == ["one", "two"]
            assert await told(http, "two") == ("two", tokens["two"])
            refused = await operate(http, "load_adapter", name="three", path=paths["two"])
            assert "max_loras=2 are loaded" in refused
            assert await operate(http, "unload_adapter", name="one") == ["two"]
            await unknown_names_are_refused(http, "one", "loaded: two")
            await until(http, "/v1/models", lambda text: '"one"' not in text and '"two"' in text)
            await until(http, "/metrics", lambda text: shows(text, ['adapter="two"} 1', "adapters{", "adapter_bytes{"]))


async def test_vllms_routes_load_and_drop_adapters_from_allowed_folders() -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        path = adapter(Path(folder, "allowed", "sql"))
        elsewhere = adapter(Path(folder, "elsewhere"))
        Path(folder, "allowed", "link").symlink_to(elsewhere)
        settings = {"max_adapters": 1, "adapter_folders": f"[{folder}/allowed]"}
        async with serving(folder, settings) as (_running, http):

            async def load(**body: Any) -> httpx.Response:
                return await http.post("/v1/load_lora_adapter", json=body)

            async def unload(**body: Any) -> httpx.Response:
                return await http.post("/v1/unload_lora_adapter", json=body)

            done = await load(lora_name="sql", lora_path=path)
            assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
            listed = json.loads(await until(http, "/v1/models", lambda text: '"sql"' in text))["data"]
            assert [(one["id"], one.get("parent")) for one in listed] == [("chat", None), ("sql", "chat")]
            assert await told(http, "sql") == ("sql", expected(merged("llama", path)))
            again = await load(lora_name="sql", lora_path=path)
            assert refused(again, 409, "lora_name") == "the adapter 'sql' is loaded already"
            assert "max_loras=1 are loaded" in refused(await load(lora_name="b", lora_path=path), 400, "lora_name")
            done = await unload(lora_name="sql")
            assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
            await unknown_names_are_refused(http, "sql", "loaded: none")
            assert refused(await unload(lora_name="sql"), 404, "lora_name") == "no adapter 'sql' is loaded"
            for wrong in (elsewhere, f"{folder}/allowed/link", f"{folder}/allowed/../elsewhere", "/"):
                problem = refused(await load(lora_name="sql", lora_path=wrong), 400, "lora_path")
                assert problem.endswith(f"{wrong}: adapters are loaded from {folder}/allowed (lora_folders)")
            missing = await load(lora_name="sql", lora_path=f"{folder}/allowed/none")
            assert "this folder does not exist" in refused(missing, 404, "lora_path")
            assert "lora_path" in refused(await load(lora_name="sql"), 400, None)
            assert "name of the model" in refused(await load(lora_name="chat", lora_path=path), 400, "lora_name")
            found = await load(lora_name="sql", lora_path=path, load_inplace=True)
            assert refused(found, 400, "load_inplace").startswith("load_inplace: unload the adapter")
            assert json.loads((await http.get("/v1/models")).text)["data"][0]["id"] == "chat"


@pytest.mark.nightly  # in each run: tests/coordinator/test_adapter_changes.py, tests/stage/test_stage_errors.py
async def test_adapters_of_run_time_outlive_the_coordinator_and_then_the_instance() -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        path = adapter(Path(folder, "sql"))
        async with serving(folder, {"max_adapters": 1, "adapter_folders": f"[{folder}]"}) as (running, http):
            loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": path})
            assert loaded.status_code == 200, loaded.text
            await killed(running, "coordinator")
            async with asyncio.timeout(PATIENCE_S):
                while not await answers(http):
                    await asyncio.sleep(0.05)
            await until(http, "/v1/models", lambda text: '"sql"' in text)
            await killed(running, "language")
            assert await told(http, "sql") == ("sql", expected(merged("llama", path)))


async def killed(running: LocalPipeline, process: str) -> None:
    """Kill a process, and wait for the next one in its place."""
    pid = running.pids()[process]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while running.pids().get(process, pid) == pid:
            await asyncio.sleep(0.05)


async def answers(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.get("/readyz")).status_code == 200
    return False


def refused(answer: httpx.Response, status: int, param: str | None) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    return str(error["message"])


def shows(metrics: str, parts: list[str]) -> bool:
    """Whether there is a line with each part, and none of the adapter that was unloaded."""
    return all(part in metrics for part in parts) and 'adapter="one"' not in metrics


async def other_routes_choose_too(http: httpx.AsyncClient, tokens: list[int]) -> None:
    streamed = await ask(http, "one", stream=True)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert {one["model"] for one in chunks} == {"one"}
    assert [token for one in chunks for choice in one["choices"] for token in choice.get("token_ids") or ()] == tokens
    prompt = tiny_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    body = {"model": "one", "prompt": prompt["input_ids"], **ASKED}
    completed = (await http.post("/v1/completions", json=body)).json()
    assert (completed["model"], completed["choices"][0]["token_ids"]) == ("one", tokens)
    body = {"model": "one", "input": "say it", "max_output_tokens": 8, "temperature": 0}
    assert (await http.post("/v1/responses", json=body)).json()["model"] == "one"


async def unknown_names_are_refused(http: httpx.AsyncClient, name: str, there: str) -> None:
    answer = await ask(http, name)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "not_found", "model"), error
    assert f"no adapter '{name}' is loaded here; {there}" in error["message"]

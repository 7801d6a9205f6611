"""Prompts and usage where a client meets them: what `test_chat_example` asks its server over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.engines.generation_kit import tiny_tokenizer

PATIENCE_S = 60.0


async def reach_a_client(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        await forged_turns_are_bytes(http)
        await prompts_that_are_too_long_are_named(http)
        await odd_histories_are_taken(http)
        await whole_pipelines_hold_their_text(http)
        await usage_comes_as_it_grows(http)
        await texts_and_chats_become_tokens(http)
        await last_messages_are_continued(http)
        await token_ids_come_as_vllms(http)
        await completions_continue_texts_and_tokens(http)
        await usage_of_a_stream_that_was_cancelled_is_kept(http)


async def ask(http: httpx.AsyncClient, *messages: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"model": "chat", "messages": list(messages), "max_tokens": 4, "ignore_eos": True, **more}
    return await http.post("/v1/chat/completions", json=body)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def prompt_tokens(http: httpx.AsyncClient, *messages: dict[str, Any], **more: Any) -> int:
    answer = await ask(http, *messages, **more)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


async def forged_turns_are_bytes(http: httpx.AsyncClient) -> None:
    """A byte is a token of this model, and ``<end>`` is one, too."""
    plain = await prompt_tokens(http, user("hi"))
    assert await prompt_tokens(http, user("hi<end>")) == plain + 5
    assert await prompt_tokens(http, user("hi<user>x")) == plain + 7
    parts = [{"type": "text", "text": "hi<e"}, {"type": "text", "text": "nd>"}]
    assert await prompt_tokens(http, user(parts)) == plain + 5
    assert await prompt_tokens(http, user("hi"), {"role": "assistant", "content": "<end>"}) == plain + 1 + 5


async def prompts_that_are_too_long_are_named(http: httpx.AsyncClient) -> None:
    answer = await ask(http, user("x" * 400))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert " 402 tokens" in error["message"]
    seed = await ask(http, user("hi"), seed=2**64)
    assert (seed.status_code, seed.json()["error"]["param"]) == (400, "seed")


async def odd_histories_are_taken(http: httpx.AsyncClient) -> None:
    stopped = await prompt_tokens(http, user("a"), {"role": "assistant", "content": None}, user("b"))
    assert stopped == await prompt_tokens(http, user("a"), {"role": "assistant", "content": ""}, user("b"))


async def texts_and_chats_become_tokens(http: httpx.AsyncClient) -> None:
    async def told(path: str, **body: Any) -> Any:
        return (await http.post(path, json=body)).json()

    letters = tiny_tokenizer()("h\u00e9<end>")["input_ids"]
    whole = await told("/tokenize", prompt="h\u00e9<end>", return_token_strs=True)
    assert (whole["tokens"], whole["count"], whole["token_strs"][-1]) == (letters, 4, "<end>")
    assert (await told("/tokenize", prompt=""))["tokens"] == []
    assert await told("/detokenize", tokens=letters) == {"prompt": "h\u00e9<end>"}
    prompt = tiny_tokenizer().apply_chat_template([user("hi")], add_generation_prompt=True, return_dict=True)
    of_chat = await told("/tokenize", messages=[user("hi")])
    assert (of_chat["tokens"], of_chat["token_strs"]) == (prompt["input_ids"], None)
    assert (await told("/tokenize", messages=[user("hi")], add_generation_prompt=False))["count"] == of_chat[
        "count"
    ] - 1
    long = "a" * 50_000  # no bound of the model applies
    assert (await told("/tokenize", prompt=long))["count"] == 50_000
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [user("hi")]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": [user("hi")], "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ]
    for path, body, param in wrong:
        error = (await told(path, **body))["error"]
        assert (error["code"], error["param"]) == ("invalid_request", param), error


async def last_messages_are_continued(http: httpx.AsyncClient) -> None:
    begun = {"role": "assistant", "content": "I am"}
    whole = await prompt_tokens(http, user("hi"), begun)
    assert await prompt_tokens(http, user("hi"), begun, continue_final_message=True) == whole - 1
    assert await prompt_tokens(http, user("hi"), begun, add_generation_prompt=False) == whole - 1
    more = {"continue_final_message": True}
    refused: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([user("hi")], {}, "expected the last message to be an assistant's text, got one of the role 'user'"),
        ([user("hi"), {"role": "assistant", "content": ""}], {}, "got one without text or with calls"),
        ([user("hi"), begun], {"add_generation_prompt": True}, "expected add_generation_prompt to be false"),
    ]
    for messages, fields, problem in refused:
        error = (await ask(http, *messages, **more, **fields)).json()["error"]
        assert (error["param"], problem in error["message"]) == ("continue_final_message", True), error


async def token_ids_come_as_vllms(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"return_token_ids": True, "temperature": 0, "n": 2, "cache_salt": "a", "priority": 1}
    whole = (await ask(http, user("hi"), **asked)).json()
    prompt = tiny_tokenizer().apply_chat_template([user("hi")], add_generation_prompt=True, return_dict=True)
    assert whole["prompt_token_ids"] == prompt["input_ids"] and "notes" not in whole
    assert [len(one["token_ids"]) for one in whole["choices"]] == [4, 4]
    answer = await ask(http, user("hi"), **asked, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [one["prompt_token_ids"] for one in events if "prompt_token_ids" in one] == [prompt["input_ids"]]
    for index in range(2):
        choices = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        ids = [token for one in choices for token in one.get("token_ids", ())]
        assert ids == whole["choices"][index]["token_ids"]
    body = {"prompt": ["a", [98]], "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}
    found = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [(one["prompt_token_ids"], len(one["token_ids"])) for one in found] == [
        (tiny_tokenizer()("a")["input_ids"], 2),
        ([98], 2),
    ]


async def completions_continue_texts_and_tokens(http: httpx.AsyncClient) -> None:
    async def choices(**body: Any) -> list[dict[str, Any]]:
        answer = await http.post("/v1/completions", json={"ignore_eos": True, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["choices"]
        return found

    text = "hello,"  # a token for each byte
    [plain] = await choices(prompt=text, max_tokens=3)
    [echoed] = await choices(prompt=text, max_tokens=3, echo=True)
    assert echoed["text"] == text + plain["text"]
    for one in await choices(prompt=[text, text], n=2, max_tokens=3, echo=True, logprobs=2):
        found = one["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(text) + 3
        assert "".join(found["tokens"][: len(text)]) == text
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in found["token_logprobs"][1:])
        assert found["text_offset"][: len(text)] == list(range(len(text)))
    [of_tokens] = await choices(prompt=[0, 1, 2], max_tokens=3, echo=True)
    [of_text] = await choices(prompt=of_tokens["text"][:3], max_tokens=3, echo=True)
    assert of_tokens["text"] == of_text["text"]
    [control] = await choices(prompt="hi<end>", max_tokens=1, echo=True, logprobs=0)
    assert control["logprobs"]["tokens"][:3] == ["h", "i", "<end>"]
    refused = await http.post("/v1/completions", json={"prompt": [7, 9999]})
    assert refused.status_code == 400, refused.text


async def whole_pipelines_hold_their_text(http: httpx.AsyncClient) -> None:
    params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {"inputs": {"messages": [user("hi")]}, "params": params}
    whole = (await http.post("/v1/pipeline", json=body)).json()["results"]["chat"]
    asked = await ask(http, user("hi"), temperature=0)
    assert whole[0] == {"type": "text", "text": asked.json()["choices"][0]["message"]["content"]}
    assert [one["type"] for one in whole] == ["text", "usage", "finish"]


async def usage_comes_as_it_grows(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await ask(http, user("hi"), stream=True, stream_options=options, max_tokens=12)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    counts = [one["usage"]["completion_tokens"] for one in events]
    assert counts == sorted(counts) and counts[-1] == 12
    assert {one["usage"]["prompt_tokens"] for one in events} == {await prompt_tokens(http, user("hi"))}


async def usage_of_a_stream_that_was_cancelled_is_kept(http: httpx.AsyncClient) -> None:
    body = {"model": "chat", "messages": [user("hi")], "max_tokens": 200, "ignore_eos": True, "stream": True}
    name = {"x-request-id": "cut-1"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=name) as answer:
        async for line in answer.aiter_lines():
            if '"content":' in line and '"content":""' not in line:
                break
    async with asyncio.timeout(PATIENCE_S):
        while (record := (await http.get("/v1/requests/cut-1")).json())["state"] == "running":
            await asyncio.sleep(0)
    assert record["usage"]["prompt_tokens"] == await prompt_tokens(http, user("hi"))
    assert 1 <= record["usage"]["completion_tokens"] <= 200

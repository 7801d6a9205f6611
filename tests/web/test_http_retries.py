"""The official client sends some failed requests again."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from stage_runtime.errors import CODES, RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.errors import RequestRefused
from tests.web.running import ALL, start
from tests.web.scripted_manager import play
from tests.web.test_http_connections import POST, QUICK, connected

USER: Any = [{"role": "user", "content": "hi"}]
FINAL = {"stage_failed", "deadline"}


async def test_a_request_that_ran_out_of_time_is_not_run_again() -> None:
    async with start(play(RequestError("deadline", "not done in time", stage="talk"))) as running:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="any", messages=USER)
    assert len(running.manager.handles) == 1


@pytest.mark.parametrize("code", CODES)
def test_the_codes_that_would_fail_again_say_so(code: str) -> None:
    given = dict(errors.headers(RequestError(code, "x")))
    assert given.get(b"x-should-retry") == (b"false" if code in FINAL else None)


def test_a_request_that_did_not_arrive_in_time_may_be_sent_again() -> None:
    assert errors.headers(RequestRefused(408, "deadline", "the body came too slowly")) == []


@pytest.mark.parametrize("begun", [POST, POST + b"content-length: 99\r\n\r\n{"], ids=["half a head", "half a body"])
async def test_what_is_408_on_the_wire_may_be_sent_again(begun: bytes) -> None:
    settings = msgspec.structs.replace(ALL, body_grace_s=0.3)
    async with start(play(), settings, limits=QUICK) as running, connected(running) as (reader, writer):
        writer.write(begun)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 408 ")
    assert "x-should-retry" not in head

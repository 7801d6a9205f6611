"""Requests of a benchmark over HTTP, each timed as it streams. Called by `bench`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import httpx
import msgspec

from stage_runtime.cli.running.measuring.prompts import Prompt
from stage_runtime.cli.running.measuring.statistics import Outcome

_DATA: Final = b"data:"  # what begins the line of an event's data; a space may follow
#: Fields of a delta that tokens become, beside the text; a server names what the model thinks by either of two names.
_UNSHOWN: Final = ("reasoning_content", "reasoning", "tool_calls")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load to send, beside prompts. body: fields of every request."""

    endpoint: str
    model: str
    body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    max_concurrency: int | None = None
    id_prefix: str | None = None  #: Request ids are this and the request's number; None: the server makes them.

    def fields(self, prompt: Prompt) -> dict[str, Any]:
        base: dict[str, Any] = {"model": self.model}
        if self.endpoint == "/v1/audio/speech":
            return {**base, "input": prompt.text, "response_format": "pcm", **self.body}
        asked = {"messages": [{"role": "user", "content": prompt.text}]} if "chat" in self.endpoint else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": prompt.output}
        return {**base, **(asked or {"prompt": prompt.text}), **stream, **self.body}


async def run(
    http: httpx.AsyncClient,
    load: Load,
    prompts: Sequence[Prompt],
    times_s: Sequence[float],
    *,
    done: Callable[[Outcome], object] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """All outcomes in the order of ``prompts``, and the seconds that it took. times_s: when each is sent.

    A request that waits for others, by ``max_concurrency``, is timed from when it is sent; the outcome has that wait.
    """
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency is not None else nullcontext()
    begun = time.perf_counter()

    async def one(index: int, prompt: Prompt, at: float) -> Outcome:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        asked = time.perf_counter()
        async with places:
            queued = time.perf_counter() - asked
            outcome = await ask(http, load, prompt, index=index)
        outcome = msgspec.structs.replace(
            outcome, begun=outcome.begun - begun, queued=None if load.max_concurrency is None else queued
        )
        done(outcome)
        return outcome

    async with asyncio.TaskGroup() as tasks:
        pairs = enumerate(zip(prompts, times_s, strict=True))
        running = [tasks.create_task(one(index, prompt, at)) for index, (prompt, at) in pairs]
    return [task.result() for task in running], time.perf_counter() - begun


async def ask(http: httpx.AsyncClient, load: Load, prompt: Prompt, *, index: int = 0) -> Outcome:
    """One request, timed. Its failure is a part of the outcome. index: its number, of which its id is made."""
    begun = time.perf_counter()
    seen = _Seen(begun)
    headers = load.headers if load.id_prefix is None else {**load.headers, "x-request-id": f"{load.id_prefix}{index}"}
    try:
        async with http.stream("POST", load.endpoint, json=load.fields(prompt), headers=headers) as answer:
            if answer.status_code != 200:
                content = (await answer.aread())[:400].decode(errors="replace")
                error = f"{answer.status_code}: {content}"
                return Outcome(begun=begun, latency=time.perf_counter() - begun, error=error)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                await seen.events(_lines(answer.aiter_bytes()))
            else:
                async for piece in answer.aiter_bytes():
                    seen.sound(bool(piece))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen.outcome(time.perf_counter())


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of events. They end at line feeds: httpx breaks at U+0085 and U+2028, too, which JSON may hold."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
    yield rest


class _Seen:
    """The parts of one answer that have come."""

    def __init__(self, begun: float) -> None:
        self._begun = self._last = begun
        self._first_token: float | None = None
        self._first_audio: float | None = None
        self._gaps: list[float] = []
        self._input_tokens = self._output_tokens = 0
        self._text: list[str] = []
        self.error = ""

    async def events(self, lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            data = line.removeprefix(_DATA)
            if data == line or data.strip() in (b"", b"[DONE]"):
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                self.error = str(event["error"].get("message"))
                return
            usage = event.get("usage")
            if usage:
                self._input_tokens = int(usage.get("prompt_tokens") or 0)
                self._output_tokens = int(usage.get("completion_tokens") or 0)
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                text = delta.get("content") or choice.get("text")
                if text or any(delta.get(name) for name in _UNSHOWN):
                    self._token()
                if isinstance(text, str):
                    self._text.append(text)
                self.sound(bool((delta.get("audio") or {}).get("data")))

    def _token(self) -> None:
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now - self._begun
        else:
            self._gaps.append(now - self._last)
        self._last = now

    def sound(self, came: bool) -> None:
        if came and self._first_audio is None:
            self._first_audio = time.perf_counter() - self._begun

    def outcome(self, now: float) -> Outcome:
        error = self.error
        if not error and self._first_token is None and self._first_audio is None:
            error = "the answer had no token and no sound"
        return Outcome(
            begun=self._begun,
            text="".join(self._text),
            latency=now - self._begun,
            first_token=self._first_token,
            first_audio=self._first_audio,
            gaps=tuple(self._gaps),
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            error=error,
        )

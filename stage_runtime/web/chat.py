"""POST /v1/chat/completions: read, translate, admit, answer. What anything means is in `translating`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from starlette.routing import Route

from stage_runtime.errors import RequestError
from stage_runtime.web import endpoints, errors, serving
from stage_runtime.web.endpoints import Service
from stage_runtime.web.exchange import Exchange
from stage_runtime.web.translating import chat, media
from stage_runtime.web.translating.completions import Completion, CompletionChunks
from stage_runtime.web.translating.outputs import Event


def routes(service: Service) -> list[Route]:
    return [endpoints.route("/v1/chat/completions", ["POST"], _Chat(service).complete)]


class _Chat:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        service, settings = self._service, self._service.settings
        request_id = exchange.name_request(endpoints.new_id("chatcmpl"))
        service.check_served("chat")
        body = chat.decode(await exchange.body(settings.max_body_bytes))
        call = chat.call(body)
        places = list(media.to_fetch(body.messages))
        fetched = await service.fetcher.fetch(places) if places else {}
        request = chat.request(body, request_id, fetched)
        timeout_s = exchange.timeout_s(body.timeout)
        created = int(time.time())
        if call.stream:
            chunks = CompletionChunks(call=call, request_id=request_id, model=settings.model, created=created)
            voice = _ChunkVoice(chunks, request_id)
            await serving.stream(service.desk, exchange, request, timeout_s, voice, settings.heartbeat_s)
            return
        answer = Completion(call=call, request_id=request_id, model=settings.model, created=created)
        await serving.collect(service.desk, exchange, request, timeout_s, answer.add)
        # encoding sound takes its time; text does not, and a thread would cost more than it
        body_out = await asyncio.to_thread(answer.finish) if call.audio is not None else answer.finish()
        await exchange.reply(msgspec.json.encode(body_out))


class _ChunkVoice:
    """Chunks as frames; ``[DONE]`` only after a stream that is whole."""

    def __init__(self, chunks: CompletionChunks, request_id: str) -> None:
        self._chunks = chunks
        self._request_id = request_id

    async def frames(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        async for event in events:
            yield b"".join(map(serving.data_frame, self._chunks.add(event)))
        yield b"".join(map(serving.data_frame, self._chunks.finish())) + serving.DONE

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))

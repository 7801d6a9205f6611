"""The OpenAI routes' thin side: read, translate, admit, answer. What anything means is in `translating`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from starlette.routing import Route

from stage_runtime.errors import RequestError
from stage_runtime.web import endpoints, errors, serving
from stage_runtime.web.endpoints import Service
from stage_runtime.web.exchange import Exchange
from stage_runtime.web.translating import chat, media
from stage_runtime.web.translating.completions import Completion, CompletionChunks
from stage_runtime.web.translating.outputs import Event

_DONE = b"data: [DONE]\n\n"


def routes(service: Service) -> list[Route]:
    handlers = _Chat(service), _Models(service)
    return [
        endpoints.route("/v1/chat/completions", ["POST"], handlers[0].complete),
        endpoints.route("/v1/models", ["GET"], handlers[1].list_all),
        endpoints.route("/v1/models/{id:path}", ["GET"], handlers[1].one),
    ]


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
        await exchange.reply(msgspec.json.encode(answer.finish()))


class _ChunkVoice:
    """Chunks as frames; ``[DONE]`` only after a stream that is whole."""

    def __init__(self, chunks: CompletionChunks, request_id: str) -> None:
        self._chunks = chunks
        self._request_id = request_id

    def add(self, event: Event) -> Iterator[bytes]:
        return map(serving.data_frame, self._chunks.add(event))

    def finish(self) -> Iterator[bytes]:
        yield from map(serving.data_frame, self._chunks.finish())
        yield _DONE

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))


class _Models:
    """The one model that there is."""

    def __init__(self, service: Service) -> None:
        self._model = {
            "id": service.settings.model,
            "object": "model",
            "created": service.settings.created or int(time.time()),
            "owned_by": "omnipipeline",
        }

    async def list_all(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode({"object": "list", "data": [self._model]}))

    async def one(self, exchange: Exchange) -> None:
        asked = exchange.scope["path_params"]["id"]
        if asked != self._model["id"]:
            raise RequestError("not_found", f"no model {asked!r}; there is {self._model['id']!r}", param="model")
        await exchange.reply(msgspec.json.encode(self._model))

"""POST /v1/pipeline, and what is known of a request: GET and DELETE /v1/requests/{id}."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import multipart
from stage_runtime.web.translating import pipelines
from stage_runtime.wire.parts import ID_LIMIT, RequestId


class PipelineEndpoint:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def run(self, exchange: Exchange) -> None:
        """POST /v1/pipeline."""
        context, settings = self._context, self._context.settings
        request_id = exchange.id
        form_type = exchange.only_header(b"content-type")
        if form_type is not None and multipart.is_form(form_type):
            body = await context.read(exchange, lambda raw: pipelines.from_form(multipart.parse(raw, form_type)))
        else:
            body = await context.read_json(exchange, pipelines.decode)
        request = pipelines.request(body, request_id)
        timeout_s = exchange.timeout_s(body.timeout)
        if request.stream:
            encoder = _NamedEncoder(request_id)
            await serving.stream(context.manager, exchange, request, timeout_s, encoder, settings.heartbeat_s)
            return
        results = pipelines.Results()
        await serving.collect(context.manager, exchange, request, timeout_s, results.add)
        await exchange.reply(msgspec.json.encode({"id": request_id, "results": results.finish()}))

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/requests/{id}."""
        request_id = _asked_for(exchange)
        record = self._context.manager.record(request_id)
        if record is None:
            raise _unknown(request_id)
        await exchange.reply(msgspec.json.encode(record))

    async def cancel(self, exchange: Exchange) -> None:
        """DELETE /v1/requests/{id}: 200 whether it was still in flight or not, 404 when it is unknown."""
        manager, reason = self._context.manager, "cancelled by DELETE /v1/requests"
        request_id = _asked_for(exchange)
        cancelled = manager.abort(request_id, reason) or await manager.forward_abort(request_id, reason)
        if not cancelled and manager.record(request_id) is None:
            raise _unknown(request_id)
        await exchange.reply(msgspec.json.encode({"id": request_id, "cancelled": cancelled}))


class _NamedEncoder:
    """Events by name: ``chunk``, ``result``, ``error``. The last terminal's result is the end."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    async def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        async for event in events:
            yield serving.named_frame(*pipelines.named(event))

    def fail(self, error: RequestError) -> bytes:
        return serving.named_frame("error", errors.body(error, self._request_id))


def _asked_for(exchange: Exchange) -> str:
    """The id in the path. Raises: RequestError: not_found: no request can have it, here or elsewhere."""
    request_id: str = exchange.scope["path_params"]["id"]
    try:
        return msgspec.convert(request_id, RequestId)
    except msgspec.ValidationError:
        raise _unknown(request_id[:ID_LIMIT]) from None


def _unknown(request_id: str) -> RequestError:
    return RequestError("not_found", f"no request {request_id!r} is in flight or has finished lately", param="id")

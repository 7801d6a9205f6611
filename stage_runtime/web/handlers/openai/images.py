"""POST /v1/images/generations and /v1/images/edits: one request to the stages, its pictures as base64."""

from __future__ import annotations

import time

import msgspec

from stage_runtime.web import endpoints, serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import multipart
from stage_runtime.web.translating import picturing
from stage_runtime.web.translating.picturing import ImageCall, Pictures


class ImageRoutes:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def generate(self, exchange: Exchange) -> None:
        """POST /v1/images/generations."""
        body = await self._context.read_json(exchange, picturing.decode)
        await self._answer(exchange, ImageCall(body=body))

    async def edit(self, exchange: Exchange) -> None:
        """POST /v1/images/edits."""
        form_type = exchange.only_header(b"content-type")
        if form_type is None or not multipart.is_form(form_type):
            problem = "content-type: pictures come as multipart/form-data"
            raise RequestRefused(415, "invalid_request", problem, param="content-type")
        call = await self._context.read(exchange, lambda raw: picturing.read(multipart.parse(raw, form_type)))
        await self._answer(exchange, call)

    async def _answer(self, exchange: Exchange, call: ImageCall) -> None:
        pictures = Pictures(call.count)
        timeout_s = exchange.timeout_s(call.body.timeout)
        request = picturing.request(call, exchange.id)
        await serving.collect(self._context.manager, exchange, request, timeout_s, pictures.add)
        answer = await endpoints.apart(exchange, pictures.answer, int(time.time()))
        await exchange.reply(msgspec.json.encode(answer))

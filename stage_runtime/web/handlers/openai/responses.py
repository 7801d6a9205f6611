"""POST /v1/responses: a chat, read and answered in the form of OpenAI's responses. `translating` says what that
means.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import endpoints, serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading.responses_body import ResponsesBody
from stage_runtime.web.translating import media
from stage_runtime.web.translating.generation import chat, responses
from stage_runtime.web.translating.generation.response_items import Event, ResponseEvents
from stage_runtime.wire.values import OmniRequest


class Responses:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def respond(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        body = await self._context.read_json(exchange, responses.decode)
        given = responses.chat_input(body)
        try:
            await self._answer(exchange, body, given)
        except RequestError as error:
            given.rename(error)
            raise

    async def _answer(self, exchange: Exchange, body: ResponsesBody, given: responses.ChatInput) -> None:
        context, settings = self._context, self._context.settings
        request = await self._request(exchange, given)
        timeout_s = exchange.timeout_s(body.timeout)
        made = ResponseEvents(body, request_id=exchange.id, model=context.shown(body.model), created=int(time.time()))
        if body.stream:
            encoder = _EventEncoder(made, given)
            await serving.stream(context.manager, exchange, request, timeout_s, encoder, settings.heartbeat_s)
            return
        await serving.collect(context.manager, exchange, request, timeout_s, lambda event: list(made.add(event)))
        *_, last = made.finish()
        await exchange.reply(msgspec.json.encode(last["response"]))

    async def _request(self, exchange: Exchange, given: responses.ChatInput) -> OmniRequest:
        context, accepts = self._context, self._context.settings.accepts
        chat.call(given.body, accepts)
        places = list(media.to_fetch(given.body.messages))
        fetched = await context.fetcher.fetch(places, exchange.reservation.add) if places else {}
        chosen = context.chosen(given.body.model)
        return await endpoints.apart(exchange, chat.request, given.body, exchange.id, fetched, accepts, chosen)


class _EventEncoder:
    """Named events. The first ones come with what a stage gave first: until then an error has a status."""

    def __init__(self, made: ResponseEvents, given: responses.ChatInput) -> None:
        self._made = made
        self._given = given

    async def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        begun = False
        async for event in events:
            head = b"" if begun else _frames(self._made.begin())
            begun = True
            yield head + _frames(self._made.add(event))
        head = b"" if begun else _frames(self._made.begin())
        yield head + _frames(self._made.finish())

    def fail(self, error: RequestError) -> bytes:
        self._given.rename(error)
        return _frames([self._made.fail(error)])


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join(serving.named_frame(event["type"], event) for event in events)

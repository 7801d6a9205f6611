"""POST /v1/completions: a request for each prompt, one answer. The meaning of fields is in `translating`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.translating.generation import text_completions
from stage_runtime.web.translating.generation.text_completions import TextCompletion


class Completions:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        context, settings = self._context, self._context.settings
        body = await context.read_json(exchange, text_completions.decode)
        call = text_completions.call(body, settings.accepts)
        requests = text_completions.requests(body, call, exchange.id, settings.accepts, context.chosen(body.model))
        context.hold_copies(exchange, text_completions.copied_nbytes(requests), "prompt")
        model = context.shown(body.model)
        answer = TextCompletion(call=call, request_id=exchange.id, model=model, created=int(time.time()))
        timeout_s = exchange.timeout_s(body.timeout)
        async with serving.admitted_each(context.manager, exchange, requests, timeout_s) as events:
            if call.stream:
                fail = _Failure(exchange.id)
                await serving.send_frames(exchange, _frames(events, answer), fail, settings.heartbeat_s)
                return
            async for prompt, event in events:
                for _chunk in answer.add(prompt, event):
                    pass
        answer.check()
        await exchange.reply(msgspec.json.encode(answer.finish()))


async def _frames(
    events: AsyncIterator[tuple[int, AnswerEvent]], answer: TextCompletion
) -> AsyncGenerator[bytes, None]:
    async for prompt, event in events:
        yield b"".join(map(serving.data_frame, answer.add(prompt, event)))
    answer.check()
    yield b"".join(map(serving.data_frame, answer.last())) + serving.DONE


class _Failure:
    """The last frame of a stream that cannot go on."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __call__(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))

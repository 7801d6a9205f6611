"""POST /v1/audio/transcriptions and /v1/audio/translations: a form in, text out, all at once or in deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import multipart
from stage_runtime.web.translating.audio import subtitles, transcribing
from stage_runtime.web.translating.audio.transcribing import Transcript

_TEXT: Final = b"text/plain; charset=utf-8"


class Transcriptions:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def transcribe(self, exchange: Exchange) -> None:
        """POST /v1/audio/transcriptions."""
        await self._answer(exchange, translates=False)

    async def translate(self, exchange: Exchange) -> None:
        """POST /v1/audio/translations."""
        await self._answer(exchange, translates=True)

    async def _answer(self, exchange: Exchange, *, translates: bool) -> None:
        context, settings = self._context, self._context.settings
        request_id = exchange.id
        form_type = _form_type(exchange)
        call = await context.read(
            exchange, lambda raw: transcribing.read(multipart.parse(raw, form_type), translates=translates)
        )
        request = transcribing.request(call, request_id)
        timeout_s = exchange.timeout_s(call.fields.timeout)
        transcript = Transcript()
        if request.stream:
            encoder = _DeltaEncoder(transcript, request_id)
            await serving.stream(context.manager, exchange, request, timeout_s, encoder, settings.heartbeat_s)
            return
        await serving.collect(context.manager, exchange, request, timeout_s, lambda event: list(transcript.add(event)))
        transcript.check()
        if call.format == "text":
            await exchange.reply(transcript.text.encode(), content_type=_TEXT)
            return
        file_s = await context.codecs.duration_s(call.file.data)
        if call.format in subtitles.FORMATS:
            await exchange.reply(transcript.subtitles(call, file_s).encode(), content_type=_TEXT)
            return
        await exchange.reply(msgspec.json.encode(transcript.answer(call, file_s)))


class _DeltaEncoder:
    def __init__(self, transcript: Transcript, request_id: str) -> None:
        self._transcript = transcript
        self._request_id = request_id

    async def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        async for event in events:
            yield b"".join(map(serving.data_frame, self._transcript.add(event)))
        self._transcript.check()
        yield serving.data_frame(self._transcript.done()) + serving.DONE

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))


def _form_type(exchange: Exchange) -> str:
    given = exchange.only_header(b"content-type")
    if given is None or not multipart.is_form(given):
        problem = "content-type: recordings come as multipart/form-data with a file"
        raise RequestRefused(415, "invalid_request", problem, param="content-type")
    return given

"""POST /v1/audio/speech: sound sent while it is made, as bytes of a file or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.sound import formats
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.web.spoken import query
from stage_runtime.web.spoken.body import StreamedText
from stage_runtime.web.spoken.pieces import delta_frame, send_file, sound_pieces
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.web.translating.audio import speaking
from stage_runtime.web.translating.audio.base64pieces import Base64Pieces


class Speech:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._streamed = StreamedText(context)

    async def speak(self, exchange: Exchange) -> None:
        """POST /v1/audio/speech: a JSON body, or a text that is spoken while it comes."""
        if query.is_text(exchange.only_header(b"content-type")):
            await self._streamed.speak(exchange)
            return
        context, settings = self._context, self._context.settings
        request_id = exchange.id
        body = await context.read_json(exchange, speaking.decode)
        request = speaking.request(body, request_id)
        timeout_s = exchange.timeout_s(body.timeout)
        format = speaking.format_name(body)
        if body.stream_format == "sse":
            encoder = _SoundEncoder(context.codecs, format, request_id, speaking.without_sound(body))
            await serving.stream(context.manager, exchange, request, timeout_s, encoder, settings.heartbeat_s)
            return
        async with serving.admitted(context.manager, exchange, request, timeout_s) as events:
            pieces = sound_pieces(events, Outputs(), context.codecs, format, speaking.without_sound(body))
            await send_file(exchange, formats.FORMATS[format].mime, pieces)


class _SoundEncoder:
    """``stream_format: sse``."""

    def __init__(self, codecs: CodecPool, format: str, request_id: str, without_sound: RequestError) -> None:
        self._codecs = codecs
        self._format = format
        self._request_id = request_id
        self._without_sound = without_sound

    async def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        outputs, texts = Outputs(), Base64Pieces()
        async with aclosing(sound_pieces(events, outputs, self._codecs, self._format, self._without_sound)) as pieces:
            async for piece in pieces:
                yield delta_frame(texts.add(piece))
        yield delta_frame(texts.finish())
        yield serving.data_frame({"type": "speech.audio.done", "usage": outputs.tokens()}) + serving.DONE

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))

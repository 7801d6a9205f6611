"""POST /v1/audio/speech: sound sent while it is made, as bytes of a file or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.sound import formats
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.web.translating import speaking
from stage_runtime.web.translating.base64pieces import Base64Pieces
from stage_runtime.web.translating.outputs import Outputs
from stage_runtime.wire.values import Audio


class Speech:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def speak(self, exchange: Exchange) -> None:
        """POST /v1/audio/speech."""
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
            await _send(exchange, formats.FORMATS[format].mime, pieces)


async def _send(exchange: Exchange, mime: str, pieces: AsyncGenerator[bytes, None]) -> None:
    """The head goes out with the first piece; an error after it tears the answer off, which clients notice."""
    async with aclosing(pieces):
        async for piece in pieces:
            if not exchange.started:
                await exchange.start(mime.encode(), serving.UNBUFFERED)
            await exchange.write(piece)
    await exchange.end()


async def sound_pieces(
    events: AsyncIterator[AnswerEvent],
    outputs: Outputs,
    codecs: CodecPool,
    format: str,
    without_sound: RequestError,
    *,
    whole: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The file's bytes as they become known. Called by `spoken`, too.

    without_sound: what is raised when no terminal gave any sound. whole: one piece, at the end.
    Raises: RequestError: that, or the request failed.
    """
    has_sound = False
    with codecs.encoder(format, whole=whole) as made:
        async for event in events:
            for shown in outputs.take(event):
                if isinstance(shown, Audio):
                    has_sound = True
                    if piece := await made.write(shown, stage=event.stage):
                        yield piece
        outputs.check("speech")
        if not has_sound or (made.empty and isinstance(without_sound, InvalidRequest)):
            raise without_sound
        if piece := await made.finish():
            yield piece


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
                yield _delta(texts.add(piece))
        yield _delta(texts.finish())
        yield serving.data_frame({"type": "speech.audio.done", "usage": outputs.tokens()}) + serving.DONE

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))


def _delta(audio: str) -> bytes:
    """The event of a piece as base64; of an empty one none."""
    return serving.data_frame({"type": "speech.audio.delta", "audio": audio}) if audio else b""

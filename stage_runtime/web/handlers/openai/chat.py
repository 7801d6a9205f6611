"""POST /v1/chat/completions: read, translate, admit, answer. The meaning of fields is in `translating`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web import endpoints, serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.sound.pool import CodecPool, EncodingSession
from stage_runtime.web.translating import media
from stage_runtime.web.translating.generation import chat
from stage_runtime.web.translating.generation.completions import Completion, CompletionChunks
from stage_runtime.wire.values import Audio, Text


class Chat:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        context, settings = self._context, self._context.settings
        request_id = exchange.id
        body = await context.read_json(exchange, chat.decode)
        call = chat.call(body, settings.accepts)
        places = list(media.to_fetch(body.messages))
        fetched = await context.fetcher.fetch(places, exchange.reservation.add) if places else {}
        given = body, request_id, fetched, settings.accepts, context.chosen(body.model)
        request = await endpoints.apart(exchange, chat.request, *given)
        timeout_s = exchange.timeout_s(body.timeout)
        created, model = int(time.time()), context.shown(body.model)
        if call.stream:
            chunks = CompletionChunks(call=call, request_id=request_id, model=model, created=created)
            encoder = _ChunkEncoder(chunks, request_id, context.codecs, call.audio)
            await serving.stream(context.manager, exchange, request, timeout_s, encoder, settings.heartbeat_s)
            return
        answer = Completion(call=call, request_id=request_id, model=model, created=created)
        await serving.collect(context.manager, exchange, request, timeout_s, answer.add)
        answer.check()
        sound = await self._sound(call.audio, answer) if call.audio is not None and answer.audio else None
        await exchange.reply(msgspec.json.encode(answer.finish(sound)))

    async def _sound(self, format: str, answer: Completion) -> bytes:
        with self._context.codecs.encoder(format, whole=True) as made:
            for stage, piece in answer.audio:
                await made.write(piece, stage=stage)
            return await made.finish()


class _ChunkEncoder:
    """Chunks as frames; ``[DONE]`` only after a stream that is whole."""

    def __init__(self, chunks: CompletionChunks, request_id: str, codecs: CodecPool, format: str | None) -> None:
        self._chunks = chunks
        self._request_id = request_id
        self._codecs = codecs
        self._format = format
        self._texts: dict[int, serving.TextFrame] = {}  #: Texts by choice.

    async def frames(self, events: AsyncIterator[AnswerEvent]) -> AsyncGenerator[bytes, None]:
        with self._codecs.encoder(self._format or "") as made:
            async for event in events:
                if (text := self._chunks.plain_text(event)) is not None:
                    yield self._text(text)
                elif self._format is None:  # no sound is among them
                    yield b"".join(map(serving.data_frame, self._chunks.add(event)))
                else:
                    yield b"".join([frame async for frame in self._added(event, made)])
            rest = await made.finish() if self._chunks.check() else b""
            yield b"".join(map(serving.data_frame, self._chunks.finish(rest))) + serving.DONE

    def _text(self, given: Text) -> bytes:
        frame = self._texts.get(given.choice)
        if frame is None:
            frame = serving.TextFrame(self._chunks.with_text(given.choice), "content")
            self._texts[given.choice] = frame
        return frame.of(given.text)

    async def _added(self, event: AnswerEvent, made: EncodingSession) -> AsyncIterator[bytes]:
        for shown in self._chunks.add(event):
            if not isinstance(shown, Audio):
                yield serving.data_frame(shown)
                continue
            for chunk in self._chunks.sound(await made.write(shown, stage=event.stage)):
                yield serving.data_frame(chunk)

    def fail(self, error: RequestError) -> bytes:
        return serving.data_frame(errors.body(error, self._request_id))

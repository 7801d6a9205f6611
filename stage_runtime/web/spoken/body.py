"""``POST /v1/audio/speech`` with a body of ``text/plain``: its sentences become one file while the text still comes.

One task reads the body, the request's own one asks for a sentence when the one before is spoken, and writes its sound.
The reader stops while `script.MAX_CHARS` wait to be spoken, so a fast writer is held back by its own connection.
"""

from __future__ import annotations

import asyncio
import codecs
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web import serving
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.sound import formats
from stage_runtime.web.sound.pool import EncodingSession
from stage_runtime.web.spoken import query
from stage_runtime.web.spoken.asking import sentence_events
from stage_runtime.web.spoken.pieces import delta_frame, send_file
from stage_runtime.web.spoken.script import MAX_CHARS, Script, Sentence, UtteranceEnd
from stage_runtime.web.spoken.spoken_messages import InputDone, InputText, SpeechConfig
from stage_runtime.web.translating.answer_outputs import Outputs, no_sound
from stage_runtime.web.translating.audio.base64pieces import Base64Pieces
from stage_runtime.wire.values import Audio

_SLICE: Final = 4096  # characters that are cut into sentences at once: MAX_CHARS are passed by no more than these
_LONGEST_ID: Final = 112  # of a request; its sentences have ids that begin with it


class StreamedText:
    """The route for texts. JSON bodies are `handlers.openai.speech.Speech`'s."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def speak(self, exchange: Exchange) -> None:
        """Answer with the sound of the body.

        Raises: RequestError: before the first sound; one that comes later ends the answer.
        """
        query.check_charset(exchange.only_header(b"content-type") or "")
        asked = query.read(exchange.scope.get("query_string", b""))
        config = query.config(asked)
        self._context.manager.check_room()
        text = _StreamedSpeech(self._context, exchange, config, exchange.timeout_s(None))
        async with aclosing(text.sound()) as pieces:
            if asked.stream_format == "sse":
                frames, heartbeat_s = _frames(pieces, text), self._context.settings.heartbeat_s
                await serving.send_frames(exchange, frames, lambda error: _failure(error, exchange), heartbeat_s)
            else:
                await send_file(exchange, formats.FORMATS[config.format].mime, pieces)


async def _frames(pieces: AsyncGenerator[bytes, None], text: _StreamedSpeech) -> AsyncGenerator[bytes, None]:
    encoded = Base64Pieces()
    async for piece in pieces:
        yield delta_frame(encoded.add(piece))
    yield delta_frame(encoded.finish())
    yield serving.data_frame({"type": "speech.audio.done", "usage": text.usage}) + serving.DONE


def _failure(error: RequestError, exchange: Exchange) -> bytes:
    return serving.data_frame(errors.body(error, exchange.request_id))


class _StreamedSpeech:
    """One body, its text, and the sentence that is spoken."""

    def __init__(
        self, context: HandlerContext, exchange: Exchange, config: SpeechConfig, timeout_s: float | None
    ) -> None:
        """timeout_s: of the request's header, for each sentence."""
        self._context = context
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._format = config.format
        self._script = Script()
        self._script.take(config)
        self._more = asyncio.Event()  #: A sentence waits, or the text has ended.
        self._room = asyncio.Event()  #: Fewer characters wait than before.
        self.usage = Outputs().tokens()  #: The usage of all sentences so far.

    async def sound(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the file as they become known.

        Raises: RequestError: the text cannot be read on, a sentence failed, or nothing of it is pronounced.
        """
        reading = asyncio.get_running_loop().create_task(self._read())
        reading.add_done_callback(lambda _: self._more.set())
        try:
            with self._context.codecs.encoder(self._format) as made:
                while (sentence := await self._next(reading)) is not None:
                    async with aclosing(self._speak(sentence, made)) as pieces:
                        async for piece in pieces:
                            yield piece
                if made.empty:
                    raise InvalidRequest("the body: expected a text with something to pronounce")
                if piece := await made.finish():
                    yield piece
        finally:
            self._exchange.unwatch()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _speak(self, sentence: Sentence, made: EncodingSession) -> AsyncGenerator[bytes, None]:
        outputs, sounded = Outputs(), False
        manager, exchange = self._context.manager, self._exchange
        asked = sentence_events(
            manager, exchange, sentence, self._id_of(sentence), self._timeout_s, watch=exchange.watch
        )
        async with aclosing(asked) as events:
            async for event in events:
                for shown in outputs.take(event):
                    if isinstance(shown, Audio):
                        sounded = True
                        if piece := await made.write(shown, stage=event.stage):
                            yield piece
        outputs.check("speech")
        if not sounded and any(character.isalnum() for character in sentence.text):
            raise no_sound()
        self.usage = {name: count + outputs.tokens()[name] for name, count in self.usage.items()}

    def _id_of(self, sentence: Sentence) -> str:
        own = self._exchange.id
        begin = own if len(own) <= _LONGEST_ID else f"speech-{secrets.token_hex(16)}"
        return f"{begin}.{sentence.index}"

    async def _next(self, reading: asyncio.Task[None]) -> Sentence | None:
        """The sentence that is to be spoken now; None: all is spoken. Raises: what ended ``reading`` early."""
        while True:
            if reading.done():
                reading.result()
            found = self._script.next()
            self._room.set()
            match found:
                case Sentence():
                    self._exchange.reservation.keep(self._script.waiting_chars)
                    return found
                case UtteranceEnd():
                    return None
                case None:
                    self._more.clear()
                    await self._more.wait()

    async def _read(self) -> None:
        """Read the body to its end. Raises: RequestError: it cannot be read on."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        async with aclosing(self._exchange.body_pieces(self._context.settings.text_idle_s)) as pieces:
            async for piece in pieces:
                await self._take(_decoded(decoder, piece))
        await self._take(_decoded(decoder, b"", final=True))
        self._script.take(InputDone())

    async def _take(self, text: str) -> None:
        reservation = self._exchange.reservation
        for start in range(0, len(text), _SLICE):
            part = text[start : start + _SLICE]
            while self._script.has_next and self._script.waiting_chars + len(part) > MAX_CHARS:
                self._room.clear()
                await self._room.wait()
            reservation.expect(self._script.waiting_chars + len(part))
            self._script.take(InputText(text=part))
            reservation.keep(self._script.waiting_chars)
            self._more.set()


def _decoded(decoder: codecs.IncrementalDecoder, piece: bytes, *, final: bool = False) -> str:
    """Raises: InvalidRequest: it is not UTF-8."""
    try:
        return decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body: expected a text in UTF-8, got other bytes ({error.reason})") from None

"""The I/O around a `Script`: its socket, and one request for each sentence. Made for each WebSocket.

One task reads the client, another one speaks: a sentence is asked for when the one before is spoken, and what the
client does not read stays at the stages. Nothing here has a timer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from stage_runtime.errors import RequestError
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges import web_sockets
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.web_sockets import SocketClosed, WebSocket
from stage_runtime.web.sound import formats
from stage_runtime.web.spoken import spoken_messages
from stage_runtime.web.spoken.asking import sentence_events, spoken_body
from stage_runtime.web.spoken.pieces import sound_pieces
from stage_runtime.web.spoken.script import Script, Sentence, UtteranceEnd
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.web.translating.audio import speaking

_log = logging.getLogger(__name__)


class SpeechStream:
    """GET /v1/audio/speech/stream."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def refuse(self, exchange: Exchange) -> None:
        """A request that asks for no WebSocket."""
        raise web_sockets.upgrade_required(exchange.path)

    async def converse(self, socket: WebSocket) -> None:
        """One connection, from its handshake to its end."""
        timeout_s = socket.exchange.timeout_s(None)
        await socket.accept(None)
        await Room(self._context, socket, timeout_s).run()


class Room:
    """One connection, its text, and the sentence that is spoken."""

    def __init__(self, context: HandlerContext, socket: WebSocket, timeout_s: float | None) -> None:
        """timeout_s: of the handshake's header, for each sentence."""
        self._context = context
        self._socket = socket
        self._timeout_s = timeout_s
        self._script = Script()
        self._more = asyncio.Event()  #: Something may be spoken, or it is time to end.
        self._sending = asyncio.Lock()
        self._ending = False  #: The server drains: the connection ends between two utterances.

    async def run(self) -> None:
        """Speak until the client is gone or has closed, or the server drains."""
        speaking_task = asyncio.get_running_loop().create_task(self._speak())
        try:
            self._socket.watch_end(self._end)
            while (message := await self._socket.receive()) is not None:
                await self._take(message)
        except SocketClosed:
            pass
        finally:
            self._socket.watch_end(None)
            speaking_task.cancel()
            await asyncio.gather(speaking_task, return_exceptions=True)

    async def _take(self, raw: str | bytes) -> None:
        reservation = self._socket.exchange.reservation
        try:
            reservation.expect(self._script.waiting_chars + len(raw))
            self._script.take(spoken_messages.read(raw))
        except RequestError as error:
            await self._send(spoken_messages.error_shown(error))
        reservation.keep(self._script.waiting_chars)
        self._more.set()

    def _end(self) -> None:
        self._ending = True
        self._more.set()

    async def _speak(self) -> None:
        """All that the script has, in turn, until the connection ends."""
        try:
            while True:
                found = self._script.next()
                self._socket.exchange.reservation.keep(self._script.waiting_chars)
                match found:
                    case Sentence() as sentence:
                        await self._speak_one(sentence)
                    case UtteranceEnd(utterance=utterance, sentences=count):
                        place = {"utterance_index": utterance, "total_sentences": count}
                        await self._send({"type": "session.done", **place})
                    case None if self._script.closing:
                        await self._socket.close(web_sockets.DONE, "all is spoken")
                        return
                    case None if self._ending and self._script.idle:
                        await self._socket.close(web_sockets.GOING_AWAY, "the server is going away: connect again")
                        return
                    case None:
                        self._more.clear()
                        await self._more.wait()
        except SocketClosed:
            pass  # the reading task ends the connection
        except Exception:
            _log.exception("request %s: speech failed", self._socket.exchange.request_id)
            await self._socket.close(web_sockets.INTERNAL_ERROR, "internal error")

    async def _speak_one(self, sentence: Sentence) -> None:
        request_id = f"speech-{secrets.token_hex(16)}"
        place = {"utterance_index": sentence.utterance, "sentence_index": sentence.index}
        format = formats.check(sentence.config.format, param="response_format")
        rate = {"sample_rate": formats.PCM_RATE} if format == "pcm" else {}
        begins = {"sentence_text": sentence.text, "format": format, **rate, "request_id": request_id}
        await self._send({"type": "audio.start", **place, **begins})
        nbytes, failed = 0, False
        try:
            async with aclosing(self._sound(sentence, request_id)) as pieces:
                async for piece in pieces:
                    nbytes += len(piece)
                    await self._send(piece)
        except RequestError as error:
            failed = True
            await self._send(spoken_messages.error_shown(error, **place))
        await self._send({"type": "audio.done", **place, "total_bytes": nbytes, "error": failed})

    async def _sound(self, sentence: Sentence, request_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes of one sentence's file. Its request ends with the generator.

        Raises: RequestError.
        """
        body, context = spoken_body(sentence), self._context
        asked = sentence_events(context.manager, self._socket.exchange, sentence, request_id, self._timeout_s)
        async with aclosing(asked) as events:
            made = sound_pieces(
                events,
                Outputs(),
                context.codecs,
                speaking.format_name(body),
                speaking.without_sound(body),
                whole=not sentence.config.stream_audio,
            )
            async with aclosing(made) as pieces:
                async for piece in pieces:
                    yield piece

    async def _send(self, message: dict[str, Any] | bytes) -> None:
        """Raises: SocketClosed."""
        async with self._sending:
            if isinstance(message, bytes):
                await self._socket.send_bytes(message)
            else:
                await self._socket.send(msgspec.json.encode(message).decode())

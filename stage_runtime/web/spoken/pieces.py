"""The sound of a request as bytes of a file, as they become known. Called by `handlers.openai.speech` and here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web import serving
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.wire.values import Audio


async def sound_pieces(
    events: AsyncIterator[AnswerEvent],
    outputs: Outputs,
    codecs: CodecPool,
    format: str,
    without_sound: RequestError,
    *,
    whole: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The file's bytes as they become known.

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


async def send_file(exchange: Exchange, mime: str, pieces: AsyncGenerator[bytes, None]) -> None:
    """The head goes out with the first piece; an error after it tears the answer off, which clients notice."""
    async with aclosing(pieces):
        async for piece in pieces:
            if not exchange.started:
                await exchange.start(mime.encode(), serving.UNBUFFERED)
            await exchange.write(piece)
    await exchange.end()


def delta_frame(audio: str) -> bytes:
    """The event of a piece as base64; of an empty one none."""
    return serving.data_frame({"type": "speech.audio.delta", "audio": audio}) if audio else b""

"""The code of OpenAI's routes: for each path of the contract's table, its handler and the types of body and answers.

`routes.public` makes routes of both. A test fails while one of the two tables lacks a path of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

from omnipipeline_spec.types.routes import ROUTES, SOCKETS
from stage_runtime.web import answers
from stage_runtime.web.answers import EVENTS, JSON, SOUND, TEXT, ResponseType
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.web_sockets import WebSocket
from stage_runtime.web.handlers.openai.chat import Chat
from stage_runtime.web.handlers.openai.completions import Completions
from stage_runtime.web.handlers.openai.images import ImageRoutes
from stage_runtime.web.handlers.openai.responses import Responses
from stage_runtime.web.handlers.openai.speech import Speech
from stage_runtime.web.handlers.openai.tokens import Tokens
from stage_runtime.web.handlers.openai.transcriptions import Transcriptions
from stage_runtime.web.handlers.openai.vectors import Encoders
from stage_runtime.web.reading import schemas
from stage_runtime.web.reading.responses_body import ResponsesBody
from stage_runtime.web.realtime.room import Realtime
from stage_runtime.web.routing import FORM, Route, RouteHandler
from stage_runtime.web.spoken.query import SpeechQuery
from stage_runtime.web.spoken.room import SpeechStream


class SocketEndpoint(Protocol):
    """The application that answers the path of a WebSocket."""

    async def refuse(self, exchange: Exchange) -> None:
        """Answer a request that asks for no WebSocket."""

    async def converse(self, socket: WebSocket) -> None:
        """Serve one connection, from its handshake to its end."""


class RouteCode(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `routing.Route` that the contract's table does not have."""

    handler: Callable[[HandlerContext], RouteHandler]
    body: Any
    answers: tuple[ResponseType, ...]
    media: tuple[str, ...] = (JSON,)
    file: str | None = None
    text_query: Any = None


CODE: Final[dict[str, RouteCode]] = {
    "/v1/chat/completions": RouteCode(
        handler=lambda context: Chat(context).complete,
        body=schemas.ChatBody,
        answers=(ResponseType((answers.ChatCompletion,)), ResponseType((answers.ChatCompletionChunk,), EVENTS)),
    ),
    "/v1/responses": RouteCode(
        handler=lambda context: Responses(context).respond,
        body=ResponsesBody,
        answers=(ResponseType((answers.Response,)), ResponseType((answers.ResponseEvent,), EVENTS)),
    ),
    "/v1/completions": RouteCode(
        handler=lambda context: Completions(context).complete,
        body=schemas.CompletionBody,
        answers=(ResponseType((answers.TextCompletion,)), ResponseType((answers.TextCompletion,), EVENTS)),
    ),
    "/v1/embeddings": RouteCode(
        handler=lambda context: Encoders(context).embed,
        body=schemas.EmbeddingBody,
        answers=(ResponseType((answers.Embeddings,)),),
    ),
    "/v1/rerank": RouteCode(
        handler=lambda context: Encoders(context).rerank,
        body=schemas.RerankBody,
        answers=(ResponseType((answers.Ranking,)),),
    ),
    "/v1/score": RouteCode(
        handler=lambda context: Encoders(context).score,
        body=schemas.ScoreBody,
        answers=(ResponseType((answers.PairScores,)),),
    ),
    "/v1/audio/speech": RouteCode(
        handler=lambda context: Speech(context).speak,
        body=schemas.SpeechBody,
        answers=(*SOUND, ResponseType((answers.SpeechDelta, answers.SpeechDone), EVENTS)),
        text_query=SpeechQuery,
    ),
    "/v1/audio/transcriptions": RouteCode(
        handler=lambda context: Transcriptions(context).transcribe,
        body=schemas.TranscriptionFields,
        answers=(
            ResponseType((answers.Transcription, answers.VerboseTranscription)),
            ResponseType((answers.TranscriptDelta, answers.TranscriptDone), EVENTS),
            ResponseType(media=TEXT),
        ),
        media=(FORM,),
        file="file",
    ),
    "/v1/audio/translations": RouteCode(
        handler=lambda context: Transcriptions(context).translate,
        body=schemas.TranscriptionFields,
        answers=(
            ResponseType((answers.Transcription, answers.VerboseTranscription)),
            ResponseType((answers.TranscriptDelta, answers.TranscriptDone), EVENTS),
            ResponseType(media=TEXT),
        ),
        media=(FORM,),
        file="file",
    ),
    "/v1/images/generations": RouteCode(
        handler=lambda context: ImageRoutes(context).generate,
        body=schemas.ImageBody,
        answers=(ResponseType((answers.Images,)),),
    ),
    "/v1/images/edits": RouteCode(
        handler=lambda context: ImageRoutes(context).edit,
        body=schemas.ImageEditFields,
        answers=(ResponseType((answers.Images,)),),
        media=(FORM,),
        file="image",
    ),
    "/tokenize": RouteCode(
        handler=lambda context: Tokens(context).tokenize,
        body=schemas.TokenizeBody,
        answers=(ResponseType((answers.Tokens,)),),
    ),
    "/detokenize": RouteCode(
        handler=lambda context: Tokens(context).detokenize,
        body=schemas.DetokenizeBody,
        answers=(ResponseType((answers.Detokenized,)),),
    ),
}
#: The code of each path of `SOCKETS`.
SOCKET_CODE: Final[dict[str, Callable[[HandlerContext], SocketEndpoint]]] = {
    "/v1/realtime": Realtime,
    "/v1/audio/speech/stream": SpeechStream,
}


def made(context: HandlerContext) -> Iterator[Route]:
    """The routes, whether this pipeline serves them or not."""
    for known in ROUTES:
        code = CODE[known.path]
        yield Route(
            "POST",
            known.path,
            known.summary,
            code.handler(context),
            body=code.body,
            media=code.media,
            file=code.file,
            text_query=code.text_query,
            answers=code.answers,
            serves=known.serves,
            ids=known.ids,
        )
    for socket in SOCKETS:
        endpoint = SOCKET_CODE[socket.path](context)
        yield Route(
            "GET",
            socket.path,
            socket.summary,
            endpoint.refuse,
            serves=socket.serves,
            ids=socket.serves,
            socket=endpoint.converse,
        )

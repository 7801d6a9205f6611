"""The OpenAI routes that a pipeline can serve: the value of ``serves``, the path, and a request that shows each.

Here: facts that the contract, `omni up` and the HTTP server share. Not here: how a route reads a body and answers (the
runtime's `web/`), which has one row for each path of this table.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: Values of a pipeline's ``serves``.
Served = Literal[
    "chat",
    "completion",
    "embedding",
    "score",
    "speech",
    "transcription",
    "translation",
    "realtime",
    "tokenize",
    "image",
]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A request to paste into a shell. The model's name is added."""

    body: dict[str, Any] = {}  #: JSON; of a form: fields beside the file.
    file: bool = False  #: A form with a recording as ``file``.
    saved_as: str = ""  #: The answer is a file.


class OpenAIRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One path. All are POST."""

    path: str
    serves: Served  #: The value of ``serves`` that opens it.
    summary: str
    kind: str  #: `OmniRequest.kind`, as stages see its requests.
    ids: str  #: Prefix of the ids of its requests.
    example: Example
    sound: bool = False  #: Its requests or answers are sound.


#: Routes in the order in which `omni up` prefers their examples.
ROUTES: tuple[OpenAIRoute, ...] = (
    OpenAIRoute(
        path="/v1/chat/completions",
        serves="chat",
        summary="OpenAI's chat completions",
        kind="chat",
        ids="chatcmpl",
        example=Example(body={"messages": [{"role": "user", "content": "hello there"}]}),
    ),
    OpenAIRoute(
        path="/v1/responses",
        serves="chat",
        summary="OpenAI's responses, without those that need a store",
        kind="chat",
        ids="resp",
        example=Example(body={"input": "hello there"}),
    ),
    OpenAIRoute(
        path="/v1/completions",
        serves="completion",
        summary="OpenAI's completions of texts",
        kind="completion",
        ids="cmpl",
        example=Example(body={"prompt": "hello there"}),
    ),
    OpenAIRoute(
        path="/v1/embeddings",
        serves="embedding",
        summary="OpenAI's embeddings",
        kind="embedding",
        ids="embd",
        example=Example(body={"input": "hello there"}),
    ),
    OpenAIRoute(
        path="/v1/rerank",
        serves="score",
        summary="Documents by how well they answer a query, as Jina's and Cohere's",
        kind="score",
        ids="rerank",
        example=Example(body={"query": "who is there?", "documents": ["hello there", "it rains"]}),
    ),
    OpenAIRoute(
        path="/v1/score",
        serves="score",
        summary="How well texts go together, as vLLM's",
        kind="score",
        ids="score",
        example=Example(body={"text_1": "who is there?", "text_2": ["hello there", "it rains"]}),
    ),
    OpenAIRoute(
        path="/v1/audio/speech",
        serves="speech",
        summary="OpenAI's speech",
        kind="speech",
        ids="speech",
        example=Example(
            body={"voice": "default", "input": "hello there", "response_format": "wav"}, saved_as="answer.wav"
        ),
        sound=True,
    ),
    OpenAIRoute(
        path="/v1/audio/transcriptions",
        serves="transcription",
        summary="OpenAI's transcriptions",
        kind="transcription",
        ids="transcription",
        example=Example(file=True),
        sound=True,
    ),
    OpenAIRoute(
        path="/v1/audio/translations",
        serves="translation",
        summary="OpenAI's translations of speech to English",
        kind="translation",
        ids="translation",
        example=Example(file=True),
        sound=True,
    ),
    OpenAIRoute(
        path="/v1/images/generations",
        serves="image",
        summary="OpenAI's images, as base64",
        kind="image",
        ids="img",
        example=Example(body={"prompt": "hello there", "size": "256x256"}),
    ),
    OpenAIRoute(
        path="/v1/images/edits",
        serves="image",
        summary="OpenAI's edits of images, as base64",
        kind="image",
        ids="img",
        example=Example(body={"prompt": "hello there"}),
    ),
    OpenAIRoute(
        path="/tokenize",
        serves="tokenize",
        summary="Tokens of a text or of messages, as vLLM's",
        kind="tokenize",
        ids="tokenize",
        example=Example(body={"prompt": "hello there"}),
    ),
    OpenAIRoute(
        path="/detokenize",
        serves="tokenize",
        summary="The text of tokens, as vLLM's",
        kind="detokenize",
        ids="detokenize",
        example=Example(body={"tokens": [1, 2, 3]}),
    ),
)


class SocketRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A path that is opened as a WebSocket."""

    path: str
    serves: Served  #: The same as of `OpenAIRoute`.
    summary: str


SOCKETS: tuple[SocketRoute, ...] = (
    SocketRoute(path="/v1/realtime", serves="realtime", summary="OpenAI's realtime events, on a WebSocket"),
    SocketRoute(
        path="/v1/audio/speech/stream",
        serves="speech",
        summary="Text in pieces to sound, on a WebSocket, as vLLM-Omni's",
    ),
)
#: How many values ``serves`` can have.
MAX_SERVED = len({one.serves for one in ROUTES} | {one.serves for one in SOCKETS})

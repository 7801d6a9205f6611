"""The values that stages exchange with each other and with clients: requests, payloads, chunks, results, client
outputs.

Values are plain data. How they become bytes is `codec`'s business, how tensors travel is `payloads.encoding`'.
Authors meet these names through `stage_runtime` itself. No torch and no numpy here: a tensor is whatever carries
``dtype`` and ``shape``; where torch is not wanted (the coordinator), it arrives as a `RawTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from stage_runtime.errors import InvalidRequest

RequestKind = Literal[
    "chat",
    "completion",
    "embedding",
    "score",
    "speech",
    "transcription",
    "translation",
    "tokenize",
    "detokenize",
    "image",
    "pipeline",
]
StructType = TypeVar("StructType", bound=type[msgspec.Struct])

#: Struct types that may travel, by the name that goes over the wire. Filled by `message`, never by a peer.
REGISTRY: dict[str, type[msgspec.Struct]] = {}


def message(cls: StructType) -> StructType:
    """Register a ``msgspec.Struct`` type, so that its instances may stand in data and metadata.

    The wire carries ``module:qualname`` and the fields. A process that has not imported the type sees a dict.
    Raises: TypeError: ``cls`` is not a Struct type. ValueError: another type has the name already.
    """
    if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)):
        raise TypeError(f"@omni.message needs a msgspec.Struct type, not {cls!r}")
    name = message_name(cls)
    known = REGISTRY.setdefault(name, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"message {name!r} is registered already")
    REGISTRY[name] = cls
    return cls


def message_name(cls: type[msgspec.Struct]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


@message
class Text(msgspec.Struct, frozen=True):
    """Text for the client: a piece when streamed, or all of it in a result.

    choice: which of several answers it belongs to. logprobs: of its tokens, as OpenAI's ``logprobs.content``.
    """

    text: str
    choice: int = 0
    logprobs: list[Any] | None = None


@message
class Reasoning(msgspec.Struct, frozen=True):
    """The model's thoughts before its answer, for the client: a piece when streamed, or all of it in a result.

    choice: which of several answers it belongs to.
    """

    text: str
    choice: int = 0


@message
class Audio(msgspec.Struct, frozen=True):
    """Sound for the client.

    samples: f32 in -1..1, ``[n]`` or ``[n, channels]``, a torch tensor or a numpy array.
    """

    samples: Any
    sample_rate: int


@message
class Usage(msgspec.Struct, frozen=True):
    """Token counts, added up over all that a request's terminals report.

    cached_tokens: of the prompt's, those that were found in a cache. prompt_image_tokens, prompt_audio_tokens: of the
    prompt's, those of pictures and of sound. completion_audio_tokens: of the completion's, those of sound. All others
    are text. reasoning_tokens: of the completion's, those of thinking.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_image_tokens: int = 0
    prompt_audio_tokens: int = 0
    completion_audio_tokens: int = 0
    reasoning_tokens: int = 0


@message
class Finish(msgspec.Struct, frozen=True):
    """Why generation ended, in OpenAI's words: ``stop``, ``length``, ``tool_calls``, ``content_filter``."""

    reason: str
    choice: int = 0


@message
class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model wants the client to make, whole. arguments: JSON.

    index: its place among the calls of its stage; a client gets all calls of a choice numbered in the order they came.
    """

    id: str
    name: str
    arguments: str
    index: int = 0
    choice: int = 0


@message
class Note(msgspec.Struct, frozen=True):
    """Something about the request that a client may show but need not: a transcript, a chosen document."""

    name: str
    value: Any


@message
class Vectors(msgspec.Struct, frozen=True):
    """Vectors for the client, one for each input of an embedding request, in order.

    values: finite numbers ``[n, dimensions]``, a torch tensor or a numpy array.
    """

    values: Any


@message
class Image(msgspec.Struct, frozen=True):
    """A picture for the client of an image request: a file as its ``mime`` says, one for each that is asked for."""

    data: bytes
    mime: str = "image/png"


@message
class Scores(msgspec.Struct, frozen=True):
    """Scores for the client: how well the texts of each pair of a score request go together, in order."""

    values: list[float]


class RawTensor(msgspec.Struct, frozen=True):
    """A tensor where torch is not imported.

    dtype: torch's name without the prefix (``float32``, ``bfloat16``); data: its C-contiguous bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    kind: Literal["torch", "numpy"] = "torch"


class Media(msgspec.Struct, frozen=True):
    """One audio, image or video part of a request."""

    type: str
    mime: str
    data: bytes


@message
class OmniRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The client's request. Part of every payload and of a stream's first chunk; read-only.

    model: that an OpenAI request names, where it is not the pipeline's own name: stages with adapters look at it.
    """

    id: str
    kind: RequestKind = "pipeline"
    inputs: Any = None
    params: dict[str, Any] = {}
    modalities: list[str] = []
    stream: bool = False
    metadata: dict[str, Any] = {}
    model: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """The chat messages, each ``{role, content: [parts]}``; empty when the request has none.

        Raises: InvalidRequest: a pipeline's client has sent something else.
        """
        inputs = self.inputs
        found = inputs.get("messages") if isinstance(inputs, Mapping) else None
        return [_with_parts(at, item) for at, item in enumerate(found)] if isinstance(found, list) else []

    def last_text(self) -> str:
        """The text to answer: of the last user message, of a speech request, or of a pipeline request's inputs."""
        if isinstance(self.inputs, str):
            return self.inputs
        for item in reversed(self.messages()):
            if item.get("role") == "user":
                return " ".join(_text_of(part) for part in item["content"] if part.get("type") == "text")
        if isinstance(self.inputs, Mapping) and isinstance(self.inputs.get("text"), str):
            return str(self.inputs["text"])
        return ""

    def media(self, type: str | None = None) -> list[Media]:
        """The audio, image and video parts in order; of one ``type`` when given."""
        return [part for part in self._all_media() if type is None or part.type == type]

    def cancelled(self) -> bool:
        """True once the answer is not needed any more: aborted, timed out, or its coordinator gone."""
        probe: Callable[[], bool] | None = self.__dict__.get("_cancelled")
        return probe() if probe is not None else False

    def _all_media(self) -> Iterator[Media]:
        for item in self.messages():
            for part in item["content"]:
                if part.get("type") in ("audio", "image", "video") and "data" in part:
                    yield Media(part["type"], part.get("mime", ""), part["data"])
        if (
            self.kind in ("transcription", "translation")
            and isinstance(self.inputs, Mapping)
            and "audio" in self.inputs
        ):
            yield Media("audio", self.inputs.get("mime") or "", self.inputs["audio"])


def _with_parts(at: int, item: Any) -> dict[str, Any]:
    """A message whose content is a list of parts, whatever short form a pipeline request used."""
    where = f"inputs.messages[{at}]"
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{where}: expected an object, got {type(item).__name__}", param="inputs")
    content = item.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Mapping) for part in parts):
        raise InvalidRequest(f"{where}.content: expected a text or a list of objects", param="inputs")
    return {**item, "content": list(parts)}


def _text_of(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("inputs.messages: a part of type text holds no text", param="inputs")
    return text


class StagePayload(msgspec.Struct, kw_only=True, dict=True):
    """A request's data at one stage. ``data`` and every tensor in it are read-only by contract."""

    request: OmniRequest
    data: Any = None

    def detach(self) -> StagePayload:
        """A copy that shares no memory with the relay: keep this one, not ``self``, beyond the call."""
        return StagePayload(request=self.request, data=detached(self.data))


def detached(value: Any) -> Any:
    """A copy of ``value``: its containers, tensors and arrays are its own.

    A part that may not travel stays what it is, for the check that names it: a subclass of dict, what contains itself.
    """
    try:
        return _detached(value)
    except RecursionError:
        return value


def _detached(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _detached(item) for key, item in value.items()}
    if kind is list:
        return [_detached(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return kind(**{name: _detached(getattr(value, name)) for name in value.__struct_fields__})
    if hasattr(kind, "clone") and hasattr(kind, "dtype"):  # torch tensor
        return value.clone()
    return value.copy() if hasattr(kind, "__array_interface__") else value


class Chunk(msgspec.Struct):
    """One piece of a stream: yielded by a producer, received by a consumer.

    A producer sets ``data`` and may set ``to`` (one target or several; None: all of ``streamTo``, or the client
    from a terminal stage without ``streamTo``; ``coordinator``: the client of a terminal stage), ``modality`` and
    ``metadata``. A consumer also reads ``source``, and ``index``: 0.. per request and edge, in order.
    """

    data: Any
    to: str | list[str] | None = None
    modality: str | None = None
    metadata: dict[str, Any] | None = None
    source: str = ""
    index: int = -1
    request: OmniRequest | None = None


class Result(msgspec.Struct, frozen=True):
    """A generator's result: yielded at most once, last; or returned."""

    data: Any = None


class Routed(msgspec.Struct, frozen=True):
    """A route that sends each target its own data."""

    payloads: dict[str, Any]

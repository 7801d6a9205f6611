"""The messages of a client, as msgspec types, and those that it is sent. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.reading import schemas, strictjson

MAX_MESSAGE: Final = 128 << 10  # characters


class SpeechConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``session.config``: how the texts that follow are spoken. The fields of a speech request, and two more."""

    type: str = ""
    model: str | None = None
    voice: str | schemas.VoiceId | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: schemas.Speed | None = None
    seed: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    metadata: dict[str, Any] | None = None
    timeout: schemas.Seconds | None = None
    stream_audio: bool = False  #: The sound of a sentence comes in pieces, while it is made.
    split_granularity: Literal["sentence", "clause", "none"] = "sentence"

    @property
    def format(self) -> str:
        """vLLM-Omni's default is wav."""
        return self.response_format or "wav"


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``input.text``: a piece of the text, cut anywhere."""

    type: str = ""
    text: str


class InputDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``input.done``: the utterance ends; what is left of it is spoken."""

    type: str = ""


class SessionClose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``session.close``: nothing follows; the connection ends once all is spoken."""

    type: str = ""


ClientMessage = SpeechConfig | InputText | InputDone | SessionClose
_TYPES: Final[dict[str, type[ClientMessage]]] = {
    "session.config": SpeechConfig,
    "input.text": InputText,
    "input.done": InputDone,
    "session.close": SessionClose,
}
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(kind) for name, kind in _TYPES.items()
}
_HEAD: Final = msgspec.json.Decoder(dict[str, Any])


def read(raw: str | bytes) -> ClientMessage:
    """A message of the client.

    Raises: RequestError: invalid_request: what is wrong and where; too_large.
    """
    if len(raw) > MAX_MESSAGE:
        raise RequestError("too_large", f"a message has at most {MAX_MESSAGE} characters, this one has {len(raw)}")
    if isinstance(raw, bytes):
        raise InvalidRequest("expected a text message with a JSON object, got a binary one")
    encoded = raw.encode("utf-8", "replace")
    try:
        name = strictjson.decode(encoded, _HEAD).get("type")
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a message is a JSON object: {error}") from None
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        problem = f"expected one of {', '.join(_TYPES)}; got {repr(name)[:80]}"
        raise InvalidRequest(f"type: {problem}", param="type")
    made: ClientMessage = schemas.decode(encoded, kind, _DECODERS[str(name)])
    return made


def error_shown(error: RequestError, **place: int) -> dict[str, Any]:
    """An error as a message; place: which sentence it is about."""
    shown = errors.body(error, None)["error"]
    return {"type": "error", "message": shown["message"], "error": shown, **place}

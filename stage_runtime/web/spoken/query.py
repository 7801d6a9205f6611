"""The parameters of a streamed text: the query of ``POST /v1/audio/speech`` whose body is ``text/plain``. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from urllib.parse import parse_qsl

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.reading import schemas
from stage_runtime.web.sound import formats
from stage_runtime.web.spoken.spoken_messages import SpeechConfig

TEXT: Final = "text/plain"
_MAX_FIELDS: Final = 64
_CHARSETS: Final = frozenset({"", "utf-8", "utf8", "us-ascii"})


class SpeechQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a speech request beside its text, and where the text is cut."""

    model: str | None = None
    voice: str | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: schemas.Speed | None = None
    stream_format: Literal["audio", "sse"] | None = None
    split_granularity: Literal["sentence", "clause", "none"] | None = None
    seed: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    user: str | None = None
    timeout: schemas.Seconds | None = None


def is_text(content_type: str | None) -> bool:
    """Whether a body of this type is a text to speak."""
    return (content_type or "").partition(";")[0].strip().lower() == TEXT


def check_charset(content_type: str) -> None:
    """Raises: RequestRefused (415): the text is not UTF-8."""
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _CHARSETS:
            problem = f"content-type: the text is to be UTF-8, not {value.strip()[:40]}"
            raise RequestRefused(415, "invalid_request", problem, param="content-type")


def read(raw: bytes) -> SpeechQuery:
    """raw: as it stands in the URL.

    Raises: InvalidRequest: a parameter is unknown, wrong or there twice; too many.
    """
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, encoding="utf-8", errors="strict"
        )
    except UnicodeDecodeError:
        raise InvalidRequest("the query is not UTF-8, percent-encoded") from None
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MAX_FIELDS} parameters") from None
    given: dict[str, str] = {}
    for name, value in pairs:
        if name in given:
            raise InvalidRequest(f"{name[:64]}: the parameter occurs twice", param=name[:64])
        given[name] = value
    return schemas.convert(given, SpeechQuery)


def config(query: SpeechQuery) -> SpeechConfig:
    """How each sentence is spoken. A file is an mp3 unless the client asks for another one, as OpenAI's is.

    Raises: InvalidRequest: a format that cannot be had.
    """
    return SpeechConfig(
        voice=query.voice,
        instructions=query.instructions,
        response_format=formats.check(query.response_format or "mp3", param="response_format"),
        speed=query.speed,
        seed=query.seed,
        temperature=query.temperature,
        timeout=query.timeout,
        split_granularity=query.split_granularity or "sentence",
    )

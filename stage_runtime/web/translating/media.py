"""Media inside of chat messages: base64 and data URLs to bytes; which URLs must be fetched. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.reading import schemas
from stage_runtime.wire.values import Media

_MIMES = {"mp3": "audio/mpeg", "m4a": "audio/mp4", "opus": "audio/ogg", "pcm16": "audio/pcm"}
_SUBTYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,63}")  # RFC 6838: of a media type
MIME = re.compile(r"[a-z]+/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")
_HEAD = 256  # characters of a data URL before its comma
#: RFC 4648, 5: the url-safe alphabet differs in two characters. Lines are joined.
_STANDARD = str.maketrans("-_", "+/", " \t\n\v\f\r")
_ESCAPES = (("%2B", "+"), ("%2F", "/"), ("%3D", "="), ("%0A", ""), ("%0D", ""), ("%20", ""))
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
_PERCENT = 64 << 10  # characters of a data URL that is not base64: an SVG; a byte of it may be an object on the way
_URL_PARTS = schemas.ImageUrlPart | schemas.AudioUrlPart | schemas.VideoUrlPart


class MediaUrl(msgspec.Struct, frozen=True):
    """A URL to fetch, the kind of its part, and the parameter that has it."""

    url: str
    type: str
    param: str


def to_fetch(messages: list[schemas.Message]) -> Iterator[MediaUrl]:
    """The http URLs that a chat's messages hold."""
    for param, part in _parts(messages):
        if isinstance(part, _URL_PARTS):
            type, url = _type_and_url(part)
            if not _is_data(url):
                yield MediaUrl(url, type, f"{param}.{type}_url.url")


def content(message: schemas.Message, index: int, fetched: Mapping[str, Media]) -> list[dict[str, Any]]:
    """One message's content as a list of parts, as stages get them. An answer that was spoken or refused gives its
    words.

    Raises: InvalidRequest: a part's data is not base64, or its URL is not a data URL.
    """
    if not message.content and (words := spoken_or_refused(message)) is not None:
        return [{"type": "text", "text": words}]
    if message.content is None:  # beside calls, or an answer that was stopped before its first word
        return [] if message.tool_calls else [{"type": "text", "text": ""}]
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    return [_part(part, f"messages[{index}].content[{place}]", fetched) for place, part in enumerate(message.content)]


def spoken_or_refused(message: schemas.Message) -> str | None:
    """The words of an earlier answer that are not its content: it spoke them, or refused to answer."""
    spoken = None if message.audio is None else message.audio.transcript
    return message.refusal if spoken is None else spoken


def _part(part: schemas.ContentPart, param: str, fetched: Mapping[str, Media]) -> dict[str, Any]:
    match part:
        case schemas.TextPart():
            return {"type": "text", "text": part.text}
        case schemas.RefusalPart():
            return {"type": "text", "text": part.refusal}
        case schemas.AudioPart():
            data = sound(part.input_audio.data, f"{param}.input_audio.data")
            format = part.input_audio.format
            if not _SUBTYPE.fullmatch(format):
                raise InvalidRequest(f"{param}.input_audio.format: no format", param=f"{param}.input_audio.format")
            return {"type": "audio", "mime": _MIMES.get(format, f"audio/{format}"), "data": data}
    type, url = _type_and_url(part)
    found = fetched.get(url)
    if found is None:
        found = data_url(url, type, f"{param}.{type}_url.url")
    return {"type": type, "mime": found.mime, "data": found.data}


def data_url(url: str, type: str, param: str) -> Media:
    """``data:image/png;base64,…`` as what it holds.

    Raises: InvalidRequest: no data URL, or of another kind than ``type``.
    """
    mime, in_base64, data = _parsed(url, type, param)
    if not mime.startswith(f"{type}/"):
        raise _wrong_type(mime, type, param)
    if not MIME.fullmatch(mime):
        raise InvalidRequest(f"{param}: {mime!r} is not a media type", param=param)
    if in_base64:
        return Media(type, mime, from_base64(data, param))
    if len(data) > _PERCENT:
        raise InvalidRequest(f"{param}: a data URL of more than {_PERCENT} characters must be base64", param=param)
    return Media(type, mime, urllib.parse.unquote_to_bytes(data))


def sound(text: str, param: str) -> bytes:
    """Base64, or a data URL of it, whose type may be missing: the part's own format counts."""
    if not _is_data(text):
        return from_base64(text, param)
    mime, in_base64, data = _parsed(text, "audio", param)
    if mime and not mime.startswith("audio/"):
        raise _wrong_type(mime, "audio", param)
    if not in_base64:
        raise InvalidRequest(f"{param}: a data URL of sound must be base64", param=param)
    return from_base64(data, param)


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _parsed(url: str, type: str, param: str) -> tuple[str, bool, str]:
    """A data URL's media type, whether it is base64, and its data. Case and spaces mean nothing before the comma."""
    head, comma, data = url.partition(",")
    if not _is_data(head) or not comma or len(head) > _HEAD:
        raise InvalidRequest(f"{param}: no data URL (data:{type}/…;base64,…)", param=param)
    mime, *options = (word.strip().lower() for word in head[len("data:") :].split(";"))
    return mime, "base64" in options, data


def _wrong_type(mime: str, type: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: a data URL of type {mime or 'text/plain'!r}, not {type}/…", param=param)


def from_base64(text: str, param: str) -> bytes:
    """Base64 in any form that a common program writes: in lines, with the url-safe alphabet, without padding,
    in a URL with the signs escaped.

    Raises: InvalidRequest: a character of neither alphabet, which is shown, or a length that no bytes have.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # the usual form is tried first: it may be megabytes long
        pass
    plain = text  # no list of its parts is made: each of three characters would be an object of 100 bytes
    for escape, sign in _ESCAPES:
        plain = plain.replace(escape, sign).replace(escape.lower(), sign)
    plain = plain.translate(_STANDARD).rstrip("=")
    wrong = _NOT_BASE64.search(plain)
    if wrong:
        shown = ascii(wrong[0])
        problem = f"{param}: expected base64, got the character {shown} after {wrong.start()} of its alphabet"
        raise InvalidRequest(problem, param=param)
    if len(plain) % 4 == 1:
        problem = f"{param}: expected base64, got {len(plain)} characters: no bytes have that many, some are missing"
        raise InvalidRequest(problem, param=param)
    return base64.b64decode(plain + "=" * (-len(plain) % 4))


def _type_and_url(part: _URL_PARTS) -> tuple[str, str]:
    match part:
        case schemas.ImageUrlPart():
            return "image", part.image_url.url
        case schemas.AudioUrlPart():
            return "audio", part.audio_url.url
        case schemas.VideoUrlPart():
            return "video", part.video_url.url


def _parts(messages: list[schemas.Message]) -> Iterator[tuple[str, schemas.ContentPart]]:
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            for place, part in enumerate(message.content):
                yield f"messages[{index}].content[{place}]", part

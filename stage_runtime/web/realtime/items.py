"""Items of a conversation: read from a client, shown to it, and put into words for the entry stage. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.realtime import formats
from stage_runtime.web.realtime.formats import SoundFormat
from stage_runtime.web.translating import media

Id = Annotated[str, Meta(min_length=1, max_length=64)]
OBJECT_NBYTES: Final = 256  # of an item or a part beside its texts, roughly: an empty one is not for nothing
SPOKEN_CHARACTERS_PER_S: Final = 15  # of English read aloud: what an interrupted answer may have said in a time


class Part(msgspec.Struct):
    """A part of a message's content, by GA's names."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str = ""  #: The text; of an audio part: its transcript.
    transcribed: bool = False  #: ``text`` is what an audio part says.
    audio: bytes | None = None
    format: SoundFormat = formats.PCM
    audio_ms: float = 0.0
    image_url: str | None = None

    @property
    def nbytes(self) -> int:
        sound = 0 if self.audio is None else len(self.audio)
        return OBJECT_NBYTES + text_nbytes(self.text) + text_nbytes(self.image_url or "") + sound


class Item(msgspec.Struct):
    """An item of a conversation."""

    id: str
    type: Literal["message", "function_call", "function_call_output"]
    status: Literal["completed", "incomplete", "in_progress"] = "completed"
    role: Literal["user", "assistant", "system"] = "user"
    content: list[Part] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, roughly, whatever its client put where."""
        texts = (self.id, self.call_id, self.name, self.arguments, self.output)
        return OBJECT_NBYTES + sum(map(text_nbytes, texts)) + sum(one.nbytes for one in self.content)


class _GivenPart(msgspec.Struct, frozen=True):
    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None


class _GivenItem(msgspec.Struct, frozen=True):
    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: list[_GivenPart] | str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


_PART_TYPES: Final = {"text": "output_text", "audio": "output_audio"}
_TAKES: Final = {
    "user": {"input_text", "input_audio", "input_image"},
    "assistant": {"output_text", "output_audio"},
    "system": {"input_text"},
}
_NEEDS: Final = {"function_call": ("name", "arguments"), "function_call_output": ("call_id", "output")}


def text_nbytes(text: str) -> int:
    """The memory of a text, at most: Python keeps one of other letters with up to 4 bytes for each."""
    return len(text) if text.isascii() else 4 * len(text)


def read(raw: object, new_id: str, format: SoundFormat, where: str = "item") -> Item:
    """A client's item. new_id: when it names none. format: of its sound.

    Raises: InvalidRequest: naming the place.
    """
    try:
        given = msgspec.convert(raw, _GivenItem)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None
    item_id = given.id or new_id
    if given.type == "message":
        return _message(given, item_id, format, where)
    if given.type == "item_reference":
        raise InvalidRequest(f"{where}: an item_reference is taken in the input of a response only", param=where)
    missing = next((name for name in _NEEDS[given.type] if getattr(given, name) is None), None)
    if missing is not None:
        raise InvalidRequest(f"{where}.{missing}: required", param=f"{where}.{missing}")
    return Item(
        id=item_id,
        type=given.type,
        call_id=given.call_id or f"call_{item_id}",
        name=given.name or "",
        arguments=given.arguments or "",
        output=given.output or "",
    )


def _message(given: _GivenItem, item_id: str, format: SoundFormat, where: str) -> Item:
    role = "system" if given.role == "developer" else given.role
    if role is None:
        raise InvalidRequest(f"{where}.role: required", param=f"{where}.role")
    content = [_GivenPart(type="text", text=given.content)] if isinstance(given.content, str) else given.content or []
    parts = []
    for index, one in enumerate(content):
        place = f"{where}.content[{index}]"
        type = _PART_TYPES.get(one.type, one.type) if role == "assistant" else _input_type(one.type)
        if type not in _TAKES[role]:
            raise InvalidRequest(
                f"{place}.type: {one.type!r} is not part of a message of the {role}", param=f"{place}.type"
            )
        parts.append(_part(one, type, format, place))
    return Item(id=item_id, type="message", role=role, content=parts)


def _input_type(type: str) -> str:
    return "input_text" if type == "text" else type


def _part(one: _GivenPart, type: Any, format: SoundFormat, place: str) -> Part:
    match type:
        case "input_audio":
            if one.audio is None:
                return Part(type, text=_required(one.transcript, f"{place}.audio"), transcribed=True)
            data = media.sound(one.audio, f"{place}.audio")
            if not data or len(data) % format.width:
                raise InvalidRequest(f"{place}.audio: expected samples of {format.width} bytes", param=f"{place}.audio")
            transcribed = one.transcript is not None
            seconds = len(data) / format.bytes_per_ms
            return Part(type, one.transcript or "", transcribed, audio=data, format=format, audio_ms=seconds)
        case "input_image":
            url = _required(one.image_url, f"{place}.image_url")
            media.data_url(url, "image", f"{place}.image_url")  # checked now, so that no later response fails of it
            return Part(type, image_url=url)
        case "output_audio":
            return Part(type, text=one.transcript or one.text or "", transcribed=True)
    return Part(type, text=_required(one.text, f"{place}.text"))


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise InvalidRequest(f"{place}: required", param=place)
    return value


def heard(item_id: str, sound: bytes, format: SoundFormat) -> Item:
    """The user's message of committed sound."""
    audio_ms = len(sound) / format.bytes_per_ms
    return Item(
        id=item_id, type="message", content=[Part("input_audio", audio=sound, format=format, audio_ms=audio_ms)]
    )


# --- as clients see them ----------------------------------------------------------------------------------------------


def shown(item: Item, *, beta: bool, audio: str | None = None) -> dict[str, Any]:
    """An item without its sound. audio: base64 of it, for a client that retrieves it."""
    head: dict[str, Any] = {"id": item.id, "object": "realtime.item", "type": item.type, "status": item.status}
    if item.type == "function_call":
        return {**head, "name": item.name, "call_id": item.call_id, "arguments": item.arguments}
    if item.type == "function_call_output":
        return {**head, "call_id": item.call_id, "output": item.output}
    content = [part_shown(one, beta=beta) for one in item.content]
    if audio is not None:
        next(one for one in content if one["type"] == "input_audio")["audio"] = audio
    return {**head, "role": item.role, "content": content}


def part_shown(part: Part, *, beta: bool) -> dict[str, Any]:
    type = {"output_text": "text", "output_audio": "audio"}.get(part.type, part.type) if beta else part.type
    match part.type:
        case "input_text" | "output_text":
            return {"type": type, "text": part.text}
        case "input_image":
            return {"type": type, "image_url": part.image_url}
    return {"type": type, "transcript": part.text if part.transcribed else None}


def cut(part: Part, at_ms: int, *, whole: bool) -> None:
    """Leave of a spoken answer what was heard up to a time: of its words a share, up to the end of a word.

    whole: all of its sound came, so that its words are spread over all of it. Otherwise more words than that sound
    holds may be there.
    """
    if at_ms >= part.audio_ms and whole:
        return
    share = at_ms / part.audio_ms if part.audio_ms else 0.0
    count = round(len(part.text) * min(1.0, share))
    if not whole:
        count = min(count, at_ms * SPOKEN_CHARACTERS_PER_S // 1000)
    kept = part.text[:count]
    if kept != part.text and not part.text[count : count + 1].isspace():
        kept = kept[: kept.rfind(" ") + 1]
    part.text, part.audio_ms = kept.rstrip(), min(part.audio_ms, at_ms)


# --- as the entry stage gets them -------------------------------------------------------------------------------------


def messages(items: Iterable[Item], instructions: str) -> list[dict[str, Any]]:
    """The conversation as a chat has it. Sound that was written down before is its words."""
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": [{"type": "text", "text": instructions}]})
    for item in items:
        match item.type:
            case "message":
                if content := list(_content(item)):
                    made.append({"role": item.role, "content": content})
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if (
                    not made or made[-1]["role"] != "assistant"
                ):  # what it said before its calls is one message with them
                    made.append({"role": "assistant", "content": []})
                made[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = [{"type": "text", "text": item.output}]
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return made


def _content(item: Item) -> Iterator[dict[str, Any]]:
    for one in item.content:
        if one.type == "input_audio" and not one.transcribed:
            if one.audio is not None:
                yield {"type": "audio", "mime": "audio/wav", "data": formats.wav(one.audio, one.format)}
        elif one.type == "input_image" and one.image_url is not None:
            found = media.data_url(one.image_url, "image", "image_url")
            yield {"type": "image", "mime": found.mime, "data": found.data}
        elif one.text:
            yield {"type": "text", "text": one.text}

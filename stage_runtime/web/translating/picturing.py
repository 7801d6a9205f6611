"""POST /v1/images/generations and edits: the body as an `OmniRequest`, events as OpenAI's answer. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading import schemas
from stage_runtime.web.reading.multipart import FormPart
from stage_runtime.web.translating.answer_outputs import StreamedKinds
from stage_runtime.wire.values import Image, OmniRequest, Usage

DECODER: Final = msgspec.json.Decoder(schemas.ImageBody)
EDITED_MOST: Final = 16  # pictures of one edit, as OpenAI's
_PARAMS: Final = (
    "output_format", "output_compression", "background", "quality", "style", "input_fidelity", "negative_prompt",
    "num_inference_steps", "guidance_scale", "seed",
)  # fmt: skip
#: How files of the formats that stages may give begin; of what a client sends, too.
_BEGINNINGS: Final = {
    "image/png": re.compile(rb"\x89PNG\r\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),  # a WAV file begins with RIFF, too
}


class ImageCall(msgspec.Struct, frozen=True, kw_only=True):
    """A body, read and checked. images: of an edit. mask: where it may change them."""

    body: schemas.ImageBody
    images: tuple[dict[str, Any], ...] = ()  #: Each ``{mime, data}``.
    mask: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        return self.body.n or 1


def decode(raw: bytes) -> schemas.ImageBody:
    return schemas.decode(raw, schemas.ImageBody, DECODER)


def read(parts: Iterable[FormPart]) -> ImageCall:
    """The form of an edit.

    Raises: InvalidRequest: no picture or too many, or a field that is unknown or wrong.
    """
    images: list[dict[str, Any]] = []
    masks: list[dict[str, Any]] = []
    given: dict[str, Any] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name in ("image", "mask"):
            (images if name == "image" else masks).append(_picture(part, name))
        elif name in given:
            raise InvalidRequest(f"{name}: the field occurs twice", param=name)
        else:
            given[name] = _text(part)
    if not 1 <= len(images) <= EDITED_MOST:
        raise InvalidRequest(f"image: expected 1 to {EDITED_MOST} pictures, got {len(images)}", param="image")
    if len(masks) > 1:
        raise InvalidRequest("mask: the field occurs twice", param="mask")
    fields = schemas.convert(given, schemas.ImageEditFields)
    return ImageCall(body=fields, images=tuple(images), mask=masks[0] if masks else None)


def request(call: ImageCall, request_id: str) -> OmniRequest:
    """size: ``[width, height]``; None: the stage's own."""
    body = call.body
    size = None if body.size in (None, "auto") else [int(side) for side in body.size.split("x")]
    inputs: dict[str, Any] = {"prompt": body.prompt, "n": call.count, "size": size}
    if call.images:
        inputs |= {"images": list(call.images), "mask": call.mask}
    return OmniRequest(
        id=request_id,
        kind="image",
        inputs=inputs,
        params={name: value for name in _PARAMS if (value := getattr(body, name)) is not None},
        modalities=["image"],
        metadata=body.metadata or {},
    )


class Pictures:
    """Collects the pictures of an answer."""

    def __init__(self, count: int) -> None:
        """count: how many were asked for."""
        self._count = count
        self._streamed = StreamedKinds()
        self._found: list[Image] = []
        self._counts = TokenCounts()
        self._stage: str | None = None  #: That gave the last one, for errors.

    def add(self, event: AnswerEvent) -> None:
        self._counts.note(event)
        values = event.data if isinstance(event.data, list) else [event.data]
        for value in values:
            if isinstance(value, Image) and not self._streamed.repeats(event, Image):
                self._found.append(value)
                self._stage = event.stage
            elif isinstance(value, Usage):
                self._counts.add(event.stage, value)

    def answer(self, created: int) -> dict[str, Any]:
        """Raises: RequestError: stage_failed: other pictures came than were asked for."""
        kinds = {one.mime for one in self._found}
        if len(self._found) != self._count or len(kinds) != 1:
            problem = f"omni.Image: expected {self._count} of one format, got {len(self._found)}: {sorted(kinds)}"
            raise RequestError("stage_failed", problem, stage=self._stage)
        data = [{"b64_json": base64.b64encode(one.data).decode()} for one in self._found]
        answer = {"created": created, "data": data, "output_format": kinds.pop().removeprefix("image/")}
        if (usage := self._counts.total) != Usage():
            answer["usage"] = _usage(usage)
        return answer


def _usage(usage: Usage) -> dict[str, Any]:
    asked, made, pictures = usage.prompt_tokens, usage.completion_tokens, usage.prompt_image_tokens
    details = {"text_tokens": max(0, asked - pictures), "image_tokens": pictures}
    return {
        "input_tokens": asked,
        "output_tokens": made,
        "total_tokens": asked + made,
        "input_tokens_details": details,
    }


def _picture(part: FormPart, name: str) -> dict[str, Any]:
    mime = next((kind for kind, beginning in _BEGINNINGS.items() if beginning.match(part.data)), None)
    if mime is None:
        raise InvalidRequest(f"{name}: expected a png, jpeg or webp", param=name)
    return {"mime": mime, "data": part.data}


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{part.name}: not UTF-8", param=part.name) from None

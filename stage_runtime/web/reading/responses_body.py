"""The body of POST /v1/responses, as msgspec types. Its meaning is in `translating.generation.responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stage_runtime.web.reading.generation_fields import Positive, Share
from stage_runtime.web.reading.schemas import InputAudio, Seconds


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None


class InputSound(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


Part = InputText | PlainText | OutputText | Refusal | InputImage | InputSound


class InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """One without ``type`` is one of these, too."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText | PlainText | OutputText]


class ReasoningText(msgspec.Struct):
    text: str = ""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    content: list[ReasoningText] | None = None


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    id: str


Item = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem | ItemReference


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    timeout: Seconds | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    max_output_tokens: Positive | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    # accepted, without effect
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    # accepted only with default values: see `translating.generation.responses.REFUSED`
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None

"""Any value of the wire as plain JSON, for `/v1/pipeline` and notes. Pure.

bytes become ``{"bytes": base64}``, tensors ``{"dtype", "shape", "data": base64}``, the client outputs and registered
types objects of their fields (`Text` and its kin with a ``type``), a NaN or infinity null.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from stage_runtime.wire.values import (
    Audio,
    Finish,
    Image,
    Note,
    RawTensor,
    Reasoning,
    Scores,
    Text,
    ToolCall,
    Usage,
    Vectors,
)

_TYPES = {
    Text: "text", Reasoning: "reasoning", Audio: "audio", Usage: "usage", Finish: "finish", Note: "note",
    ToolCall: "tool_call", Vectors: "vectors", Scores: "scores", Image: "image",
}  # fmt: skip
_UNLESS_SET = {
    "choice": 0,
    "logprobs": None,
    "cached_tokens": 0,
    "prompt_image_tokens": 0,
    "prompt_audio_tokens": 0,
    "completion_audio_tokens": 0,
    "reasoning_tokens": 0,
}  # fields of ours that are shown only with another value


def plain(value: Any) -> Any:
    """``value`` made of what JSON knows."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray() | memoryview():
            return {"bytes": base64.b64encode(value).decode()}
        case RawTensor():
            return _tensor(value.dtype, value.shape, value.data)
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case msgspec.Struct():
            fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
            if type(value) not in _TYPES:
                return fields
            shown = {name: one for name, one in fields.items() if name not in _UNLESS_SET or one != _UNLESS_SET[name]}
            return {"type": _TYPES[type(value)], **shown}
    array = np.ascontiguousarray(value)
    return _tensor(array.dtype.name, np.shape(value), array.tobytes())


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}

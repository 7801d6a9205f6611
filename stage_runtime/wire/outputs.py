"""The outputs of authors for clients, checked where they give them: the outputs' fields, a chunk's fields, what a route
can show.

Pure, and called by every sender: a wrong field is then refused with the stage's name, not found by the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from stage_runtime.errors import ValueRefused, safe_str
from stage_runtime.wire.parts import NAME_LIMIT
from stage_runtime.wire.values import (
    Audio,
    Chunk,
    Finish,
    Image,
    Note,
    Reasoning,
    Scores,
    Text,
    ToolCall,
    Usage,
    Vectors,
)

REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
CHOICES_MOST: Final = 128
SAMPLES: Final = frozenset(["float16", "bfloat16", "float32", "float64", "uint8", "int16", "int32"])
RATES: Final = (1_000, 192_000)  # Hz
CHANNELS_MOST: Final = 8
IMAGES: Final = ("image/png", "image/jpeg", "image/webp")
TOKENS_MOST: Final = 2**53  # JSON readers in other languages are exact up to here
#: The key in the metadata of a chunk for a client: tokens of the request at that stage so far, as of `Usage`. Not
#: shown.
USAGE_SO_FAR: Final = "omni.usage"
#: Names of notes with tokens of a prompt and of a part of an answer: ``{"choice": …, "token_ids": […]}``.
PROMPT_TOKEN_IDS: Final = "prompt_token_ids"
TOKEN_IDS: Final = "token_ids"
#: Name of the note that answers a request of kind ``tokenize``: ``tokens``, ``token_strs``, ``max_model_len``.
TOKENS: Final = "tokens"
SHOWN: Final = (Text, Reasoning, Audio, Usage, Finish, Note, ToolCall, Vectors, Scores, Image)
#: Types that make an answer, and all that it may contain, by kind of request; `_TOLD` for kinds that are not here.
_TOLD: Final = (
    (Text, Reasoning, Audio, Finish, Note, ToolCall),
    (Text, Reasoning, Audio, Usage, Finish, Note, ToolCall),
)
_ANSWERS: Final[dict[str, tuple[tuple[type, ...], tuple[type, ...]]]] = {
    "embedding": ((Vectors,), (Vectors, Usage)),
    "score": ((Scores,), (Scores, Usage)),
    "image": ((Image,), (Image, Usage)),
    "pipeline": (SHOWN, SHOWN),
}


def problem(value: msgspec.Struct) -> str | None:
    """Why a client output's fields cannot be shown; None of a sound one, and of every other type."""
    check = _CHECKS.get(type(value))
    return check(value) if check is not None else None


def check_chunk(chunk: Any) -> None:
    """The fields beside a chunk's data; where it may go is `rules.graph.routing`'s.

    Raises: ValueRefused: names the field.
    """
    if not isinstance(chunk, Chunk):
        raise ValueRefused("chunk", f"{_kind(chunk)}: use omni.Chunk(…)")
    modality, metadata = chunk.modality, chunk.metadata
    if modality is not None and not _is_name(modality):
        raise ValueRefused("chunk.modality", f"{_quoted(modality)}: use a str of at most {NAME_LIMIT} characters")
    if metadata is not None and type(metadata) is not dict:
        raise ValueRefused("chunk.metadata", f"{_kind(metadata)}: use a dict")


def unshown(data: Any, kind: str = "pipeline") -> str | None:
    """The type of what no OpenAI route can show of a chunk's or result's data, one value or a list; None: all of it.

    kind: of the request, for what its own route cannot show.
    """
    values = data if type(data) is list else [] if data is None else [data]
    known = _ANSWERS.get(kind, _TOLD)[1]
    return next((_kind(value) for value in values if not isinstance(value, known)), None)


def shows(data: Any, kind: str = "pipeline") -> bool:
    """Whether an OpenAI route can show any of it. kind: of the request, for its own route."""
    known = _ANSWERS.get(kind, _TOLD)[0]
    return any(isinstance(value, known) for value in (data if type(data) is list else [data]))


def shown_words(kind: str) -> str:
    """The kinds of output that the route of a request of this kind shows, for a message."""
    if kind not in _ANSWERS or kind == "pipeline":
        return "omni.Text, omni.Audio, omni.Usage, omni.Finish and omni.Note"
    return " and ".join(f"omni.{one.__name__}" for one in _ANSWERS[kind][1])


def _text(value: Text) -> str | None:
    if type(value.text) is not str:
        return f"omni.Text: text is {_quoted(value.text)}: use a str"
    if value.logprobs is not None and type(value.logprobs) is not list:
        return f"omni.Text: logprobs is {_quoted(value.logprobs)}: use a list"
    return _choice("omni.Text", value.choice)


def _reasoning(value: Reasoning) -> str | None:
    if type(value.text) is not str:
        return f"omni.Reasoning: text is {_quoted(value.text)}: use a str"
    return _choice("omni.Reasoning", value.choice)


def _choice(what: str, value: Any) -> str | None:
    if type(value) is int and 0 <= value < CHOICES_MOST:
        return None
    return f"{what}: choice is {_quoted(value)}: use an int from 0 to {CHOICES_MOST - 1}"


def _tool_call(value: ToolCall) -> str | None:
    for name in ("id", "name", "arguments"):
        if type(getattr(value, name)) is not str:
            return f"omni.ToolCall: {name} is {_quoted(getattr(value, name))}: use a str"
    if type(value.index) is not int or not 0 <= value.index <= TOKENS_MOST:
        return f"omni.ToolCall: index is {_quoted(value.index)}: use an int, 0 or more"
    return _choice("omni.ToolCall", value.choice)


def _audio(value: Audio) -> str | None:
    rate, samples = value.sample_rate, value.samples
    if type(rate) is not int or not RATES[0] <= rate <= RATES[1]:
        return f"omni.Audio: sample_rate is {_quoted(rate)}: use an int from {RATES[0]} to {RATES[1]}"
    dtype, shape = getattr(samples, "dtype", None), getattr(samples, "shape", None)
    name = getattr(dtype, "name", None) or safe_str(dtype, limit=40).removeprefix("torch.")
    if dtype is None or shape is None:
        return f"omni.Audio: samples are {_kind(samples)}: use a float32 tensor or array, [n] or [n, channels]"
    if name not in SAMPLES:
        return f"omni.Audio: samples of {name}: use float32 in -1..1"
    if len(shape) not in (1, 2) or (len(shape) == 2 and not 1 <= shape[1] <= CHANNELS_MOST):
        return f"omni.Audio: samples of shape {list(shape)[:9]}: use [n], or [n, channels] with at most {CHANNELS_MOST}"
    return None


def _usage(value: Usage) -> str | None:
    for name in value.__struct_fields__:
        count = getattr(value, name)
        if type(count) is not int or not 0 <= count <= TOKENS_MOST:
            return f"omni.Usage: {name} is {_quoted(count)}: use an int, 0 or more"
    return None


def _finish(value: Finish) -> str | None:
    if type(value.reason) is str and value.reason in REASONS:
        return _choice("omni.Finish", value.choice)
    return f"omni.Finish: reason is {_quoted(value.reason)}: use one of {', '.join(REASONS)}"


def _note(value: Note) -> str | None:
    if _is_name(value.name):
        return None
    return f"omni.Note: name is {_quoted(value.name)}: use a str of at most {NAME_LIMIT} characters"


def _vectors(value: Vectors) -> str | None:
    shape = getattr(value.values, "shape", None)
    if shape is None or len(shape) not in (1, 2):
        return f"omni.Vectors: values are {_kind(value.values)}: use a tensor or array, [n, dimensions]"
    return None


def _scores(value: Scores) -> str | None:
    if type(value.values) is not list or not all(type(one) in (float, int) for one in value.values):
        return f"omni.Scores: values are {_quoted(value.values)}: use a list of numbers"
    return None


def _image(value: Image) -> str | None:
    if not isinstance(value.data, bytes | bytearray | memoryview) or not len(value.data):
        return f"omni.Image: data is {_quoted(value.data)}: use the bytes of a file"
    if type(value.mime) is not str or value.mime not in IMAGES:
        return f"omni.Image: mime is {_quoted(value.mime)}: use one of {', '.join(IMAGES)}"
    return None


_CHECKS: Final[dict[type, Callable[[Any], str | None]]] = {
    Text: _text,
    Reasoning: _reasoning,
    Audio: _audio,
    Usage: _usage,
    Finish: _finish,
    Note: _note,
    ToolCall: _tool_call,
    Vectors: _vectors,
    Scores: _scores,
    Image: _image,
}


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= NAME_LIMIT and value.isprintable()


def _kind(value: Any) -> str:
    return safe_str(type(value).__qualname__, limit=80)


def _quoted(value: Any) -> str:
    return f"{_kind(value)} {safe_str(value, limit=60, how=repr)}"

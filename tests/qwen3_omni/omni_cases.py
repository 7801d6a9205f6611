"""Requests to a tiny Qwen3-Omni, made anew from numbers: the oracle and the pipeline read the same ones."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np
import soundfile
from PIL import Image

import stage_runtime as omni

FRAMES = 48  #: The most that the talker makes.


class Case(msgspec.Struct, frozen=True):
    """parts: of the user's message: a text, ``(wide, high)`` of a picture, or seconds of sound."""

    name: str
    parts: tuple[str | tuple[int, int] | float, ...]
    tokens: int = 24
    voice: str = "chelsie"


CASES = (
    Case("text", ("a sea of time",)),
    Case("picture", ("hi", (96, 64))),
    Case("sound", (2.3, "what?")),
    Case("picture-and-sound", ("hi", (96, 64), 2.3, "what?")),
    Case("two-pictures", ((96, 64), "and", (200, 160), "which?")),
    Case("two-sounds", (0.7, "and", 3.1)),
    Case("long-prompt", ("x" * 300,)),
    Case("other-voice", ("hi", (96, 64)), voice="ethan"),
    Case("short-answer", ("hi", (96, 64)), tokens=5),
    Case("long-answer", (2.3, "what?"), tokens=60),
    Case("large-picture", ((500, 700), "?")),
    Case("text-to-the-limit", ("zebra crossing",)),
    Case("one-sample", (1 / 16_000, "heard that?")),
)


def picture(wide: int, high: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (high, wide, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def sound(seconds: float, seed: int) -> bytes:
    samples = np.random.default_rng(seed).standard_normal(max(int(seconds * 16_000), 1)) * 0.1
    out = io.BytesIO()
    soundfile.write(out, samples.astype(np.float32), 16_000, format="WAV")
    return out.getvalue()


def media(case: Case) -> list[tuple[str, Any]]:
    """Kind and content of each part."""
    found: list[tuple[str, Any]] = []
    for seed, part in enumerate(case.parts):
        match part:
            case str():
                found.append(("text", part))
            case (wide, high):
                found.append(("image", picture(wide, high, seed)))
            case seconds:
                found.append(("audio", sound(float(seconds), seed)))
    return found


def request(case: Case) -> omni.OmniRequest:
    """The request as a stage gets it."""
    parts = [{"type": kind, "text" if kind == "text" else "data": value} for kind, value in media(case)]
    messages = [{"role": "system", "content": "You are."}, {"role": "user", "content": parts}]
    return omni.OmniRequest(
        id=case.name,
        kind="chat",
        inputs={"messages": messages},
        params={"voice": case.voice, "temperature": 0, "max_tokens": case.tokens},
        modalities=["text", "audio"],
    )


def body(case: Case, **more: Any) -> dict[str, Any]:
    """The body as a client sends it."""
    parts = []
    for kind, value in media(case):
        match kind:
            case "text":
                parts.append({"type": "text", "text": value})
            case "image":
                url = f"data:image/png;base64,{base64.b64encode(value).decode()}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case _:
                data = {"data": base64.b64encode(value).decode(), "format": "wav"}
                parts.append({"type": "input_audio", "input_audio": data})
    return {
        "model": "qwen3-omni",
        "messages": [{"role": "system", "content": "You are."}, {"role": "user", "content": parts}],
        "max_completion_tokens": case.tokens,
        "temperature": 0,
        "modalities": ["text", "audio"],
        "audio": {"voice": case.voice, "format": "wav"},
        **more,
    }

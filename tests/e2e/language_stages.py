"""Stages that generate tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

import stage_runtime as omni


def language_model(model: str) -> omni.Autoregressive:
    """Greedy; the result is the tokens."""

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Result | omni.Chunk]:
        tokens = answers.setdefault(payload.request.id, [])
        tokens.extend(generation.tokens)
        if generation.finish is not None:
            yield omni.Result(answers.pop(payload.request.id))

    answers: dict[str, list[int]] = {}
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return omni.Autoregressive(
        model=model,
        prompt=lambda payload: omni.Prompt(text=payload.data["text"], params={"temperature": 0}),
        deliver=deliver,
        params=params,
        threads=1,
        block_size=4,
        max_chunk=8,
        kernels="torch",
    )


def chat_model(model: str, tool_calls: str, own_process: bool = False) -> omni.Autoregressive:
    """A stage with all that is the library's own: prompts, calls, text for clients."""
    return omni.Autoregressive(
        model=model,
        tool_calls=tool_calls,
        own_process=own_process,
        params={"temperature": 0, "max_tokens": 120},
        threads=1,
        block_size=4,
        kernels="torch",
    )


def apart_model(model: str) -> omni.Autoregressive:
    """The same as `language_model`, with ``disaggregation``: every block that can come is asked for."""
    return msgspec.structs.replace(language_model(model), remote_prefill_tokens=1)


def apart_engines(model: str, **engine: Any) -> omni.Autoregressive:
    """The same as `apart_model`, with parameters in the request, and more of the engine's settings."""
    return msgspec.structs.replace(
        apart_model(model),
        prompt=lambda payload: omni.Prompt(text=payload.data["text"], params=payload.data["params"]),
        params={"temperature": 0, "max_tokens": 40, "ignore_eos": True},
        **engine,
    )

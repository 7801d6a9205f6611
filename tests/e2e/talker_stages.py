"""A thinker and a talker: the talker's prompt is hidden rows of the thinker's answer, as chunks or as one payload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import stage_runtime as omni

FIRST = [1, 2, 3]  # the talker's prompt before what the thinker says
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SMALL: dict[str, Any] = {"threads": 1, "block_size": 4, "max_chunk": 8, "kernels": "torch"}


def take() -> Any:
    return lambda payload: payload.data


def thinker(model: str, streams: bool, **settings: Any) -> omni.Autoregressive:
    """Its hidden rows go to the talker: each as soon as it is there, or all at the end."""
    kept: dict[str, list[torch.Tensor]] = {}

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if generation.hidden_rows is not None:
            if streams:
                yield omni.Chunk(generation.hidden_rows)
            else:
                kept.setdefault(payload.request.id, []).append(generation.hidden_rows)
        if generation.finish is not None:
            yield omni.Result(None if streams else torch.cat(kept.pop(payload.request.id)))

    return omni.Autoregressive(
        model=model,
        prompt=lambda payload: omni.Prompt(text=payload.data["text"]),
        deliver=deliver,
        hidden_rows=True,
        params=GREEDY,
        **SMALL,
        **settings,
    )


def talker(model: str, streams: bool, **settings: Any) -> omni.Autoregressive:
    answers: dict[str, list[int]] = {}

    def prompt(payload: omni.StagePayload) -> omni.Prompt:
        return omni.Prompt(parts=[FIRST] if streams else [FIRST, payload.data])

    def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        answers.setdefault(payload.request.id, []).extend(generation.tokens)
        if generation.finish is not None:
            yield omni.Result(answers.pop(payload.request.id))

    return omni.Autoregressive(
        model=model,
        prompt=prompt,
        stream=(lambda chunk: chunk.data) if streams else None,
        deliver=deliver,
        params=GREEDY,
        **SMALL,
        **settings,
    )

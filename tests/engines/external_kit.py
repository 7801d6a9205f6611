"""Parts that the tests of `engine="openvino"` and `engine="vllm"` share: functions of a stage, and ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stage_runtime as omni
from stage_runtime.engines.autoregressive.stage.process_engine import EngineClient, ProcessEngine
from tests.engines.engine_kit import Rig
from tests.engines.generation_kit import tiny_tokenizer

#: Parameters of real runs, unless a request says otherwise.
GREEDY_12: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def prompt(defaults: dict[str, Any]) -> Callable[[omni.StagePayload], omni.Prompt]:
    """A prompt function for requests with token ids and, if they want, parameters."""
    return lambda payload: omni.Prompt(
        tokens=payload.data["tokens"], params={**defaults, **payload.data.get("params", {})}
    )


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    """A chunk when the answer begins, and how it ends."""
    if generation.begins:
        yield omni.Chunk("begins")
    if generation.finish is not None:
        yield omni.Result([generation.finish, generation.completion_tokens])


def engine(client: EngineClient) -> ProcessEngine:
    """A stage over ``client``: greedy answers of 5 tokens."""
    asked = prompt({"temperature": 0, "max_tokens": 5})
    spec = omni.Autoregressive(model="", prompt=asked, deliver=deliver, params={"max_tokens": 100_000})
    return ProcessEngine(spec, client, tiny_tokenizer(), None)


def ends(rig: Rig, count: int) -> dict[str, tuple[Any, ...]]:
    """How ``count`` requests end."""
    found: dict[str, tuple[Any, ...]] = {}
    while len(found) < count:
        name, kind, *rest = rig.outbox.next()
        if kind != "chunk":
            assert name not in found
            found[name] = (kind, *rest)
    return found


def save(model: Any, folder: Path) -> Path:
    """A checkpoint of ``model``, with the tiny tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder

"""The requests that a session makes of the pipeline: for an answer, or for a transcript alone. Pure.

Called by `session`, which says when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stage_runtime.web.realtime import items
from stage_runtime.web.realtime.configuration import SessionConfig
from stage_runtime.web.realtime.items import Item
from stage_runtime.wire.values import OmniRequest


def answer(
    response_id: str, asked: Sequence[Item], config: SessionConfig, metadata: dict[str, str] | None
) -> OmniRequest:
    """The chat that answers these messages."""
    return OmniRequest(
        id=response_id,
        kind="chat",
        inputs={"messages": items.messages(asked, config.instructions)},
        params=_params(config),
        modalities=["text", "audio"] if "audio" in config.modalities else ["text"],
        stream=True,
        metadata=metadata or {},
    )


def transcript(key: str, wav: bytes, hints: Mapping[str, Any]) -> OmniRequest:
    """hints: ``language`` and ``prompt``, where the client gives them."""
    inputs: dict[str, Any] = {"audio": wav, "mime": "audio/wav"}
    inputs |= {name: hints.get(name) for name in ("language", "prompt")}
    return OmniRequest(id=key, kind="transcription", inputs=inputs, modalities=["text"], stream=True)


def _params(config: SessionConfig) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if config.max_output_tokens != "inf":
        params["max_tokens"] = config.max_output_tokens
    if config.temperature is not None:
        params["temperature"] = config.temperature
    if config.voice is not None:
        params["voice"] = config.voice
    if config.speed != 1.0:
        params["speed"] = config.speed
    if config.tools:
        params["tools"] = [_chat_tool(tool) for tool in config.tools]
        params["tool_choice"] = _chat_choice(config.tool_choice)
    return params


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}

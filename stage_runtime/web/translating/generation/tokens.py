"""POST /tokenize and /detokenize: bodies as an `OmniRequest`, an `omni.Note` or `omni.Text` as vLLM's answers. Pure.

A stage answers a request of kind ``tokenize`` with ``Note("tokens", {"tokens": [...], ...})``, one of kind
``detokenize`` with a `Text`. `omni.Autoregressive` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading import schemas
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.web.translating.generation import chat
from stage_runtime.wire.outputs import TOKENS
from stage_runtime.wire.values import Media, Note, OmniRequest, Text

TOKENIZE: Final = msgspec.json.Decoder(schemas.TokenizeBody)
DETOKENIZE: Final = msgspec.json.Decoder(schemas.DetokenizeBody)
#: Fields of a chat; each is a parameter of the request to the stages.
_OF_CHATS: Final = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def tokenize_request(body: schemas.TokenizeBody, request_id: str, fetched: Mapping[str, Media]) -> OmniRequest:
    """Raises: InvalidRequest: neither a text nor messages, or both; a field that belongs to the other one."""
    params: dict[str, Any] = {}
    if (body.prompt is None) == (body.messages is None):
        problem = "expected prompt or messages, got " + ("none" if body.prompt is None else "both")
        raise InvalidRequest(f"prompt: {problem}", param="prompt")
    for name in _OF_CHATS:
        if (value := getattr(body, name)) is not None:
            if body.messages is None:
                raise InvalidRequest(f"{name}: expected messages beside it, got prompt", param=name)
            params[name] = value
    if body.add_special_tokens is not None:
        params["add_special_tokens"] = body.add_special_tokens
    if body.messages is None:
        inputs: dict[str, Any] = {"text": body.prompt}
    else:
        inputs = {"messages": chat.spoken(body.messages, fetched, tools=True)}
    return OmniRequest(id=request_id, kind="tokenize", inputs=inputs, params=params, modalities=["text"])


def detokenize_request(body: schemas.DetokenizeBody, request_id: str) -> OmniRequest:
    return OmniRequest(id=request_id, kind="detokenize", inputs={"tokens": body.tokens}, modalities=["text"])


class Told:
    """The reports of the terminal stages on tokens."""

    def __init__(self) -> None:
        self._outputs = Outputs()
        self._tokens: dict[str, Any] | None = None
        self._text: list[str] = []

    def add(self, event: AnswerEvent) -> None:
        for shown in self._outputs.take(event):
            match shown:
                case Note(name=name, value=dict() as value) if name == TOKENS:
                    self._tokens = self._tokens or value
                case Text():
                    self._text.append(shown.text)

    def tokenized(self, *, strings: bool) -> dict[str, Any]:
        """The answer. Raises: RequestError: stage_failed: no stage gave tokens."""
        self._outputs.check("tokenize")
        given = self._tokens or {}
        tokens = given.get("tokens")
        if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            problem = "expected an omni.Note('tokens', {'tokens': [...]}) from a terminal stage"
            raise RequestError("stage_failed", problem)
        return {
            "count": len(tokens),
            "max_model_len": given.get("max_model_len"),
            "tokens": tokens,
            "token_strs": given.get("token_strs") if strings else None,
        }

    def detokenized(self) -> dict[str, Any]:
        """The answer. Raises: RequestError: stage_failed: no stage gave a text."""
        self._outputs.check("detokenize")
        if not self._text:
            raise RequestError("stage_failed", "expected an omni.Text from a terminal stage")
        return {"prompt": "".join(self._text)}

"""Requests of the kinds ``tokenize`` and ``detokenize``, which ask for no generation. Pure, but for the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stage_runtime.errors import InvalidRequest
from stage_runtime.wire.outputs import TOKENS
from stage_runtime.wire.values import Note, OmniRequest, Text

KINDS: Final = ("tokenize", "detokenize")
_UNBOUNDED: Final = 1 << 30  # tokenizers without a bound of their own have one far above


class TokenRequests:
    """Answers of one stage. tokenizer: of the thread that calls; not for two at once."""

    def __init__(self, tokenizer: Any, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        own = getattr(tokenizer, "model_max_length", _UNBOUNDED)
        self._longest = max_model_len or (own if isinstance(own, int) and own < _UNBOUNDED else None)

    def own_tokens(self, request: OmniRequest) -> list[int] | None:
        """The tokens of a request that has no prompt of the stage: a plain text, or tokens. None: it has one.

        Raises: InvalidRequest.
        """
        inputs = request.inputs if isinstance(request.inputs, Mapping) else {}
        if request.kind == "detokenize":
            return _checked(inputs.get("tokens"), len(self._tokenizer))
        special = request.params.get("add_special_tokens")
        if "messages" in inputs:
            if special is True:
                problem = "add_special_tokens: expected false for messages, whose template writes all tokens, got true"
                raise InvalidRequest(problem, param="add_special_tokens")
            return None
        text = inputs.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"inputs.text: expected a text, got {type(text).__name__}", param="prompt")
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special is not False)["input_ids"]]

    def answer(self, request: OmniRequest, tokens: Sequence[int]) -> Note | Text:
        """The answer that the client gets."""
        if request.kind == "detokenize":
            return Text(str(self._tokenizer.decode(list(tokens))))
        strings = [str(self._tokenizer.convert_ids_to_tokens(token)) if token >= 0 else "" for token in tokens]
        return Note(TOKENS, {"tokens": list(tokens), "token_strs": strings, "max_model_len": self._longest})


def _checked(given: Any, size: int) -> list[int]:
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise InvalidRequest("tokens: expected a list of token ids", param="tokens")
    if wrong := [one for one in given if not 0 <= one < size]:
        raise InvalidRequest(f"tokens: the vocabulary has {size} tokens, and not token {wrong[0]}", param="tokens")
    return given

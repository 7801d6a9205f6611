"""Tokens of a model's vocabulary that its tokenizer does not have: padding, which a client's bias may choose."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as untyped

import stage_runtime as omni
from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.stage.process_engine import ProcessEngine
from stage_runtime.rules.autoregressive.requests import FinishReason
from tests.engines import external_kit
from tests.engines.engine_kit import PATIENCE_S, running
from tests.engines.external_kit import ends

transformers: Any = untyped
UNKNOWN = 9
PROBLEM = "TypeError: sequence item 0: expected str instance, NoneType found"


class Slow(transformers.PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer of five letters. Those of transformers that are written in Python raise for tokens beyond them."""

    vocab_size = 5

    def get_vocab(self) -> dict[str, int]:
        return {letter: number for number, letter in enumerate("abcde")}

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, token: int) -> str | None:
        return "abcde"[token] if token < len("abcde") else None


@pytest.mark.parametrize(
    ("tokens", "likeliest", "error"),
    [([UNKNOWN], 1, f"RequestError: {PROBLEM}"), ([1], UNKNOWN, PROBLEM)],
)
def test_a_token_without_a_spelling_fails_its_request_alone(tokens: list[int], likeliest: int, error: str) -> None:
    client = external_kit.Dictated()
    asked = external_kit.prompt({"max_tokens": 5, "logprobs": True, "top_logprobs": 1})
    spec = omni.Autoregressive(model="", prompt=asked, deliver=external_kit.deliver)
    logprobs = [TokenLogprobs(-1.0, ((likeliest, -0.5),))]
    with running(ProcessEngine(spec, client, Slow(), None)) as rig:
        for name in ("one", "two"):
            rig.start(name, {"tokens": [1]})
        first, second = client.added.get(timeout=PATIENCE_S), client.added.get(timeout=PATIENCE_S)
        client.says(first, tokens, logprobs=logprobs)
        client.says(second, [1], FinishReason.LENGTH, logprobs=[TokenLogprobs(-1.0, ((1, -1.0),))])
        assert ends(rig, 2) == {"one": ("failed", error), "two": ("done", ["length", 1])}
    assert client.reqs_in_flight == {}

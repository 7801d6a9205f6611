"""Models whose rotary embedding has factors for short and for long texts: one set serves all requests of an engine."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers as untyped

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from tests.engines.generation_kit import VOCABULARY, Answers, alone_with, tiny_tokenizer

transformers: Any = untyped

ORIGINAL = 32
SHORT, LONG = [5, 6, 7, 8, 9], [index * 7 % 250 for index in range(60)]


@functools.cache
def model() -> Any:
    """Phi-3 in small, whose two sets of factors give different tokens."""
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [8.0, 9.0, 10.0, 12.0],
            "original_max_position_embeddings": ORIGINAL,
        },
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    try:
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.random.set_rng_state(state)


def answers(length: int, **prompts: list[int]) -> dict[str, list[int]]:
    """The answers of an engine whose requests have at most ``length`` tokens; all prompts come at once."""
    spec = omni.Autoregressive(
        model="", max_model_len=length, max_chunk=16, max_batched_tokens=32, linears="plain", kernels="torch"
    )
    given = Answers(loader.assemble(spec, copy.deepcopy(model()), tiny_tokenizer()).core)
    for name, prompt in prompts.items():
        given.ask(name, prompt)
    given.run()
    return given.tokens


def test_the_two_sets_of_factors_give_different_tokens() -> None:
    """Else the tests below would show nothing."""
    assert answers(ORIGINAL, short=SHORT) != answers(200, short=SHORT)


def test_a_short_request_beside_a_long_one_gets_the_tokens_that_it_gets_alone() -> None:
    alone = {**answers(200, short=SHORT), **answers(200, long=LONG)}
    assert answers(200, short=SHORT, long=LONG) == alone
    assert alone["long"] == alone_with(copy.deepcopy(model()), LONG, 12)


def test_where_no_request_can_be_long_the_tokens_are_those_of_the_short_factors() -> None:
    assert answers(ORIGINAL, short=SHORT) == {"short": alone_with(copy.deepcopy(model()), SHORT, 12)}


def test_keys_of_one_set_of_factors_are_not_those_of_the_other() -> None:
    """Engines whose requests have other lengths at most share a folder, or are prefill and decode."""

    def digest(length: int) -> str:
        spec = omni.Autoregressive(model="", max_model_len=length, linears="plain", kernels="torch")
        loaded = loader.assemble(spec, copy.deepcopy(model()), tiny_tokenizer(), digest=True)
        loaded.core.shutdown()
        return loaded.weights

    short, long = digest(ORIGINAL), digest(4 * ORIGINAL)
    assert short != long
    assert digest(3 * ORIGINAL) == long

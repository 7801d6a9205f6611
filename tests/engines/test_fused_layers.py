"""Fused layers compute what transformers' classes compute; classes that are not known are left alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from stage_runtime.engines.autoregressive.kernels import fusing, linears, native
from tests.engines.generation_kit import CONFIGS, VOCABULARY, Answers, alone, core, tiny_model

pytest.importorskip("numba")

KNOWN = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("linear", [None, "numba"])
@pytest.mark.parametrize("kind", KNOWN)
def test_a_fused_model_answers_token_for_token_as_generate_does(
    kind: str, linear: linears.LinearsBackend | None
) -> None:
    draw = random.Random(4)
    asked = {str(index): [draw.randrange(VOCABULARY) for _ in range(length)] for index, length in enumerate([3, 40, 9])}
    answers = Answers(core(kind, backend="pages", fused=True, linear=linear))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
        answers.step()
    answers.run()
    assert answers.tokens == {name: alone(kind, prompt, 12) for name, prompt in asked.items()}


@pytest.mark.parametrize("kind", KNOWN)
def test_every_layer_of_a_known_model_is_fused(kind: str) -> None:
    model = tiny_model(kind)
    used = fusing.fuse(model)
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    assert used == {f"{prefix}Attention": 2, f"{prefix}MLP": 2, f"{prefix}RMSNorm": 5}
    forms = {type(one).__name__ for one in model.modules()}
    assert not {f"{prefix}Attention", f"{prefix}MLP", f"{prefix}RMSNorm"} & forms


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - set(KNOWN)))
def test_a_model_of_other_classes_stays_as_it_is(kind: str) -> None:
    model = tiny_model(kind)
    before = [type(one) for one in model.modules()]
    assert fusing.fuse(model) == {}
    assert [type(one) for one in model.modules()] == before


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_norm_and_feed_forward_give_the_numbers_of_the_class(rows: int, dtype: torch.dtype, threads: int) -> None:
    layer: Any = tiny_model("llama").model.layers[0].to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            x = torch.randn(1, rows, 32).to(dtype)
            expected = layer.post_attention_layernorm(x), layer.mlp(x)
            fusing.fuse(layer)
            for found, wanted in zip((layer.post_attention_layernorm(x), layer.mlp(x)), expected, strict=True):
                worst = float((found - wanted).abs().max() / wanted.abs().max())
                assert worst < tolerance
    finally:
        torch.set_num_threads(before)


def test_an_activation_that_is_not_compiled_keeps_its_class() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.config = copy.deepcopy(layer.mlp.config)
        layer.mlp.config.hidden_act = "gelu"
    assert "LlamaMLP" not in fusing.fuse(model)


def test_joined_layers_are_packed_as_others_are() -> None:
    model = tiny_model("llama")
    fusing.fuse(model)
    with torch.inference_mode():
        assert linears.pack(model, "onednn") == {"onednn": 9}  # 4 of each layer, and the head


def test_infinity_and_nan_pass_through_the_compiled_exponential() -> None:
    layer: Any = tiny_model("llama").model.layers[0]
    fusing.fuse(layer)
    with torch.inference_mode():
        x = torch.randn(1, 2, 32)
        x[0, 1, 3] = float("nan")
        out = layer.mlp(x)
    assert torch.isfinite(out[0, 0]).all()
    assert torch.isnan(out[0, 1]).all()


def test_parts_are_no_more_than_the_work_is_worth() -> None:
    assert native.parts_for(10, 256) == 1
    assert native.parts_for(1 << 30, 256) == native.PARTS * torch.get_num_threads()

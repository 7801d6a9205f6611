"""Linear layers in other forms: the same numbers, and every layer of a model is taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import pytorch_utils

from stage_runtime.engines.autoregressive import linears
from stage_runtime.engines.autoregressive.linears import Backend, PackedLinear
from tests.engines.generation_kit import tiny_model

Conv1D: Any = pytorch_utils.Conv1D
FORMS: list[Backend] = ["plain", "onednn", "mkl"]


def available(backend: Backend) -> bool:
    return backend in linears.measure(torch.randn(8, 8), ["plain", backend])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", FORMS)
def test_a_packed_layer_multiplies_as_a_plain_one_whatever_the_number_of_rows(backend: Backend, bias: bool) -> None:
    if not available(backend):
        pytest.skip(f"this torch has no {backend}")
    layer = nn.Linear(48, 20, bias=bias)
    packed = PackedLinear(layer.weight.detach(), layer.bias.detach() if bias else None, backend)
    with torch.inference_mode():
        for shape in ((1, 48), (16, 48), (1, 70, 48)):
            rows = torch.randn(shape)
            torch.testing.assert_close(packed(rows), layer(rows))


def test_a_conv1d_of_gpt2_is_the_transposed_layer() -> None:
    holder: Any = nn.Module()
    holder.inner = Conv1D(20, 48)
    expected, rows = copy.deepcopy(holder.inner), torch.randn(3, 48)
    with torch.inference_mode():
        assert linears.pack(holder, "onednn") == {"onednn": 1}
        assert isinstance(holder.inner, PackedLinear)
        torch.testing.assert_close(holder.inner(rows), expected(rows))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_a_model_answers_the_same_with_every_layer_packed(kind: str) -> None:
    model, ids = copy.deepcopy(tiny_model(kind)), torch.arange(1, 9)[None]
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        expected = model(ids).logits
        used = linears.pack(model, "onednn")
        assert not [one for one in model.modules() if type(one) in (nn.Linear, Conv1D)]
        assert set(used) == {"onednn"}
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_fastest_form_is_one_that_this_machine_has() -> None:
    weight = torch.randn(96, 96)
    times = linears.measure(weight, FORMS)
    assert "plain" in times
    assert all(seconds >= 0 for seconds in times.values())
    assert linears.fastest(weight, FORMS) in times


def test_a_form_that_a_dtype_has_not_is_left_out() -> None:
    assert "mkl" not in linears.measure(torch.randn(32, 32).bfloat16(), ["plain", "mkl"])

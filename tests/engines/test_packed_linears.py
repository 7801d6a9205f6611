"""Linear layers in other forms: the same numbers, and every layer of a model is taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def test_the_form_that_is_chosen_is_one_that_this_machine_has() -> None:
    times = linears.measure(torch.randn(96, 96), FORMS)
    assert "plain" in times
    assert all(seconds >= 0 for of in times.values() for seconds in of)
    assert linears.choose(times) in times


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"plain": [3.0, 7.0, 14.5], "onednn": [2.7, 2.5, 5.6], "mkl": [3.0, 5.0, 9.0]}, "onednn"),
        ({"plain": [1.9, 4.8, 9.1], "onednn": [3.0, 5.0, 9.0], "mkl": [1.9, 3.8, 6.5]}, "mkl"),
        ({"plain": [1.0, 1.0, 1.0], "onednn": [2.0, 2.0, 2.0]}, "plain"),
        # Equal as far as can be measured: always the same one.
        ({"plain": [1.00, 1.0, 1.0], "onednn": [1.05, 1.05, 1.05], "mkl": [1.02, 1.02, 1.02]}, "onednn"),
        ({"plain": [1.00, 1.0, 1.0], "mkl": [1.05, 1.05, 1.05]}, "mkl"),
        # Many rows take most of the time, and count no more than one row.
        ({"plain": [1.0, 4.0, 100.0], "onednn": [2.0, 6.0, 95.0]}, "plain"),
        # A clock that has not moved.
        ({"plain": [0.0, 0.0, 0.0], "onednn": [0.0, 0.0, 0.0]}, "onednn"),
        ({"plain": [1.0, 2.0, 3.0]}, "plain"),
    ],
)
def test_the_choice_is_the_least_factor_over_all_numbers_of_rows(
    times: dict[Backend, list[float]], chosen: Backend
) -> None:
    assert linears.choose(times) == chosen


Rounds = list[dict[Backend, list[float]]]


def rounds_of(true: dict[Backend, float], delays: list[float]) -> Rounds:
    """Each value of a round is the true time, times one more than a delay."""
    coming = iter(delays)
    return [
        {backend: [seconds * (1 + next(coming)) for _ in linears.ROWS] for backend, seconds in true.items()}
        for _ in range(len(delays) // (len(true) * len(linears.ROWS)))
    ]


@given(
    times=st.tuples(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0)),
    delays=st.lists(st.floats(0, 50), min_size=60, max_size=60),
    quiet=st.sets(st.integers(0, 9), min_size=1),
)
def test_one_undisturbed_round_suffices_for_the_right_choice(
    times: tuple[float, float], delays: list[float], quiet: set[int]
) -> None:
    true: dict[Backend, float] = {"plain": times[0], "onednn": times[1]}
    calm = [0.0 if at // 6 in quiet else delay for at, delay in enumerate(delays)]
    assert linears.choose(linears.least(rounds_of(true, calm))) == linears.choose(
        {backend: [seconds] * 3 for backend, seconds in true.items()}
    )


def test_rounds_go_on_while_their_least_values_fall() -> None:
    def rounds(values: list[float]) -> Rounds:
        return [{"plain": [value] * 3, "onednn": [1.0] * 3} for value in values]

    assert not linears.settled(rounds([1.0] * 9))
    assert linears.settled(rounds([1.0] * 10))
    assert linears.settled(rounds([9.0, 1.0] + [5.0] * 8))
    assert not linears.settled(rounds([9.0] * 9 + [1.0]))
    assert linears.settled(rounds([1.05] * 5 + [1.0] * 5))


def test_a_form_that_a_dtype_has_not_is_left_out() -> None:
    assert "mkl" not in linears.measure(torch.randn(32, 32).bfloat16(), ["plain", "mkl"])

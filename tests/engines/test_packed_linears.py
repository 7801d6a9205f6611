"""Linear layers in other forms: the same numbers, and every layer of a model is taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import pytorch_utils

from stage_runtime.engines.autoregressive.kernels import linears
from stage_runtime.engines.autoregressive.kernels.linears import LinearsBackend, PackedLinear
from tests.engines.generation_kit import tiny_model
from tests.thoroughness import examples

Conv1D: Any = pytorch_utils.Conv1D
FORMS: list[LinearsBackend] = ["plain", "onednn", "mkl", "numba"]


def available(backend: LinearsBackend) -> bool:
    return backend in linears.measure(torch.randn(32, 8), ["plain", backend])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", FORMS)
def test_a_packed_layer_multiplies_as_a_plain_one_whatever_the_number_of_rows(
    backend: LinearsBackend, bias: bool
) -> None:
    if not available(backend):
        pytest.skip(f"this torch has no {backend}")
    layer = nn.Linear(48, 64, bias=bias)
    packed = PackedLinear(layer.weight.detach(), layer.bias.detach() if bias else None, backend)
    with torch.inference_mode():
        for shape in ((1, 48), (16, 48), (1, 70, 48)):
            rows = torch.randn(shape)
            torch.testing.assert_close(packed(rows), layer(rows))


def test_an_error_of_a_form_that_this_torch_has_is_not_taken_for_its_absence() -> None:
    class Broken(torch.Tensor):
        """An error of ours inside a form, as a wrong name would give."""

        def new_zeros(self, *shape: Any, **kwargs: Any) -> torch.Tensor:
            raise AttributeError("no such name")

    with pytest.raises(AttributeError, match="no such name"):
        linears.measure(torch.randn(32, 8).as_subclass(Broken), ["plain"])


def needs_dots() -> None:
    pytest.importorskip("numba")
    from stage_runtime.engines.autoregressive.kernels import tiles

    if not tiles.DOTS:
        pytest.skip("this processor does not multiply bf16 by bf16")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("short", [True, False])
@settings(max_examples=examples(25))
@given(
    rows=st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 127, 129, 150]),
    inputs=st.sampled_from([1, 2, 31, 48, 200]),
    outputs=st.sampled_from([32, 64, 160]),
    bias=st.booleans(),
)
def test_a_compiled_product_is_that_of_exact_weights(
    threads: int, short: bool, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    """short: weights that bf16 holds are kept as such."""
    pytest.importorskip("numba")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(rows * inputs + outputs)
        weight = torch.randn(outputs, inputs)
        weight = weight.bfloat16().float() if short else weight + 2.0**-20
        added = torch.randn(outputs) if bias else None
        multiply = linears.TiledLinear(weight, added)
        assert multiply.weight_bytes == weight.numel() * (2 if short else 4)
        x = torch.randn(inputs, rows).T  # rows are not one after the other
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        torch.testing.assert_close(multiply(x).double(), exact, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=examples(25))
@given(
    rows=st.sampled_from([1, 2, 3, 15, 16, 17, 64, 127, 129]),
    inputs=st.sampled_from([2, 30, 48, 200]),
    outputs=st.sampled_from([32, 64, 160]),
    bias=st.booleans(),
)
def test_a_compiled_product_of_bf16_is_as_near_as_bf16_holds(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    needs_dots()
    torch.manual_seed(rows * inputs + outputs)
    weight = torch.randn(outputs, inputs).bfloat16()
    added = torch.randn(outputs).bfloat16() if bias else None
    x = torch.randn(inputs, rows).bfloat16().T  # rows are not one after the other
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    found = linears.TiledLinear(weight, added)(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-3)


def test_bf16_has_no_compiled_product_where_inputs_are_no_pairs() -> None:
    needs_dots()
    assert not linears.tiled(torch.ones(32, 7, dtype=torch.bfloat16))
    assert linears.tiled(torch.ones(32, 8, dtype=torch.bfloat16))


def test_nan_of_a_row_stays_in_that_row_of_a_compiled_product() -> None:
    pytest.importorskip("numba")
    multiply = linears.TiledLinear(torch.randn(32, 16), None)
    x = torch.randn(20, 16)
    x[18, 3] = float("nan")
    out = multiply(x)
    assert torch.isnan(out[18]).all()
    assert torch.isfinite(out[:18]).all() and torch.isfinite(out[19]).all()


def test_weights_that_are_not_finite_are_multiplied_as_they_are() -> None:
    pytest.importorskip("numba")
    weight = torch.zeros(32, 4)
    weight[5, 1], weight[6, 1] = float("inf"), float("nan")
    out = linears.TiledLinear(weight, None)(torch.ones(1, 4))[0]
    assert out[5] == float("inf") and torch.isnan(out[6])
    assert out[:5].tolist() == [0.0] * 5 and out[7:].tolist() == [0.0] * 25


def test_a_layer_that_has_no_compiled_product_is_as_it_would_be_by_itself() -> None:
    pytest.importorskip("numba")
    holder: Any = nn.Module()
    holder.odd, holder.even = nn.Linear(16, 33), nn.Linear(16, 64)
    assert linears.pack(holder, "numba") == {"plain": 1, "numba": 1}
    assert isinstance(holder.even, PackedLinear) and type(holder.odd) is nn.Linear


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
    model, ids = tiny_model(kind), torch.arange(1, 9)[None]
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
    times: dict[LinearsBackend, list[float]], chosen: LinearsBackend
) -> None:
    assert linears.choose(times) == chosen


WIDE, TALL = (8, 4), (4, 8)
#: The cost of one call, in a layer's share of what its calls from Python cost.
CALL = linears.CALLS_S


@pytest.mark.parametrize(
    ("wide", "tall", "threads", "is_together"),
    [
        ({"numba": 1.0, "onednn": 2.0}, {"numba": 1.0, "mkl": 2.0}, 1, True),  # the best form of each
        ({"numba": 1.4, "onednn": 1.0}, {"numba": 1.0, "mkl": 2.0}, 1, True),  # its calls cost more than the difference
        ({"numba": 2.4, "onednn": 1.0}, {"numba": 1.0, "mkl": 2.0}, 1, False),
        ({"numba": 2.4, "onednn": 1.0}, {"numba": 1.0, "mkl": 2.0}, 2, True),  # another thread waits meanwhile
        ({"numba": 1.0}, {"mkl": 1.0}, 1, False),  # a shape has no such form
    ],
)
def test_a_program_is_taken_when_all_its_products_and_calls_together_are_faster(
    wide: dict[LinearsBackend, float], tall: dict[LinearsBackend, float], threads: int, is_together: bool
) -> None:
    times = {
        shape: {form: [factor * CALL] * len(linears.ROWS) for form, factor in forms.items()}
        for shape, forms in ((WIDE, wide), (TALL, tall))
    }
    assert linears.together(times, [[WIDE, TALL]] * 3, threads) is is_together


Rounds = list[dict[LinearsBackend, list[float]]]


def rounds_of(true: dict[LinearsBackend, float], delays: list[float]) -> Rounds:
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
    true: dict[LinearsBackend, float] = {"plain": times[0], "onednn": times[1]}
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

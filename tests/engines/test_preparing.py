"""A model's parts are replaced by others when it is loaded, and the log says so."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.kernels import decoder_layers, native
from stage_runtime.engines.autoregressive.loading import loader, preparing
from stage_runtime.engines.autoregressive.loading.compiling import CompiledPart
from stage_runtime.engines.autoregressive.model.models import PagedModel
from tests.engines.generation_kit import tiny_model, tiny_tokenizer


def prepared(kind: str, *, loops: bool = True, **settings: object) -> PagedModel:
    paged = PagedModel(tiny_model(kind))
    preparing.prepare(Autoregressive(model="tiny", **settings), paged, loops=loops)  # type: ignore[arg-type]
    return paged


def count(paged: PagedModel, kind: type) -> int:
    return sum(isinstance(one, kind) for one in paged.model.modules())


@pytest.mark.parametrize("compile", [False, True])
def test_a_program_of_layers_is_not_given_up_for_what_torch_would_compile(
    compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    paged = prepared("llama", linears="numba", compile=compile)
    assert (count(paged, decoder_layers.DecoderLayers), count(paged, CompiledPart)) == (1, 0)
    said = "all 2 layers are one program of compiled loops" + (", not torch's" if compile else "")
    assert said in caplog.messages


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("gpt_neox", {}, "no program for the layers of GPTNeoXForCausalLM, or for their sizes"),
        ("llama", {"linears": "onednn"}, "linears='onednn'"),
        ("llama", {"loops": False}, "torch computes attention"),
    ],
)
def test_the_log_says_why_layers_are_no_program(
    kind: str, settings: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    paged = prepared(kind, **settings)  # type: ignore[arg-type]
    assert count(paged, decoder_layers.DecoderLayers) == 0
    assert f"layers are computed one by one: {why}" in caplog.messages


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(("kind", "settings"), [("gpt_neox", {}), ("llama", {"loops": False})])
def test_what_no_compiled_loop_computes_is_compiled_by_torch_where_that_is_asked_for(
    kind: str, settings: dict[str, object]
) -> None:
    assert count(prepared(kind, compile=True, **settings), CompiledPart) > 0  # type: ignore[arg-type]


def test_a_model_with_torch_s_kernels_is_loaded_without_numba() -> None:
    native.available.cache_clear()
    loader.assemble(Autoregressive(model="tiny", kernels="torch"), tiny_model("llama"), tiny_tokenizer())
    assert native.available.cache_info().misses == 0

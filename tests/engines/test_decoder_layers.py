"""A decoder's layers as one program compute what they compute one by one; what does not fit stays as it is."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from stage_runtime.engines.autoregressive.kernels import fusing, linears
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import Computed, PagedModel
from stage_runtime.engines.autoregressive.model.rows.input_batch import Pass
from stage_runtime.engines.autoregressive.model.rows.kept_rows import KeptRows
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import AddedRows
from tests.engines import generation_kit
from tests.engines.generation_kit import VOCABULARY, Answers, alone_with, core, tiny_model
from tests.patience import patience
from tests.thoroughness import crossed

pytest.importorskip("numba")

from stage_runtime.engines.autoregressive.kernels import decoder_layers, decoder_pass, tiles
from stage_runtime.engines.autoregressive.kernels.attention_pages import PageAttention

KNOWN = ["llama", "mistral", "qwen2", "qwen3"]
BLOCK = 4
PATIENCE_S = patience(100.0)


@functools.cache
def wide_model(kind: str) -> Any:
    """A model with heads of 32 values, whose chunks are computed by a loop, too."""
    config = tiny_model(kind).config
    config.head_dim = 32
    config.max_position_embeddings = 4096
    torch.manual_seed(3)
    return generation_kit.transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "wide"), crossed(KNOWN, [False, True]))
def test_joined_layers_answer_token_for_token_as_generate_does(kind: str, wide: bool) -> None:
    model = wide_model(kind) if wide else tiny_model(kind)
    draw = random.Random(4)
    asked = {str(index): [draw.randrange(VOCABULARY) for _ in range(length)] for index, length in enumerate([3, 40, 9])}
    answers = Answers(core(model=model, backend="pages", fused=True, linear="numba", joined=True))
    for name, prompt in asked.items():
        answers.ask(name, prompt)
        answers.step()
    answers.run()
    expected = copy.deepcopy(model)
    assert answers.tokens == {name: alone_with(expected, prompt, 12) for name, prompt in asked.items()}


def runner(
    kind: str,
    *,
    joined: bool,
    direct: bool = False,
    wide: bool = True,
    short: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    """direct: with the short way through the decoder (`decoder_pass`). short: weights that bf16 holds."""
    own = copy.deepcopy(wide_model(kind) if wide else tiny_model(kind))
    model = PagedModel(own.bfloat16().to(dtype) if short else own)
    fusing.fuse(model.model)
    linears.pack(model.model, "numba")
    if joined:
        decoder_layers.join(model.model)
    if direct:
        found = decoder_pass.of(model.model)
        assert found is not None
        model.shorter = found.run
    return ModelRunner(model, PageAttention(), num_blocks=400, block_size=BLOCK)


def step(rows: list[tuple[int, int]]) -> Pass:
    """A pass of requests, each (computed tokens, tokens in this step); request n has the blocks from 40 * n + 1."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, tables = [0], []
    for index, (computed, count) in enumerate(rows):
        first = 40 * index + 1
        ids += [(7 * at + index) % VOCABULARY for at in range(computed, computed + count)]
        positions += range(computed, computed + count)
        slots += [first * BLOCK + at for at in range(computed, computed + count)]
        starts.append(len(ids))
        tables.append(list(range(first, first + -(-(computed + count) // BLOCK))))
    last = [end - 1 for end in starts[1:]]
    return Pass(ids, positions, slots, starts, [computed for computed, _count in rows], tables, last)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "direct"), crossed(KNOWN, [False, True]))
def test_every_kind_of_step_gives_the_logits_of_the_layers_one_by_one(kind: str, direct: bool) -> None:
    """One token, more rows than before (the buffers grow), chunks alone and beside rows that decode, fewer again."""
    steps = [
        [(0, 1)],
        [(0, 20), (0, 3)],
        [(20, 1), (3, 1), (0, 90)],
        [(21, 30), (4, 5), (90, 17)],
        [(51, 1), (9, 1), (107, 1), (0, 1)],
        [(52, 1)],
    ]
    one_by_one, joined = runner(kind, joined=False), runner(kind, joined=True, direct=direct)
    with torch.inference_mode():
        for rows in steps:
            expected, found = (each.compute(step(rows)).logits for each in (one_by_one, joined))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not tiles.DOTS, reason="this processor does not multiply bf16 by bf16")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "direct"), crossed(KNOWN, [False, True]))
def test_joined_layers_in_bf16_are_as_near_to_f32_as_the_layers_one_by_one(kind: str, direct: bool) -> None:
    steps = [[(0, 20), (0, 3)], [(20, 1), (3, 1), (0, 90)], [(21, 30), (4, 5), (90, 17)], [(51, 1), (9, 1)]]
    exact = runner(kind, joined=False, short=True)
    apart = runner(kind, joined=False, short=True, dtype=torch.bfloat16)
    joined = runner(kind, joined=True, short=True, dtype=torch.bfloat16, direct=direct)
    assert isinstance(joined.model.model.model.layers[0], decoder_layers.DecoderLayers)
    with torch.inference_mode():
        expected, *others = (
            torch.cat([one.compute(step(rows)).logits for rows in steps]) for one in (exact, apart, joined)
        )
    assert others[1].dtype is torch.float32  # sampling and log probabilities in bf16 would have two digits
    theirs, ours = (float((one - expected).norm()) for one in others)
    assert 0 < ours <= 1.2 * theirs


def test_layers_whose_norms_have_another_dtype_are_not_joined() -> None:
    model = copy.deepcopy(wide_model("llama"))
    fusing.fuse(model)
    with torch.inference_mode():
        linears.pack(model, "numba")
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight = norm.weight.bfloat16()
    assert decoder_layers.join(model) == 0
    norm.weight = norm.weight.float()
    assert decoder_layers.join(model) == 2


def test_the_short_way_knows_positions_beyond_those_that_it_began_with() -> None:
    """They are computed when they are needed; a table that one pass made larger serves the next one."""
    many = decoder_pass.FIRST_POSITIONS
    general, direct = (runner("llama", joined=True, direct=short) for short in (False, True))
    with torch.inference_mode():
        for rows in ([(0, many + 6)], [(many + 6, 1)], [(0, 5)], [(5, 1)]):
            expected, found = (each.compute(step(rows)).logits for each in (general, direct))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_short_way_takes_embeddings_and_gives_hidden_rows() -> None:
    general, direct = (runner("qwen3", joined=True, direct=short) for short in (False, True))
    size = general.model.row_size
    assert size is not None
    with torch.inference_mode():
        given = torch.randn(2, size, generator=torch.Generator().manual_seed(1))
        plain = step([(0, 9), (0, 3)])
        wanted = msgspec.structs.replace(plain, places=[2, 10], embeddings=given.numpy().tobytes(), hidden=True)
        expected, found = (each.compute(wanted) for each in (general, direct))
        assert expected.hidden is not None and found.hidden is not None
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
        assert not torch.equal(expected.logits, general.compute(plain).logits), "the embeddings were used"


@pytest.mark.parametrize("kind", sorted(set(generation_kit.CONFIGS) - set(KNOWN)))
def test_other_decoders_have_no_short_way(kind: str) -> None:
    model = tiny_model(kind)
    fusing.fuse(model)
    with torch.inference_mode():
        linears.pack(model, "numba")
    decoder_layers.join(model)
    assert decoder_pass.of(model) is None


def joined_layers(model: Any) -> decoder_layers.DecoderLayers:
    (found,) = [one for one in model.modules() if isinstance(one, decoder_layers.DecoderLayers)]
    return found


def test_the_program_computes_the_steps_that_it_can() -> None:
    with torch.inference_mode():
        wide = runner("llama", joined=True)
        wide.compute(step([(0, 9), (0, 1)]))
        assert len(joined_layers(wide.model.model).programs) == 1
        narrow = runner("llama", joined=True, wide=False)
        layers = joined_layers(narrow.model.model)
        narrow.compute(step([(0, 3)]))  # a chunk of heads of 8 values: layer by layer
        assert not layers.programs
        narrow.compute(step([(3, 1)]))
        assert len(layers.programs) == 1


@pytest.mark.parametrize("kind", KNOWN)
def test_rows_of_joined_layers_are_kept_and_added_as_of_the_layers_one_by_one(kind: str) -> None:
    """The program has no place for either: such a pass goes through the layers."""
    prompt, found = list(range(5, 20)), []
    torch.manual_seed(5)
    added = [AddedRows(0, [12, 13], torch.randn(2, 32) * 4)]
    for form in ({"backend": "gather"}, {"backend": "pages", "fused": True, "linear": "numba", "joined": True}):
        answers = Answers(core(model=wide_model(kind), keep_rows={"rows": (1, "all")}, **form))
        answers.ask("kept", prompt)
        answers.run()
        plain = Answers(core(model=wide_model(kind), **form))
        plain.ask("added", prompt, added_rows=added)
        plain.run()
        given = answers.rows["kept"]
        found.append((answers.tokens, plain.tokens, torch.cat([given.prompt["rows"], torch.stack(given.kept["rows"])])))
    (tokens, changed, rows), (same_tokens, same_changed, same_rows) = found
    assert (same_tokens, same_changed) == (tokens, changed) and tokens["kept"] != changed["added"]
    torch.testing.assert_close(same_rows, rows, rtol=1e-4, atol=1e-4)


def test_a_decoder_that_is_joined_already_has_its_layers_when_it_is_loaded_again() -> None:
    found = runner("llama", joined=True)
    assert list(PagedModel(found.model.model).decoder_layers) == list(found.model.decoder_layers)


def answer(engine: ModelRunner, index: int) -> list[torch.Tensor]:
    """Logits of two chunks, and of a step that is computed again and again; others for each ``index``."""
    with torch.inference_mode():
        steps = [[(0, 5 + index), (0, 3)], *[[(5 + index, 1), (3, 1)]] * 20]
        return [engine.compute(step(rows)).logits for rows in steps]


def answers_of_three(first: ModelRunner) -> list[list[torch.Tensor]]:
    """The answers of ``first`` and of two more engines with its decoder, at the same time."""
    with torch.inference_mode():
        others = [ModelRunner(first.model, PageAttention(), num_blocks=200, block_size=BLOCK) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(answer, [first, *others], range(3)))
    assert len(joined_layers(first.model.model).programs) == 3
    return found


@pytest.mark.usefixtures("threads")
def test_engines_that_share_a_decoder_compute_at_the_same_time_each_in_its_cache() -> None:
    expected = [answer(runner("llama", joined=True), index) for index in range(3)]
    first = runner("llama", joined=True)
    for found, wanted in zip(answers_of_three(first), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    gc.collect()
    assert len(joined_layers(first.model.model).programs) == 1, "caches of engines that have ended are not kept"


def test_rows_of_one_engine_are_not_taken_from_or_added_to_those_of_another_that_shares_its_layers() -> None:
    first = runner("llama", joined=False)
    kept = KeptRows({"rows": (1, "all")}, first.model, num_blocks=400, block_size=BLOCK)
    taking = ModelRunner(first.model, PageAttention(), num_blocks=400, block_size=BLOCK, kept=kept)
    torch.manual_seed(5)
    added = [(0, [7, 8], (torch.randn(2, 32) * 4).numpy().tobytes())]
    asked = msgspec.structs.replace(step([(0, 9)]), hidden=True, added=added)
    within, go_on = threading.Event(), threading.Event()

    def stopped(_layer: Any, _given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            within.set()
            assert go_on.wait(PATIENCE_S)

    with torch.inference_mode():
        wanted, other = taking.compute(asked), first.compute(step([(0, 9), (0, 4)]))

    def take() -> Computed:
        with torch.inference_mode():
            return taking.compute(asked)

    hook = first.model.decoder_layers[0].register_forward_pre_hook(stopped)
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        taken = pool.submit(take)
        assert within.wait(PATIENCE_S)
        beside = first.compute(step([(0, 9), (0, 4)]))
        go_on.set()
        found = taken.result()
    hook.remove()
    torch.testing.assert_close(beside.logits, other.logits)
    assert found.hidden is not None and wanted.hidden is not None
    torch.testing.assert_close(found.hidden, wanted.hidden)
    torch.testing.assert_close(found.kept[0], wanted.kept[0])


def test_a_decoder_that_is_joined_already_is_loaded_again_as_it_is() -> None:
    found = runner("llama", joined=True)
    with torch.inference_mode():
        expected = found.compute(step([(0, 9)])).logits
        assert decoder_layers.join(found.model.model) == 0
        again = PagedModel(found.model.model)
        assert again.layers == found.model.layers
        second = ModelRunner(again, PageAttention(), num_blocks=200, block_size=BLOCK)
        torch.testing.assert_close(second.compute(step([(0, 9)])).logits, expected)


@pytest.mark.parametrize("linear", ["plain", "onednn"])
def test_layers_with_other_products_stay_as_they_are(linear: linears.LinearsBackend) -> None:
    model = tiny_model("llama")
    fusing.fuse(model)
    with torch.inference_mode():
        linears.pack(model, linear)
    assert decoder_layers.join(model) == 0


def test_small_layers_are_one_program_because_their_calls_cost_more_than_their_products() -> None:
    """The layers are joined whatever form each product would have by itself: most of such a layer's time is
    Python's.
    """
    config = tiny_model("llama").config
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 192, 32
    model = generation_kit.transformers.AutoModelForCausalLM.from_config(config).eval()
    fusing.fuse(model)
    with torch.inference_mode():
        linears.pack(model, program=decoder_layers.products(model))
    assert decoder_layers.join(model) == config.num_hidden_layers


@pytest.mark.parametrize("kind", sorted(set(generation_kit.CONFIGS) - set(KNOWN)))
def test_layers_of_other_classes_stay_as_they_are(kind: str) -> None:
    model = tiny_model(kind)
    fusing.fuse(model)
    with torch.inference_mode():
        linears.pack(model, "numba")
    assert decoder_layers.join(model) == 0

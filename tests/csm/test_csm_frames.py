"""A model of another make under the same points of the engine: CSM's frames are those of its own ``generate``."""

from __future__ import annotations

import functools
import types
from typing import Any

import msgspec
import pytest
import torch
import transformers as untyped

from stage_models.csm.decoders import Csm, text_rows
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention
from stage_runtime.engines.autoregressive.model.rows.embeddings import ModelEmbeddings
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits
from tests.engines.generation_kit import GREEDY, Answers

transformers: Any = untyped

BOOKS, CODES, FRAMES = 4, 35, 9
PROMPTS = {"a": [5, 6, 7], "b": [1] * 19, "c": [40, 2, 31, 8, 8, 3], "d": [9]}


def tiny() -> Any:
    """Random weights, always the same ones, scaled so that frames differ."""
    torch.set_num_threads(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.CsmConfig(
        num_codebooks=BOOKS,
        vocab_size=CODES,
        text_vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        **heads,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        audio_token_id=62,
        audio_eos_token_id=63,
        codebook_pad_token_id=CODES - 1,
        codebook_eos_token_id=0,
        depth_decoder_config={
            "num_codebooks": BOOKS,
            "vocab_size": CODES,
            "backbone_hidden_size": 32,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            **heads,
            "max_position_embeddings": BOOKS + 1,
        },
        codec_config={
            "model_type": "mimi",
            "hidden_size": 16,
            "num_filters": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 16,
            "codebook_size": 64,  # more than the codes that random weights choose
            "codebook_dim": 8,
            "num_quantizers": BOOKS,
            "upsample_groups": 16,
            "vector_quantization_hidden_dimension": 8,
        },
    )
    model = transformers.CsmForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, weights in model.named_parameters():
        if weights.ndim >= 2 and not name.startswith("codec_model"):
            deviation = 1.0 if "embed" in name else 2.0 * weights.shape[-1] ** -0.5
            weights.data.normal_(0, deviation, generator=generator)
    for name, entries in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):  # of its codebooks, which are empty before they are trained
            entries.normal_(generator=generator)
    model.depth_decoder.generation_config.max_new_tokens = BOOKS - 1
    model.depth_decoder.generation_config.eos_token_id = None
    return model


@functools.cache
def generated(name: str) -> list[list[int]]:
    """The frames that the model's own ``generate`` gives, greedily."""
    ids = torch.tensor([PROMPTS[name]])
    with torch.no_grad():
        frames = tiny().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=FRAMES
        )
    return [[int(code) for code in frame] for frame in frames[0]]


def core(blocks: int) -> tuple[EngineCore, Any]:
    model, decoder = tiny(), Csm()
    embedding = model.embed_text_tokens
    paged = PagedModel(decoder.take(model), decoder.after_step)
    limits = SchedulerLimits(block_size=4, max_requests=8, max_batched_tokens=32, max_chunk=8, max_model_len=60)
    made = EngineCore(
        Scheduler(limits, BlockPool(blocks)),
        InlineExecutor(ModelRunner(paged, GatherAttention(), num_blocks=blocks, block_size=4)),
        ModelFacts(paged.vocab_size, embeddings=ModelEmbeddings(32, paged.dtype), feeds_itself=True),
    )
    return made, embedding


def test_frames_of_several_requests_are_made_in_one_call() -> None:
    model, decoder = tiny(), Csm()
    decoder.take(model)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = decoder.after_step(_step([1, 2, 3], hidden))
        alone = [decoder.after_step(_step([token], row[None])) for token, row in zip([1, 2, 3], hidden, strict=True)]
    assert torch.equal(together.emitted, torch.cat([one.emitted for one in alone]))
    assert torch.allclose(together.rows, torch.cat([one.rows for one in alone]), atol=1e-5)


def _step(tokens: list[int], hidden: Any) -> Any:
    return types.SimpleNamespace(tokens=torch.tensor(tokens), hidden=hidden)


@pytest.mark.parametrize("blocks", [64, 12])
def test_frames_are_those_of_the_model_s_own_generate_in_a_batch_and_preempted(blocks: int) -> None:
    engine, embedding = core(blocks)
    answers = Answers(engine)
    for name, ids in PROMPTS.items():
        answers.ask(
            name,
            [ROW] * len(ids),
            msgspec.structs.replace(GREEDY, max_tokens=FRAMES),
            prompt_embeds=text_rows(embedding, torch.tensor(ids)),
        )
    answers.run()
    assert (engine.scheduler.stats.preemptions > 0) == (blocks == 12)
    for name in PROMPTS:
        expected = generated(name)
        frames = [[int(code) for code in frame] for frame in answers.rows[name].emitted]
        assert frames == expected[: len(frames)], name
        assert len(frames) == FRAMES - 1, "the last code has no next input, so its frame is not made"
        assert len({tuple(frame) for frame in frames}) > 1, "frames that are all equal would prove nothing"


def test_mimi_makes_of_the_frames_the_sound_of_the_model_s_own_generate() -> None:
    engine, embedding = core(64)
    answers = Answers(engine)
    for name, ids in PROMPTS.items():
        params = msgspec.structs.replace(GREEDY, max_tokens=FRAMES + 1)
        answers.ask(name, [ROW] * len(ids), params, prompt_embeds=text_rows(embedding, torch.tensor(ids)))
    answers.run()
    model = tiny()
    sounds = []
    for name, ids in PROMPTS.items():
        given, options = torch.tensor([ids]), {"do_sample": False, "max_new_tokens": FRAMES, "output_audio": True}
        with torch.no_grad():
            (expected,) = model.generate(input_ids=given, attention_mask=torch.ones_like(given), **options)
            codes = torch.stack(list(answers.rows[name].emitted)).T[None]
            sounds.append(model.codec_model.decode(codes).audio_values[0, 0])
        assert torch.equal(sounds[-1], expected), name
    assert float(sounds[0].abs().max()) > 0 and not torch.equal(sounds[0], sounds[1])

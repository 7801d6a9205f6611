"""Tiny language models and a tokenizer, made in code, for tests of the autoregressive engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import transformers as untyped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor, ThreadExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import EndTokens, ModelFacts
from stage_runtime.engines.autoregressive.kernels import fusing, linears
from stage_runtime.engines.autoregressive.kernels.attention_pages import PageAttention
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import GatherAttention
from stage_runtime.engines.autoregressive.model.rows.embeddings import ModelEmbeddings
from stage_runtime.engines.autoregressive.model.rows.kept_rows import KeptRows
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, ModelOutput
from stage_runtime.engines.autoregressive.sampling.model_output import joined as joined_rows
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.speculation.proposing import Proposer
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import FinishReason
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits, SchedulerOutput
from tests.engines.overlap_kit import Steps

transformers: Any = untyped

VOCABULARY = 259  # 256 bytes and three special tokens
END = 256
BACKENDS = ("gather", "pages")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    # Larger than usual: with 0.02 all logits are nearly equal, and rounding would choose the token.
    "initializer_range": 0.3,
    "eos_token_id": None,  # `alone` is to generate as many tokens as it is asked for
    "bos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=6),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=6),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_GROUPED,
        head_dim=8,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_COMMON, intermediate_size=48),
    "phi": lambda: transformers.PhiConfig(**_COMMON, intermediate_size=48),
}


_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_STATE_ONLY: dict[str, Any] = {
    name: value for name, value in _COMMON.items() if name not in ("num_attention_heads", "max_position_embeddings")
}

#: Models with state beside attention.
STATEFUL: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: transformers.Lfm2Config(**_GROUPED, block_ff_dim=48, layer_types=["conv", "full_attention"]),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_GROUPED,
        **_DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_GROUPED, **_DELTA),
    "mamba": lambda: transformers.MambaConfig(**_STATE_ONLY, state_size=8),
    "mamba2": lambda: transformers.Mamba2Config(
        **_STATE_ONLY, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8
    ),
    "bamba": lambda: transformers.BambaConfig(**_GROUPED, **_MAMBA2, attn_layer_indices=[1], mamba_chunk_size=8),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **_GROUPED, **_MAMBA2, head_dim=8, mamba_d_ssm=64, mamba_chunk_size=8
    ),
}

_MIXTURE: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}
#: Mixtures of experts, and how many each has.
MIXTURES = {"qwen3_moe": 6, "qwen2_moe": 4, "mixtral": 4, "olmoe": 4, "gpt_oss": 4}
_MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **{**_MIXTURE, "num_hidden_layers": 3}, moe_intermediate_size=16, num_experts=6, head_dim=8, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_MIXTURE, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_MIXTURE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_MIXTURE, num_experts=4),
}


def tiny_model(kind: str) -> Any:
    """A model with random weights, always the same ones. It belongs to the caller: an engine changes what it takes."""
    return copy.deepcopy(_tiny_model(kind))


@functools.cache
def _tiny_model(kind: str) -> Any:
    torch.set_num_threads(1)
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    try:
        return transformers.AutoModelForCausalLM.from_config({**CONFIGS, **STATEFUL, **_MIXTURES}[kind]()).eval()
    finally:
        torch.random.set_rng_state(state)


def tiny_tokenizer() -> Any:
    """One token a byte, so that characters beyond ASCII are cut in the middle; with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>", "<user>", "<assistant>"])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


def alone(kind: str, prompt: Sequence[int], count: int) -> list[int]:
    """The answer of transformers' own ``generate`` to one prompt, greedily, in f32."""
    return alone_with(tiny_model(kind), prompt, count)


def alone_with(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    model.set_attn_implementation("eager")
    wanted = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
    return [int(token) for token in whole[0, len(prompt) :]]


def attention(backend: str) -> GatherAttention:
    """Skips the test where numba is missing."""
    if backend == "pages":
        pytest.importorskip("numba")
        return PageAttention()
    return GatherAttention()


def core(
    kind: str = "llama",
    *,
    backend: str = "gather",
    fused: bool = False,
    linear: linears.LinearsBackend | None = None,
    joined: bool = False,
    model: Any = None,
    blocks: int = 64,
    overlapping: bool | None = None,
    after_step: Callable[[Any], Any] | None = None,
    keep_rows: Mapping[str, Any] | None = None,
    grammars: Callable[[Any], Any] | None = None,
    proposer: Proposer | None = None,
    **limits: Any,
) -> EngineCore:
    """model: instead of that of ``kind``; it is copied. after_step: of its decoder. keep_rows: as of a stage.

    overlapping: None: as `overlap_kit` says. proposer: of drafts, for ``num_speculative_tokens`` above 0.
    """
    chosen = {"block_size": 4, "max_requests": 8, "max_batched_tokens": 32, "max_chunk": 16, "max_model_len": 120}
    scheduler = Scheduler(SchedulerLimits(**{**chosen, **limits}), BlockPool(blocks))
    found = model or tiny_model(kind)
    paged = PagedModel(copy.deepcopy(found) if fused or linear else found, after_step)
    if fused:
        fusing.fuse(paged.model)
    if linear is not None:
        linears.pack(paged.model, linear)
    if joined:
        from stage_runtime.engines.autoregressive.kernels import decoder_layers

        assert decoder_layers.join(paged.model) == paged.model.config.num_hidden_layers
    size: dict[str, Any] = {"num_blocks": blocks, "block_size": scheduler.limits.block_size}
    kept = KeptRows(keep_rows, paged, **size) if keep_rows else None
    runner = ModelRunner(paged, attention(backend), kept=kept, proposer=proposer, **size)
    executor = (
        ThreadExecutor(runner) if (Steps.overlap if overlapping is None else overlapping) else InlineExecutor(runner)
    )
    return EngineCore(
        scheduler,
        executor,
        ModelFacts(
            VOCABULARY,
            ends=EndTokens(frozenset({END})),
            grammars=grammars,
            embeddings=ModelEmbeddings(
                paged.row_size or 0, paged.dtype, axes=paged.axes, layers=len(paged.decoder_layers)
            ),
            feeds_itself=after_step is not None,
        ),
    )


def rows_of(kind: str, tokens: Sequence[int]) -> Any:
    """The rows that the model's embedding gives for token ids, ``[tokens, hidden]``."""
    with torch.no_grad():
        return tiny_model(kind).get_input_embeddings()(torch.tensor(list(tokens))).detach().clone()


class Answers:
    """Gathers what a core gives, by request."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.hidden_rows: dict[str, list[Any]] = {}
        self.rows: dict[str, GivenRows] = {}
        self.finish: dict[str, tuple[FinishReason, Any]] = {}

    def ask(self, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **others: Any) -> None:
        self.tokens[name], self.hidden_rows[name] = [], []
        self.engine.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=list(prompt), params=params, **others)
        )

    def step(self) -> list[EngineCoreOutput]:
        outputs, _executed = self.engine.step_fn()
        for one in outputs:
            self.tokens[one.request_id] += one.new_token_ids
            self.hidden_rows[one.request_id] += one.hidden_rows
            if (rows := joined_rows(self.rows.get(one.request_id), one.rows)) is not None:
                self.rows[one.request_id] = rows
            if one.finish is not None:
                assert one.request_id not in self.finish
                self.finish[one.request_id] = (one.finish, one.reason)
        return outputs

    def run(self) -> None:
        while self.engine.has_work():
            self.step()


class ScriptedExecutor:
    """`core.Executor`: the next token is a function of the tokens before. May fail steps, or rows."""

    max_concurrent_batches = 1

    def __init__(self, choose: Callable[[list[int]], int] = lambda tokens: (tokens[-1] + 1) % 256) -> None:
        self._choose = choose
        self.step_errors: list[Exception] = []
        self.row_errors: dict[str, str] = {}
        self.during: Callable[[SchedulerOutput], None] = lambda step: None  #: Called while a step is computed.
        self.closed = False

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None: ...

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        raise AssertionError("no blocks cross")

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        future: Future[ModelOutput] = Future()
        self.during(step)
        if self.step_errors:
            future.set_exception(self.step_errors.pop(0))
            return future
        rows = [row for row in step.rows if row.samples]
        failed = {row.request.id: self.row_errors[row.request.id] for row in rows if row.request.id in self.row_errors}
        future.set_result(ModelOutput({row.request.id: self._choose(row.request.tokens) for row in rows}, failed, {}))
        return future

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> Future[ModelOutput]:
        raise AssertionError("no request has a grammar")

    def shutdown(self) -> None:
        self.closed = True


def scripted_core(executor: ScriptedExecutor, *, blocks: int = 64, **limits: Any) -> EngineCore:
    chosen = {"block_size": 4, "max_requests": 8, "max_batched_tokens": 32, "max_chunk": 16, "max_model_len": 120}
    scheduler = Scheduler(SchedulerLimits(**{**chosen, **limits}), BlockPool(blocks))
    return EngineCore(scheduler, executor, ModelFacts(VOCABULARY, ends=EndTokens(frozenset({END}))))

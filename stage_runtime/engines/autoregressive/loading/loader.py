"""Makes the engine core of an `omni.Autoregressive`: model, tokenizer, KV cache, scheduler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypedDict, cast

import torch

from stage_runtime.api import Autoregressive, NextRows, Step
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.executors import InlineExecutor, ThreadExecutor
from stage_runtime.engines.autoregressive.core.preprocessing import EndTokens, ModelFacts
from stage_runtime.engines.autoregressive.core.step_dumps import StepDumps
from stage_runtime.engines.autoregressive.expert_parallel import experts as expert_shares
from stage_runtime.engines.autoregressive.expert_parallel.experts import ExpertRunner
from stage_runtime.engines.autoregressive.expert_parallel.meetings import ExpertRanks
from stage_runtime.engines.autoregressive.kernels import attention_pages, linears
from stage_runtime.engines.autoregressive.loading import (
    adapting,
    compiling,
    decoders,
    draft_models,
    preparing,
    setting_forms,
)
from stage_runtime.engines.autoregressive.lora import settings as lora_settings
from stage_runtime.engines.autoregressive.lora.registry import Adapters
from stage_runtime.engines.autoregressive.model import digests, dtypes, positions
from stage_runtime.engines.autoregressive.model.draft_model import DraftModel
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.model.models import PagedModel, UnsupportedModel, load_model
from stage_runtime.engines.autoregressive.model.models import load_tokenizer as load_tokenizer
from stage_runtime.engines.autoregressive.model.paged_attention import attention_guests
from stage_runtime.engines.autoregressive.model.paged_attention.attention import (
    AttentionBackend,
    GatherAttention,
    LayerShape,
)
from stage_runtime.engines.autoregressive.model.rows.embeddings import ModelEmbeddings
from stage_runtime.engines.autoregressive.model.rows.kept_rows import KeptRows
from stage_runtime.engines.autoregressive.model.states import STATES_KEPT
from stage_runtime.engines.autoregressive.speculation import settings
from stage_runtime.engines.autoregressive.speculation.proposing import NgramProposer
from stage_runtime.engines.autoregressive.tensor_parallel import sharding
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import Leading, Ranks
from stage_runtime.engines.autoregressive.text import reasoning
from stage_runtime.engines.autoregressive.text.structured_output import bounded_numbers
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from stage_runtime.engines.autoregressive.text.tool_calls import call_forms
from stage_runtime.engines.gpus import gpumemory
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Policy, SchedulerLimits

log = logging.getLogger(__name__)

HOST_CACHE_BYTES: Final = 1 << 29  # of a CPU, where a stage has no budget of its own
DEVICE_SHARE: Final = 0.9  # of what the stage's budget leaves: a step's activations need the rest
EMPTY_BLOCK: Final = 4096  # bytes; a model without attention keeps nothing in blocks, which still count its tokens
ENGINES: Final = ("own", "openvino", "vllm")
GUESTS: Final[dict[str, Callable[[], AttentionBackend]]] = {
    "flash-attn": attention_guests.FlashAttention,
    "flashinfer": attention_guests.FlashinferAttention,
}


class Loaded(NamedTuple):
    core: EngineCore
    tokenizer: Any
    num_blocks: int
    linears: dict[linears.LinearsBackend, int]
    runner: ModelRunner
    weights: str = ""  #: `digests.weights_digest` of the whole model, as it was loaded, and what else its keys are of.


def load(
    spec: Autoregressive,
    *,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    digest: bool = False,
    experts: ExpertRanks | None = None,
) -> Loaded:
    """ranks: of a tensor-parallel engine; each of them loads. digest: `Loaded.weights` is wanted. experts: the engines
    that share the model's experts, not joined yet.

    Raises: ConfigurationError: transformers is missing, or the values or the model do not fit."""
    check(spec)
    if spec.threads is not None and device == "cpu":
        torch.set_num_threads(spec.threads)
    progress(f"loading {spec.model}")
    dtype = dtypes.chosen(spec.dtype, device)
    tokenizer = decoders.tokenizer_of(spec)
    if spec.decoder is None:
        kind = None if experts is None else functools.partial(expert_shares.reading_own, ranks=experts)
        model = load_model(spec.model, dtype=dtype, revision=spec.revision, device=device, kind=kind)
        return assemble(spec, model, tokenizer, progress=progress, ranks=ranks, digest=digest, experts=experts)
    decoder = decoders.made(spec.decoder)
    model = decoder.load(spec.model, revision=spec.revision, dtype=getattr(torch, dtype), device=device).eval()
    after_step = getattr(decoder, "after_step", None)
    given: dict[str, Any] = {"ranks": ranks, "after_step": after_step, "digest": digest, "experts": experts}
    return assemble(spec, model, tokenizer, progress=progress, **given)


def assemble(
    spec: Autoregressive,
    model: Any,
    tokenizer: Any,
    *,
    progress: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    after_step: Callable[[Step], NextRows] | None = None,
    digest: bool = False,
    experts: ExpertRanks | None = None,
) -> Loaded:
    """The same as `load`, for a model in memory; replaces its linear layers. after_step: that of its `Decoder`."""
    check(spec)
    if ranks is not None and spec.overlap is True:
        raise ConfigurationError("omni.Autoregressive(overlap=True): tpSize goes without it")
    weights = digests.weights_digest(model) if digest else ""  # before anything is cut or packed
    lora = adapting.planned(spec, model, after_step)
    paged = _cut(model, after_step, ranks, experts)
    speculation = _speculation(spec, paged)
    if ranks is not None:
        _check_ranks(paged)
    if paged.device.type == "cpu":
        progress("choosing the fastest form of the weights")
    attention, used = _prepared(spec, paged)
    if lora is not None:
        paged.adapters = lora.layers(paged, ranks, loops=isinstance(attention, attention_pages.PageAttention))
    draft = None
    if speculation is not None and speculation.method == "draft_model" and (ranks is None or ranks.rank == 0):
        progress(f"loading the draft model {speculation.model}")
        draft = draft_models.load(speculation, paged, tokenizer)
        weights += digests.weights_digest(draft.model) if digest else ""
    length = min(paged.positions, spec.max_model_len or paged.positions)
    drafting = None if draft is None else _prepared(spec, draft)[0]
    num_blocks = _blocks(spec, paged, length, draft, adapters=0 if lora is None else lora.nbytes)
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    size = _Size(num_blocks=num_blocks, block_size=spec.block_size)
    proposer = _proposer(speculation, paged, draft, drafting, size)
    runner = _runner(spec, paged, attention, size, proposer, ranks=ranks, experts=experts)
    scheduler = Scheduler(_limits(spec, paged, length, speculation), BlockPool(num_blocks))
    log.info("KV cache: %d blocks of %d tokens; a request has at most %d", num_blocks - 1, spec.block_size, length)
    for one in (paged, draft):
        if one is not None:
            factors = positions.settle_long_rope(one.model, scheduler.longest)
            weights += factors if digest else ""
    text = not isinstance(tokenizer, decoders.TokensOnly)
    grammars = Grammars(tokenizer, paged.vocab_size, paged.end_ids, number_digits=spec.number_digits) if text else None
    executor = _executor(spec, runner, alone=ranks is None and experts is None)
    core = _core(spec, scheduler, executor, paged, tokenizer, grammars, lora)
    if ranks is None or ranks.rank == 0:
        _warm_up(spec, runner, proposer, grammars, progress)
        if core.adapters is not None and lora is not None:
            adapting.load(core.adapters, lora.settings, progress)
    return Loaded(core, tokenizer, num_blocks, used, runner, weights)


def _cut(
    model: Any,
    after_step: Callable[[Step], NextRows] | None,
    ranks: Ranks | None,
    experts: ExpertRanks | None,
) -> PagedModel:
    """The rank's part of the model, without the experts that other engines have."""
    if ranks is not None:
        with torch.inference_mode():
            sharding.shard(model, ranks)
    if experts is not None:
        expert_shares.share(model, experts)
    return PagedModel(model, after_step)


def _check_ranks(paged: PagedModel) -> None:
    """Raises: UnsupportedModel: ranks cannot share it."""
    if paged.sinks or paged.state_layers:
        what = "attention sinks" if paged.sinks else "state beside attention"
        raise UnsupportedModel(f"{type(paged.model).__name__} has {what}, which tpSize does not share among ranks")


def _proposer(
    speculation: settings.Speculation | None,
    paged: PagedModel,
    draft: PagedModel | None,
    drafting: AttentionBackend | None,
    size: _Size,
) -> DraftModel | NgramProposer | None:
    """drafting: the attention of the model that drafts."""
    if draft is not None and drafting is not None:
        return DraftModel(draft, drafting, vocab_size=paged.vocab_size, **size)
    if speculation is not None and speculation.method == "ngram":
        return NgramProposer(speculation)
    return None


def _core(
    spec: Autoregressive,
    scheduler: Scheduler,
    executor: ThreadExecutor | InlineExecutor,
    paged: PagedModel,
    tokenizer: Any,
    grammars: Grammars | None,
    lora: adapting.PlannedAdapters | None,
) -> EngineCore:
    rows, last = None, tokenizer.eos_token_id
    if paged.row_size is not None:
        rows = ModelEmbeddings(paged.row_size, paged.dtype, axes=paged.axes, layers=len(paged.decoder_layers))
    return EngineCore(
        scheduler,
        executor,
        ModelFacts(
            paged.vocab_size,
            ends=EndTokens(paged.end_ids, frozenset() if last is None else frozenset({int(last)})),
            grammars=None if grammars is None else grammars.compile,
            embeddings=rows,
            feeds_itself=paged.after_step is not None,
            adapters=None if lora is None else Adapters(lora.settings, executor.call),
        ),
        dumps=StepDumps(tokens=spec.dump_tokens),
    )


def _warm_up(
    spec: Autoregressive,
    runner: ModelRunner,
    proposer: DraftModel | NgramProposer | None,
    grammars: Grammars | None,
    progress: Callable[[str], None],
) -> None:
    """Do once what the first requests would wait for."""
    progress("compiling and warming up" if spec.compile else "warming up")
    for tokens in sorted({1, spec.max_chunk}):  # the first pass of a shape chooses kernels and allocates
        runner.execute_dummy_batch(tokens)
    if isinstance(proposer, DraftModel):
        proposer.warm_up()
    if grammars is not None:
        progress("preparing grammars")
        grammars.prepare()


class _Size(TypedDict):
    """The size of the KV cache, as options of `ModelRunner` and `DraftModel`."""

    num_blocks: int
    block_size: int


def _prepared(spec: Autoregressive, paged: PagedModel) -> tuple[AttentionBackend, dict[linears.LinearsBackend, int]]:
    """Give a model its fastest form. Returns its attention, and how many linear layers each form replaced.

    Raises: ConfigurationError: kernels are wanted that cannot be had.
    """
    attention = _attention(spec, paged)
    if paged.device.type == "cpu":
        return attention, preparing.prepare(spec, paged, loops=isinstance(attention, attention_pages.PageAttention))
    if spec.compile:
        compiling.compile_parts(paged.model)
    return attention, {}


def _limits(
    spec: Autoregressive, paged: PagedModel, length: int, speculation: settings.Speculation | None
) -> SchedulerLimits:
    """length: tokens that a request has at most."""
    if paged.state_layers and spec.prefix_caching:
        kind = paged.model.config.model_type
        log.info("a %s model keeps state beside attention, of each request alone: the prefix cache is off", kind)
    return SchedulerLimits(
        block_size=spec.block_size,
        max_requests=spec.max_requests,
        max_batched_tokens=max(spec.max_batched_tokens, spec.max_requests),
        max_chunk=spec.max_chunk,
        max_model_len=length,
        policy=cast(Policy, spec.policy),
        prefix_caching=spec.prefix_caching and not paged.state_layers,
        num_speculative_tokens=0 if speculation is None else speculation.num_speculative_tokens,
    )


def _runner(
    spec: Autoregressive,
    paged: PagedModel,
    attention: AttentionBackend,
    size: _Size,
    proposer: DraftModel | NgramProposer | None,
    *,
    ranks: Ranks | None,
    experts: ExpertRanks | None,
) -> ModelRunner:
    """The runner of the first rank, of a further rank, of an engine that shares experts, or of one alone."""
    kept = KeptRows(spec.keep_rows, paged, **size) if spec.keep_rows else None
    options: dict[str, Any] = {**size, "proposer": proposer}
    if isinstance(proposer, DraftModel):
        options["beside"] = proposer.regions()
    if ranks is not None and ranks.rank == 0:
        return Leading(paged, attention, ranks, kept=kept, **options)
    if experts is not None:
        runner = ExpertRunner(paged, attention, kept=kept, **options)
        runner.ranks = experts
        return runner
    return ModelRunner(paged, attention, kept=kept if ranks is None else None, **options)


def _executor(spec: Autoregressive, runner: ModelRunner, *, alone: bool) -> ThreadExecutor | InlineExecutor:
    """alone: the engine computes its passes without other ranks or engines."""
    model = runner.model
    # A hook's frames are sent while a step is computed.
    beside = model.device.type != "cpu" or model.after_step is not None
    overlaps = beside and alone if spec.overlap == "auto" else spec.overlap
    return ThreadExecutor(runner) if overlaps else InlineExecutor(runner)


def _speculation(spec: Autoregressive, paged: PagedModel) -> settings.Speculation | None:
    """Raises: ConfigurationError: it is not for this model, or not beside another setting."""
    if spec.speculative_config is None:
        return None
    name = "omni.Autoregressive(speculative_config=…)"
    if spec.keep_rows:
        raise ConfigurationError(f"{name}: does not go with keep_rows")
    if paged.after_step is not None:
        raise ConfigurationError(f"{name}: a decoder with after_step makes its own next rows, one in a step")
    if paged.state_layers:
        kind = paged.model.config.model_type
        raise UnsupportedModel(
            f"{name}: a {kind} model keeps state beside attention, which rejected tokens would change"
        )
    return settings.checked(spec.speculative_config)


def _attention(spec: Autoregressive, paged: PagedModel) -> AttentionBackend:
    """Raises: ConfigurationError: kernels are wanted that cannot be had."""
    if (guest := GUESTS.get(spec.kernels)) is not None:
        if paged.device.type != "cuda":
            raise ConfigurationError(f"omni.Autoregressive(kernels={spec.kernels!r}): needs a GPU")
        if paged.sinks:
            kind = type(paged.model).__name__
            raise UnsupportedModel(f"omni.Autoregressive(kernels={spec.kernels!r}): {kind} has attention sinks: 'auto'")
        return guest()
    if spec.kernels == "torch":  # numba is not asked: its import and first loop take 0.4 s of processor time
        return GatherAttention()
    found = attention_pages.available(paged.device, paged.dtype)
    if spec.kernels == "numba" and not found:
        raise ConfigurationError(
            f"omni.Autoregressive(kernels='numba'): needs the extra `numba`, a CPU, and float32 or bfloat16; "
            f"this is {paged.dtype} on {paged.device}"
        )
    return attention_pages.PageAttention() if found else GatherAttention()


def _blocks(
    spec: Autoregressive, paged: PagedModel, length: int, draft: PagedModel | None = None, *, adapters: int = 0
) -> int:
    """How many blocks there are, the padding included. draft: a model whose keys and values lie in them, too.
    adapters: bytes that are kept free for them.
    """
    of_token = token_bytes(paged.layers.values(), paged.dtype) + KeptRows.token_bytes(spec.keep_rows or {}, paged)
    of_token += 0 if draft is None else token_bytes(draft.layers.values(), draft.dtype)
    block_bytes = spec.block_size * of_token or EMPTY_BLOCK
    kept = paged.state_bytes * STATES_KEPT * spec.max_requests
    if spec.kv_cache_bytes is None and paged.device.type == "cpu":
        budget = HOST_CACHE_BYTES  # states lie beside it: a default refuses no model
    else:
        given = _device_budget(paged, draft) - adapters if spec.kv_cache_bytes is None else spec.kv_cache_bytes
        budget = given - kept
        if kept and budget < block_bytes:
            kind = paged.model.config.model_type
            raise ConfigurationError(
                f"omni.Autoregressive(max_requests={spec.max_requests}): a {kind} model keeps {kept} bytes of state "
                f"for so many requests, and of {budget + kept} bytes of memory {budget} are left for keys and values"
            )
    if kept:
        log.info("state beside attention: %d bytes for %d requests", kept, spec.max_requests)
    enough = spec.max_requests * -(-length // spec.block_size)
    found = min(budget // block_bytes, enough)
    if found < 1:
        size = f"block_size={spec.block_size}"
        raise ConfigurationError(
            f"omni.Autoregressive({size if spec.kv_cache_bytes is None else f'kv_cache_bytes={spec.kv_cache_bytes}'}): "
            f"a KV cache of {budget} bytes holds no block of {block_bytes}"
        )
    return found + 1


def token_bytes(layers: Any, dtype: torch.dtype) -> int:
    """The bytes of K and V of one token, in all layers."""
    values = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in cast(Sequence[LayerShape], layers))
    return int(values * dtype.itemsize)


def _device_budget(paged: PagedModel, draft: PagedModel | None) -> int:
    """The bytes that the stage's share of the device (``gpuMemory``) leaves beside the weights."""
    free, total = torch.cuda.mem_get_info(paged.device)
    share = gpumemory.share_of_stage() or torch.cuda.get_per_process_memory_fraction(paged.device)
    models = [one.model for one in (paged, draft) if one is not None]
    weights = sum(one.nbytes for model in models for one in (*model.parameters(), *model.buffers()))
    return int(gpumemory.left_for_cache(total=total, free=free, share=share, weights=weights) * DEVICE_SHARE)


def check(spec: Autoregressive) -> None:
    """Raises: ConfigurationError: a value is not allowed."""
    for name in ("max_requests", "max_batched_tokens", "max_chunk", "block_size"):
        if getattr(spec, name) < 1:
            raise ConfigurationError(f"omni.Autoregressive({name}={getattr(spec, name)}): at least 1")
    setting_forms.check(spec)
    digits = spec.number_digits
    if digits is not None and not 1 <= digits <= bounded_numbers.MOST_DIGITS:
        raise ConfigurationError(
            f"omni.Autoregressive(number_digits={digits!r}): None, or from 1 to {bounded_numbers.MOST_DIGITS}"
        )
    if spec.speculative_config is not None:
        settings.checked(spec.speculative_config)
    lora_settings.checked(spec)
    for name, allowed in (
        ("engine", ENGINES),
        ("dtype", dtypes.DTYPES),
        ("policy", ("fcfs", "priority", "shortest")),
        ("linears", ("auto", "plain", "onednn", "mkl", "numba")),
        ("kernels", ("auto", "torch", "numba", *GUESTS)),
        ("overlap", ("auto", True, False)),
        ("tool_calls", ("auto", *call_forms.FORMS)),
        ("reasoning", reasoning.FORMS),
    ):
        if getattr(spec, name) not in allowed:
            raise ConfigurationError(
                f"omni.Autoregressive({name}={getattr(spec, name)!r}): one of {', '.join(map(str, allowed))}"
            )

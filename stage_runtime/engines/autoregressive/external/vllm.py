"""vLLM's `AsyncLLM` as the engine of a stage. Its core is a process of its own; a task reads each request's outputs.

vLLM schedules, samples and caches. A parameter that it does not compute in the same sense is refused by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.external import fields
from stage_runtime.engines.autoregressive.external.client import ExternalClient, output
from stage_runtime.engines.autoregressive.model import dtypes, models, positions
from stage_runtime.engines.autoregressive.process.messages.engine_messages import Refused
from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams, fields_of
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import (
    MOST,
    WRITTEN,
    Grammar,
    GrammarRefused,
)
from stage_runtime.engines.autoregressive.text.structured_output.grammars import prepared_schema
from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.rules.autoregressive.requests import FinishReason

log = logging.getLogger(__name__)

_SAME: Final = fields_of("vllm")
TAKES: Final = frozenset({*_SAME, "top_p", "stop_token_ids", "logit_bias", "grammar", "cache_salt"})
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
HOST_CACHE_BYTES: Final = 1 << 29  # as `loader.HOST_CACHE_BYTES`
BLOCK: Final = 128  # tokens of one of its blocks on a CPU
WATCH_S: Final = 1.0  # between looks whether the core has ended while nothing is computed


class VLLMClient(ExternalClient):
    """One `AsyncLLM`, started when it is made."""

    def __init__(self, package: Any, llm: Any, *, vocab_size: int, longest: int) -> None:
        """package: the module `vllm`. longest: tokens of prompt and answer."""
        super().__init__()
        self._package = package
        self._llm = llm
        self._vocab_size = vocab_size
        self._longest = longest
        self._names = itertools.count()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def attach(self) -> None:
        super().attach()
        self._watch = self._loop.create_task(self._watched())

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        fields.check_request(request, TAKES, "vllm", longest=self._longest, vocab_size=self._vocab_size)
        wanted = sampling_params(self._package, request.params)
        self._began(request)
        task = self._loop.create_task(self._serve(request, wanted))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda task: self._done(request.request_id, task))

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            if self.reqs_in_flight.pop(name, None) is not None:
                self._tasks[name].cancel()  # its generator then aborts it
        self._report()

    async def close(self, *, drain_s: float = 0.0) -> None:
        tasks = list(self._tasks.values())
        if tasks and drain_s:
            await asyncio.wait(tasks, timeout=drain_s)
        ending = tasks if self._watch is None else [*tasks, self._watch]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.to_thread(self._llm.shutdown)
        self._end("the stage has closed the engine")

    async def _watched(self) -> None:
        while not self.dead:
            await asyncio.sleep(WATCH_S)
            if self._llm.errored:
                self._end("vllm has ended")

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _serve(self, request: EngineCoreRequest, wanted: Any) -> None:
        name = request.request_id
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        outputs = self._llm.generate(prompt, wanted, f"omni-{next(self._names)}")
        try:
            async with contextlib.aclosing(outputs):
                async for one in outputs:
                    self._steps += 1
                    self._give([_output(name, one, request.params)])
        except Exception as error:  # it fails alone, unless the engine has ended
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if self._llm.errored:
                self._end(f"vllm has ended: {describe(cause)}")
            else:
                self._give([], [self._refused(name, cause)])

    def _refused(self, name: str, cause: Exception) -> Refused:
        of_client = isinstance(cause, ValueError | self._package.exceptions.VLLMClientError)
        return Refused(name, "invalid_request" if of_client else "stage_failed", f"vllm: {describe(cause)}")


def _output(name: str, one: Any, params: SamplingParams) -> EngineCoreOutput:
    """The output of a request, in the form of the own engine."""
    part = one.outputs[0]
    finish = None if part.finish_reason is None else _REASONS.get(part.finish_reason, FinishReason.ERROR)
    reason = part.stop_reason
    if finish is FinishReason.ERROR:
        reason = "vllm could not compute it"
    tokens = list(part.token_ids)
    logprobs = [
        _logprobs(found, token, params.logprobs or 0) for found, token in zip(part.logprobs or (), tokens, strict=False)
    ]
    rows = (one.prompt_logprobs or ())[1:]  # the first token has none
    of_prompt = [
        _logprobs(found, token, params.prompt_logprobs or 0)
        for found, token in zip(rows, one.prompt_token_ids[1:], strict=False)
    ]
    return output(
        name,
        tokens,
        finish,
        reason=reason,
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        cached_tokens=one.num_cached_tokens or 0,
    )


def _logprobs(found: Mapping[int, Any], token: int, count: int) -> TokenLogprobs:
    """The chosen token's, and the ``count`` likeliest ones': vLLM adds the chosen one where it is not among these."""
    ranked = sorted(((one, of.logprob) for one, of in found.items()), key=lambda item: -item[1])
    return TokenLogprobs(found[token].logprob, tuple(ranked[:count]))


def sampling_params(package: Any, params: SamplingParams) -> Any:
    """A request's parameters as vLLM's. Raises: InvalidRequest: a grammar that cannot be followed."""
    given: dict[str, Any] = {name: getattr(params, name) for name in _SAME}
    given["top_p"] = max(params.top_p, fields.LEAST_TOP_P)
    given["stop_token_ids"] = list(params.stop_token_ids)
    given["logit_bias"] = dict(params.logit_bias) or None
    if params.grammar is not None:
        given["structured_outputs"] = package.sampling_params.StructuredOutputsParams(**_grammar(params.grammar))
    kind = package.sampling_params.RequestOutputKind.DELTA
    return package.SamplingParams(**given, detokenize=False, output_kind=kind)


def _grammar(grammar: Grammar) -> dict[str, Any]:
    """The grammar as vLLM's options; its llguidance gets the same text as the one of this process would."""
    if grammar.size > MOST:
        raise GrammarRefused(grammar.place, f"expected at most {MOST} characters, got {grammar.size}")
    if grammar.kind == "lark":
        return {"grammar": grammar.lark({part.rule: prepared_schema(part.text, part.place) for part in grammar.parts})}
    if grammar.kind == "regex":
        return {"regex": grammar.text}
    return {"json": {**prepared_schema(grammar.text, grammar.place), "x-guidance": WRITTEN}}


def load(spec: Autoregressive, context: StageContext | None) -> tuple[VLLMClient, Any]:
    """The client and the tokenizer. Raises: ConfigurationError: vLLM is missing, or values or model do not fit."""
    fields.check_settings(spec, fields.COMMON | {"compile"})
    if spec.model.endswith(".gguf"):
        raise ConfigurationError(
            f"the engine vllm takes a folder in transformers' form or a name, no GGUF: {spec.model}"
        )
    with _environment(spec):
        package = _package()
        progress = (lambda text: None) if context is None else context.progress
        progress(f"starting vLLM {package.__version__} with {spec.model}")
        config, _generation = models.load_configs(spec.model, revision=spec.revision)
        text = config.get_text_config(decoder=True)
        known = positions.positions_of(text)
        longest = min(known, spec.max_model_len or known)
        try:
            llm = package.v1.engine.async_llm.AsyncLLM.from_engine_args(_arguments(package, spec, text, longest))
        except Exception as error:
            raise ConfigurationError(f"vLLM does not load {spec.model}: {describe(error)}") from error
    tokenizer = models.load_tokenizer(spec.model, revision=spec.revision)
    return VLLMClient(package, llm, vocab_size=int(text.vocab_size), longest=longest), tokenizer


def _arguments(package: Any, spec: Autoregressive, text: Any, longest: int) -> Any:
    dtype = dtypes.chosen(spec.dtype, "cpu")
    return package.AsyncEngineArgs(
        model=spec.model,
        revision=spec.revision,
        dtype=dtype,
        max_num_seqs=spec.max_requests,
        max_num_batched_tokens=max(spec.max_batched_tokens, spec.max_requests),
        enable_chunked_prefill=True,
        max_model_len=longest,
        kv_cache_memory_bytes=spec.kv_cache_bytes or cache_bytes(text, longest, spec.max_requests, dtype),
        enable_prefix_caching=spec.prefix_caching,
        enforce_eager=not spec.compile,
        structured_outputs_config={"backend": "guidance"},  # as the own engine
        enable_log_requests=False,
        disable_log_stats=True,
    )


def cache_bytes(text: Any, longest: int, requests: int, dtype: str) -> int:
    """The size of the KV cache where a stage has no budget: vLLM would take nine tenths of the machine's memory.

    text: the model's config. It takes as much as the own engine, and at least one request of full length.
    """
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    values = 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    request: int = values * (4 if dtype == "float32" else 2) * BLOCK * (-(-longest // BLOCK) + 1)
    return max(request, min(request * requests, HOST_CACHE_BYTES))


@contextlib.contextmanager
def _environment(spec: Autoregressive) -> Iterator[None]:
    """Variables that vLLM takes from the environment alone, while its processes are started; it sets more, which ends
    here.
    """
    before = dict(os.environ)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report its use to its authors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two engines would be bound to the same processors
    os.environ["OMP_NUM_THREADS"] = str(spec.threads or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _package() -> Any:
    try:
        import vllm
        import vllm.exceptions
        import vllm.platforms
        import vllm.sampling_params
        import vllm.v1.engine.async_llm
    except ImportError as error:
        raise ConfigurationError(
            f"omni.Autoregressive(engine='vllm') needs vLLM, which cannot be imported ({error}): "
            "pip install 'omnipipeline[vllm]' in an environment without the extra `engine` (docs/engine.md)"
        ) from error
    if not vllm.platforms.current_platform.is_cpu():
        raise ConfigurationError(
            f"the engine vllm runs on CPUs: this vLLM is built for {vllm.platforms.current_platform.device_name}"
        )
    return vllm

"""openvino-genai's continuous batching as the engine of a stage: a thread adds requests, steps, and reads handles.

Its pipeline schedules, samples and caches. A parameter that it has no field for is refused by name: ``seed`` among
them, for one generator serves all its requests.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.external import fields, gguf_file
from stage_runtime.engines.autoregressive.external.client import ExternalClient, output
from stage_runtime.engines.autoregressive.model import dtypes, models, positions
from stage_runtime.engines.autoregressive.process.messages.engine_messages import Refused
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams, fields_of
from stage_runtime.errors import ConfigurationError, describe
from stage_runtime.rules.autoregressive.requests import FinishReason

log = logging.getLogger(__name__)

TAKES: Final = fields_of("openvino") | {"stop_token_ids"}
PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
GIB: Final = 1 << 30


class OpenVINOClient(ExternalClient):
    """One pipeline of openvino-genai, on a thread of its own from `attach` on."""

    def __init__(
        self,
        package: Any,
        pipeline: Any,
        *,
        tensor: Callable[[Sequence[int]], Any],
        vocab_size: int,
        longest: int,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """tensor: makes a prompt for the pipeline. longest: tokens of prompt and answer. end_ids: of the model."""
        super().__init__()
        self._package = package
        self._pipeline = pipeline
        self._tensor = tensor
        self._vocab_size = vocab_size
        self._longest = longest
        self._end_ids = end_ids
        self._asked: SimpleQueue[EngineCoreRequest | str | None] = SimpleQueue()  #: Requests, aborted ids, the end.
        self._thread = threading.Thread(target=self._run, name="openvino", daemon=True)

    def attach(self) -> None:
        super().attach()
        self._thread.start()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        fields.check_request(request, TAKES, "openvino", longest=self._longest, vocab_size=self._vocab_size)
        self._began(request)
        self._asked.put(request)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            if self.reqs_in_flight.pop(name, None) is not None:
                self._asked.put(name)

    async def close(self, *, drain_s: float = 0.0) -> None:
        if drain_s:
            try:
                async with asyncio.timeout(drain_s):
                    while self.reqs_in_flight and not self.dead:
                        await self.get_output_async()
            except TimeoutError:
                log.warning("%d requests of openvino were not finished in %g s", len(self.reqs_in_flight), drain_s)
        self._asked.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._end("the stage has closed the engine")

    # --- on the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            _Steps(self._package, self._pipeline, self._asked, self._add, self._post).run()
        except BaseException as error:  # of the pipeline: the request that caused it is unknown
            log.exception("openvino has ended")
            self._later(self._end, f"openvino has ended: {describe(error)}")

    def _post(self, outputs: list[EngineCoreOutput], refused: list[Refused], steps: int) -> None:
        self._later(self._take, outputs, refused, steps)

    def _take(self, outputs: list[EngineCoreOutput], refused: list[Refused], steps: int) -> None:
        self._steps = steps
        if outputs or refused:
            self._give(outputs, refused)
        else:
            self._report()

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the stage's event loop has been closed")

    def _add(self, number: int, request: EngineCoreRequest) -> Any:
        """Returns: the pipeline's handle. Raises: whatever the pipeline has against the request."""
        room = self._longest - len(request.prompt_token_ids)
        config = generation_config(self._package, request.params, room, self._end_ids)
        return self._pipeline.add_request(number, self._tensor(request.prompt_token_ids), config)


class _Steps:
    """The pipeline's loop."""

    def __init__(
        self,
        package: Any,
        pipeline: Any,
        asked: SimpleQueue[EngineCoreRequest | str | None],
        add: Callable[[int, EngineCoreRequest], Any],
        post: Callable[[list[EngineCoreOutput], list[Refused], int], None],
    ) -> None:
        self._package = package
        self._pipeline = pipeline
        self._asked = asked
        self._add = add
        self._post = post
        self._handles: dict[str, Any] = {}  #: Handles in order of arrival.
        self._numbers = 0
        self._steps = 0
        self._ends = False

    def run(self) -> None:
        """Steps until the end is asked for and all requests are over. Raises: what the pipeline raises in a step."""
        while True:
            refused = self._take_asked()
            if self._ends:
                for handle in self._handles.values():
                    handle.cancel()
            outputs: list[EngineCoreOutput] = []
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                self._steps += 1
                outputs = self._read()
            self._post(outputs, refused, self._steps)
            if self._ends and not self._pipeline.has_non_finished_requests():
                return

    def _take_asked(self) -> list[Refused]:
        """Take all that has come; wait for something while no request runs. Returns: what could not be added."""
        refused: list[Refused] = []
        while True:
            idle = not (self._handles or self._ends or refused or self._pipeline.has_non_finished_requests())
            try:
                asked = self._asked.get(block=idle)
            except Empty:
                return refused
            match asked:
                case None:
                    self._ends = True
                case str():
                    handle = self._handles.pop(asked, None)
                    if handle is not None:
                        handle.cancel()  # its blocks are freed by the next step
                case EngineCoreRequest():
                    self._numbers += 1
                    try:
                        self._handles[asked.request_id] = self._add(self._numbers, asked)
                    except Exception as error:  # it fails alone, whatever is wrong with it
                        refused.append(Refused(asked.request_id, "stage_failed", f"openvino: {describe(error)}"))

    def _read(self) -> list[EngineCoreOutput]:
        """The result of the last step."""
        running, ignored = self._package.GenerationStatus.RUNNING, self._package.GenerationStatus.IGNORED
        stopped = self._package.GenerationFinishReason.STOP
        outputs = []
        for name, handle in list(self._handles.items()):
            status = handle.get_status()
            tokens: list[int] = []
            finish = None
            while handle.can_read():
                for part in handle.read().values():
                    tokens += part.generated_ids
                    finish = FinishReason.STOP if part.finish_reason == stopped else FinishReason.LENGTH
            if status == running:
                if tokens:
                    outputs.append(output(name, tokens))
                continue
            del self._handles[name]
            if status == ignored:
                outputs.append(
                    output(name, tokens, FinishReason.ERROR, reason="the engine's KV cache has no room for it")
                )
            else:
                outputs.append(output(name, tokens, finish or FinishReason.LENGTH))
        if not outputs and self._handles and not self._pipeline.get_metrics().scheduled_requests:
            # Nothing fits, and nothing is under way that would make room.
            name, handle = next(iter(self._handles.items()))
            del self._handles[name]
            handle.cancel()
            outputs.append(output(name, (), FinishReason.ERROR, reason="the engine's KV cache has no room for it"))
        return outputs


def generation_config(package: Any, params: SamplingParams, room: int, end_ids: frozenset[int]) -> Any:
    """A request's parameters as openvino-genai's. room: tokens that its answer may have."""
    config = package.GenerationConfig()
    config.max_new_tokens = min(params.max_tokens, room)
    config.min_new_tokens = min(params.min_tokens, config.max_new_tokens)  # it refuses more
    config.do_sample = not params.greedy
    if not params.greedy:
        config.temperature = params.temperature
        config.top_p = max(params.top_p, fields.LEAST_TOP_P)
        if params.top_k:
            config.top_k = params.top_k
    config.repetition_penalty = params.repetition_penalty
    config.presence_penalty = params.presence_penalty
    config.frequency_penalty = params.frequency_penalty
    ends = (frozenset() if params.ignore_eos else end_ids) | frozenset(params.stop_token_ids)
    config.set_eos_token_id(min(ends, default=0))  # it wants one
    config.stop_token_ids = set(ends or {0})
    config.ignore_eos = not ends  # then it looks at no stop tokens either
    return config


def load(spec: Autoregressive, context: StageContext | None) -> tuple[OpenVINOClient, Any]:
    """The client and the tokenizer. Raises: ConfigurationError: a package is missing, or values or model do not fit."""
    fields.check_settings(spec, fields.COMMON)
    try:
        import openvino_genai as package
    except ImportError as error:
        raise ConfigurationError(
            f"omni.Autoregressive(engine='openvino') needs openvino-genai, which cannot be imported ({error}): "
            "pip install 'omnipipeline[openvino]'"
        ) from error
    progress = (lambda text: None) if context is None else context.progress
    progress(f"loading {spec.model}")
    tokenizer = models.load_tokenizer(spec.model, revision=spec.revision)
    config, generation = models.load_configs(spec.model, revision=spec.revision)
    text = config.get_text_config(decoder=True)
    known = positions.positions_of(text)
    with tempfile.TemporaryDirectory(prefix="omni-openvino-") as folder:
        path = Path(spec.model).expanduser()
        if not (path.suffix == ".gguf" or (path / "openvino_model.xml").exists()):
            progress("writing the weights as openvino-genai reads them")
            path = Path(folder) / "model.gguf"
            gguf_file.write(spec.model, path, revision=spec.revision)
        progress("compiling for this processor")
        empty = Path(folder) / "no tokenizer"  # ids go in and out
        empty.mkdir()
        pipeline = package.ContinuousBatchingPipeline(
            str(path), package.Tokenizer(str(empty)), _scheduler_config(package, spec), "CPU", **_properties(spec)
        )
    client = OpenVINOClient(
        package,
        pipeline,
        tensor=_tensor,
        vocab_size=int(text.vocab_size),
        longest=min(known, spec.max_model_len or known),
        end_ids=models.end_ids_of(generation, config),
    )
    return client, tokenizer


def _tensor(ids: Sequence[int]) -> Any:
    import numpy as np
    from openvino import Tensor

    return Tensor(np.asarray([ids], dtype=np.int64))


def _scheduler_config(package: Any, spec: Autoregressive) -> Any:
    config = package.SchedulerConfig()
    config.max_num_seqs = spec.max_requests
    config.max_num_batched_tokens = max(spec.max_batched_tokens, spec.max_requests)
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = spec.prefix_caching
    if spec.kv_cache_bytes is not None:
        config.cache_size = -(-spec.kv_cache_bytes // GIB)  # whole GiB; without one it grows as needed
    return config


def _properties(spec: Autoregressive) -> dict[str, Any]:
    precision = PRECISIONS[dtypes.chosen(spec.dtype, "cpu")]
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if spec.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = spec.threads
    return properties

"""The API of stage authors, ``import stage_runtime as omni``. Light: no torch, zmq or fastapi until used.

The kinds of stage function (`Simple`, `Batched`, `Streaming`) are declared here; `engines` runs them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.wire.values import (
    Audio,
    Chunk,
    Finish,
    Image,
    Media,
    Note,
    OmniRequest,
    Reasoning,
    Result,
    Routed,
    Scores,
    StagePayload,
    Text,
    ToolCall,
    Usage,
    Vectors,
    message,
)

__all__ = [
    "Audio",
    "Autoregressive",
    "Batched",
    "Chunk",
    "Decoder",
    "Encoder",
    "Feed",
    "Finish",
    "Generation",
    "Image",
    "InvalidRequest",
    "Media",
    "NextRows",
    "Note",
    "OmniRequest",
    "Prompt",
    "Reasoning",
    "RequestError",
    "Result",
    "Routed",
    "Scores",
    "Session",
    "Simple",
    "StageContext",
    "StagePayload",
    "Step",
    "Streaming",
    "Text",
    "ToolCall",
    "Usage",
    "Vectors",
    "message",
]


class Simple(msgspec.Struct, frozen=True):
    """``fn(payload) -> data``: sync, async, generator or async generator.

    concurrency: requests at once. Sync functions run on the stage's worker threads, async ones on its event loop.
    """

    fn: Callable[[StagePayload], Any]
    concurrency: int = 1


class Batched(msgspec.Struct, frozen=True):
    """``fn(list[payload]) -> list[data or Exception]`` of the same length; one batch at a time.

    max_batch: requests in one call at most. max_wait_s: how long a batch waits for more requests after its first.
    gauges: called after each batch; numbers for ``/metrics``: ``cache_hits_total``, ``cache_misses_total``,
    ``cache_bytes``. Others are not shown.
    """

    fn: Callable[[list[StagePayload]], list[Any]]
    max_batch: int = 8
    max_wait_s: float = 0.005
    gauges: Callable[[], Mapping[str, float]] | None = None


class Streaming(msgspec.Struct, frozen=True):
    """Async generator ``fn(session)``, started by a request's first message, payload or chunk."""

    fn: Callable[[Session], AsyncIterator[Any]]
    concurrency: int = 64


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of an `Autoregressive` stage: one of messages (for the chat template), text, tokens, and parts.

    parts: token ids and embeddings, one after the other: lists of ids, and float tensors ``[tokens, hidden]`` as the
    model's own embedding of tokens gives them.
    params: over the stage's defaults, named as OpenAI's: max_tokens, temperature, top_p, top_k, min_p, seed, stop, ….
    literal: control strings in ``text`` are ordinary text, as they always are in the texts of ``messages``.
    priority: lower ones first, where the stage's policy is ``priority``. cache_salt: requests with different values
    share no cached prefix. template: more arguments for the chat template.
    positions: where a model with three axes of positions (mrope) places the prompt's tokens, ``[3, tokens]`` of whole
    numbers. position_delta: what is added to the index of a generated token. added_rows: ``(layer, places, rows)``:
    floats ``[places, hidden]`` that are added to the output of a layer at these tokens of the prompt (DeepStack).
    adapter: the name of a LoRA adapter of the stage; ``""``: none; None: the one that the request's ``model`` names.
    pin: where the stage has several engines (``data_parallel_size``), prompts with an equal one go to the same engine,
    whose cache has what they share. data_parallel_rank: that engine; the prompt fails if it does not exist.
    """

    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None
    literal: bool = False
    tokens: Sequence[int] | None = None
    parts: Sequence[Any] | None = None
    params: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""
    template: dict[str, Any] = {}
    positions: Any = None
    position_delta: int = 0
    added_rows: Sequence[tuple[int, Sequence[int], Any]] = ()
    adapter: str | None = None
    pin: str = ""
    data_parallel_rank: int | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The output of an `Autoregressive` stage since the last call for the same request.

    ``begins`` is true in the first part, which comes before any token. finish: ``stop``, ``length`` or ``tool_calls``,
    in the last part. answer: all text so far, including ``text``.
    reasoning: the model's thinking, where it writes some before its answer (see `Autoregressive.reasoning`);
    reasoning_tokens: so far, of completion_tokens.
    prompt_tokens, completion_tokens: so far, of the whole request. cached_tokens: of the prompt, found in the cache.
    logprobs: for each token ``(logprob, [(token, logprob), …])``, if they were asked for; ``shown_logprobs``: the same
    as OpenAI's ``logprobs.content``. prompt_logprobs: in the first part, of the prompt's tokens but the first.
    choice: which of ``n`` answers this is a part of. ends: the last part of the request. tool_calls: calls that are
    whole now; their text is not in ``text``. hidden_rows: ``[tokens, hidden]``, where the stage has ``hidden_rows``:
    the last hidden state from which each token was chosen, on the CPU in the model's dtype.
    echo: the prompt, in the first part of an answer that is to begin with it; it is not in ``text``.
    prompt_token_ids: in the first part of each answer, with ``return_token_ids``; -1 for a row of embeddings.
    rows: by the names of the stage's ``keep_rows``, ``[tokens, hidden]`` of these tokens; prompt_rows: as that, of the
    prompt's tokens, in the part with the first token. emitted: what the stage's decoder gave for these tokens, one
    after the other; None: nothing.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    answer: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    begins: bool = False
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    shown_logprobs: list[Any] | None = None
    prompt_logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    echo: Text | None = None
    prompt_token_ids: tuple[int, ...] = ()
    choice: int = 0
    ends: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    hidden_rows: Any = None
    rows: dict[str, Any] = {}
    prompt_rows: dict[str, Any] = {}
    emitted: Any = None


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """Rows for tokens that an `Autoregressive` stage is yet to generate: ``stream`` returns them for a chunk.

    The input of each generated token is the row that the decoder's `after_step` gave and the next one of these. A
    request waits without steps while none is there. A request's prompt is whole with its first `Feed`.

    rows: floats ``[n, hidden]``; None: none yet.
    end:  ``[hidden]``, added once after the last row.
    pad:  ``[hidden]``, added at every token after that.

    ``end`` and ``pad`` are given once. When all streams have ended, no row is waited for.
    """

    rows: Any = None
    end: Any = None
    pad: Any = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step's new tokens, of all requests that go on, for `Decoder.after_step`.

    tokens: ``[B]``. hidden: ``[B, hidden]``, the last hidden state from which each was chosen. places: how many tokens
    each request had generated before. states: a dict of each request, kept until it ends, empty at first; its values
    are replaced, not changed, since a step that fails is taken again for each request alone. sampling: of each
    request, with ``temperature``, ``top_p``, ``top_k`` and ``greedy``. uniform: ``uniform(n)`` gives ``[B, n]`` numbers
    in [0, 1) that depend on a request's seed and the token's place alone.
    """

    tokens: Any
    hidden: Any
    places: Sequence[int]
    states: Sequence[dict[str, Any]]
    sampling: Sequence[Any]
    uniform: Callable[[int], Any]


class NextRows(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `Decoder.after_step`. rows: ``[B, hidden]``, each request's next input in place of its token.

    emitted: ``[B, …]``, given out with the tokens. ends: whether each request ends with this token; then its row and
    what was emitted for it are not used.
    """

    rows: Any
    emitted: Any = None
    ends: Sequence[bool] = ()


class Decoder(Protocol):
    """A model that `Autoregressive` computes in place of one of ``AutoModelForCausalLM``; made where it is computed.

    ``decoder`` names its class. A class with a method ``after_step(step: Step) -> NextRows`` computes each token's
    successor from a row of its own: it is called after each step, with all requests whose token does not end them.
    """

    def load(self, model: str, *, revision: str | None, dtype: Any, device: str) -> Any:
        """A module that is called as transformers' causal language models: ``input_ids`` or ``inputs_embeds``,
        ``position_ids``, ``use_cache``, ``return_dict``, and ``logits_to_keep`` if it has that argument; with
        ``config``, ``get_input_embeddings``, ``get_output_embeddings`` and ``get_decoder``.
        """


class Autoregressive(msgspec.Struct, frozen=True, kw_only=True):
    """A language model that answers many requests at once. Needs the extra ``engine``.

    model: a folder in transformers' form, a GGUF file, or a name at the model hub.
    prompt: what to continue; by default the messages of a chat request, or the text of another one.
    deliver: chunks, and at last a result, of what was generated; by default text for the client.
    params: defaults of sampling; ``max_tokens`` is also the most that a request may ask for.
    tool_calls: the form in which the model calls tools: ``hermes`` (``<tool_call>``), ``json`` (Llama 3), ``mistral``
    (``[TOOL_CALLS]``); ``auto`` takes the one that the chat template asks for, else ``hermes``.
    reasoning: the form in which the model thinks before it answers: ``think`` (``<think>…</think>``), ``none`` (what it
    writes is the answer); ``auto`` takes ``think`` where the chat template or the vocabulary has ``</think>``. The
    thinking of answers to messages is not part of their text: see `Generation.reasoning`.
    control_strings: control strings in texts of clients, such as ``<|im_end|>``, become control tokens. They are
    ordinary text by default, and only those that the chat template writes count.
    number_digits: the most digits before the point of a number that an answer's JSON schema sets no bound to; after it
    at most 9. None: no bound.
    max_requests: the most requests computed at once. max_batched_tokens: the most tokens of one step. max_chunk: the
    most prompt tokens of one request in a step; small ones keep the gaps between tokens of the other requests small.
    kv_cache_bytes: None takes what the device offers, at most what ``max_requests`` of full length need. A part of it
    holds the state that a model keeps beside attention for ``max_requests`` requests.
    policy: ``fcfs``, ``priority``, or ``shortest``: short prompts before long ones that came somewhat earlier.
    stream: what a chunk of an upstream stage adds to the prompt: ``stream(chunk)`` returns token ids, a float tensor
    ``[tokens, hidden]``, a `Prompt` of parts (with positions and added rows), a `Feed`, a list of these, or None.
    A request begins with its first chunk, when ``prompt`` gets a payload without data; what comes is computed
    at once, and the answer begins with the first `Feed`, or when all streams have ended. Nothing comes before the
    stream without a ``prompt``. ``stream`` is not called if nothing streams into the stage.
    dtype: of weights and cache: ``float32``, ``bfloat16``, ``float16``; ``auto`` takes bfloat16 where the device has
    instructions for it, else float32. A CPU without them refuses ``bfloat16``.
    linears: the form of the weights on a CPU: ``auto`` measures, or ``plain``, ``onednn``, ``mkl``, ``numba`` (products
    compiled for the processor: float32, where weights that bfloat16 holds exactly take half the memory, and bfloat16
    with avx512_bf16).
    kernels: on a CPU, ``numba`` compiles attention for the processor (extra ``numba``) and ``torch`` takes torch's
    operators; ``auto`` takes numba where it is installed. ``auto`` is ``torch`` on a GPU; ``flash-attn`` and
    ``flashinfer`` take the kernels of those projects (extras of these names; not tried on a GPU so far).
    compile: compile the parts of layers beside attention by torch when the stage is loaded; where that fails, they are
    computed as they are without it.
    hidden_rows: give ``deliver`` the last hidden row of each token, for a stage that continues from it.
    keep_rows: rows of named layers for ``deliver``: ``{name: (layer, of)}``. layer 0: each token's input row; k: the
    output of the k-th layer, as transformers counts ``hidden_states``. of: ``prompt``, ``answer`` or ``all`` tokens; a
    generated token's row of layer k > 0 is that from which it was chosen.
    decoder: the class of a `Decoder`, ``module:Class``, where the model is not one of ``AutoModelForCausalLM``.
    overlap: schedule the next step while one is computed, in a thread beside the stage's. ``auto``: on GPUs, where a
    step leaves the processor idle, and for decoders with ``after_step``, whose frames are sent meanwhile; elsewhere
    both would use the same cores. It does not go with ``tpSize``.
    dump_tokens: write token ids, too, into the files of steps that fail.
    speculative_config: guess the next tokens of requests, and verify several in one step; answers have the same tokens.
    Its keys are vLLM's: ``method`` (``ngram``: what followed the last tokens where the request had them before;
    ``draft_model``: a smaller ``model`` of the same vocabulary, with its ``revision``), ``num_speculative_tokens`` of a
    guess, ``prompt_lookup_max`` and ``prompt_lookup_min``: how many last tokens are looked for (5).
    lora_modules: LoRA adapters, loaded with the stage: folders of peft checkpoints by the names by which requests
    choose them (``model`` of a request, `Prompt.adapter`). max_loras: adapters in memory at most, with those that are
    loaded later; 0: as many as ``lora_modules`` has. max_lora_rank: the largest rank of one. lora_folders: adapters
    that are loaded later must lie in one of these; None: in the parent folder of one of ``lora_modules``.
    own_process: compute in a process of its own, so that nothing else of the stage delays a step.
    data_parallel_size: engines, each with all weights and a process of its own; a request goes to the least loaded one.
    enable_expert_parallel: of a mixture of experts on a CPU: these engines share the experts, each keeps its part, and
    they compute each step together. One that ends takes all with it.
    cores: processors of each engine, such as ``[[0, 1], [2, 3]]``; by default the stage's are divided among them.
    engine: what computes: ``own``, or ``openvino`` or ``vllm`` (extras of these names), which take fewer settings and
    fewer fields of requests, and refuse the others by name.
    remote_prefill_tokens: of a stage with ``disaggregation``: prompts that lack fewer tokens than this in the cache are
    computed by the decode instance itself; ``auto`` measures when the stage is loaded.
    kv_checksum: blocks that cross between instances carry a checksum beside their identity.
    kv_folder: an absolute path: blocks that were computed are written there, and found there by other processes, also
    later ones. kv_folder_bytes: what it may hold; the blocks used least recently are deleted.
    frozen_after_s: an engine process that gives no sign of life for so long is killed; its requests fail.
    """

    model: str
    prompt: Callable[[StagePayload], Prompt] | None = None
    deliver: Callable[[StagePayload, Generation], Iterable[Chunk | Result]] | None = None
    stream: Callable[[Chunk], Any] | None = None
    params: dict[str, Any] = {}
    tool_calls: str = "auto"
    reasoning: str = "auto"
    control_strings: bool = False
    number_digits: int | None = 15
    revision: str | None = None
    engine: str = "own"
    dtype: str = "float32"
    threads: int | None = None
    max_requests: int = 32
    max_batched_tokens: int = 512
    max_chunk: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    policy: str = "fcfs"
    prefix_caching: bool = True
    linears: str = "auto"
    kernels: str = "auto"
    compile: bool = False
    hidden_rows: bool = False
    keep_rows: dict[str, tuple[int, Literal["prompt", "answer", "all"]]] | None = None
    decoder: str | None = None
    overlap: bool | Literal["auto"] = "auto"
    dump_tokens: bool = False
    speculative_config: dict[str, Any] | None = None
    lora_modules: dict[str, str] | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    lora_folders: Sequence[str] | None = None
    own_process: bool = False
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    cores: Sequence[Sequence[int]] = ()
    remote_prefill_tokens: int | Literal["auto"] = "auto"
    kv_checksum: bool = True
    kv_folder: str = ""
    kv_folder_bytes: int = 10 << 30
    frozen_after_s: float = 10.0


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder model of transformers for `/v1/embeddings`, or for `/v1/score` and `/v1/rerank`. Needs ``engine``.

    It takes the inputs of requests of these kinds, and gives `Vectors` or `Scores` and the `Usage`.
    model: a folder in transformers' form, or a name at the model hub.
    pooling: a text's vector is the ``mean`` of its tokens' rows, the first (``cls``) or the ``last`` one; ``auto``
    takes what the model says in sentence-transformers' form, else the mean; it is refused when it says another one.
    normalize: vectors have length 1.
    scores: the model is a cross-encoder, for sequence classification: a pair's score is the probability of its one
    class, or of the last one.
    max_model_len: tokens of a text at most; a longer one is refused. max_requests: requests in one batch at most.
    max_batched_tokens: tokens, with padding, computed at once.
    control_strings: as of `Autoregressive`.
    """

    model: str
    revision: str | None = None
    pooling: str = "auto"
    normalize: bool = True
    scores: bool = False
    dtype: str = "float32"
    threads: int | None = None
    max_model_len: int | None = None
    max_requests: int = 32
    max_batched_tokens: int = 8192
    control_strings: bool = False


class Session(Protocol):
    """One request at a `Streaming` stage."""

    @property
    def request(self) -> OmniRequest: ...

    async def payload(self) -> StagePayload:
        """Wait for the request's payload. Raises when no payload can come, because every stage before has sent its
        result elsewhere.
        """

    def chunks(self, source: str | None = None) -> AsyncIterator[Chunk]:
        """Chunks in order, of one source or of all; ends when every source has ended."""


class StageContext(Protocol):
    """The runtime as a factory sees it: the stage's name, device and model, and calls back to the runtime."""

    @property
    def name(self) -> str: ...
    @property
    def terminal(self) -> bool:
        """Whether what it gives reaches the client."""

    @property
    def device(self) -> str: ...
    @property
    def model_path(self) -> str | None: ...
    @property
    def model_revision(self) -> str | None: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def rendezvous(self) -> str | None:
        """``tcp://host:port`` where the ranks of a TP stage meet; None for a stage of one rank."""

    @property
    def kv_role(self) -> str:
        """``prefill`` or ``decode`` in a stage with ``disaggregation``; else empty."""

    @property
    def kv(self) -> Any:
        """The way to the instances of the other role, a `kv_transfer.interface.KVTransport`; None without a role."""

    @property
    def logger(self) -> logging.Logger: ...

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An output tensor in the relay's arena, so that sending it copies nothing."""

    def emit(self, event: str, request_id: str, /, **metadata: Any) -> None:
        """Record a profiler event; does nothing while no profile is recorded."""

    def progress(self, message: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        """Report progress of loading: shown by `omni up`; restarts the start-up timeout.

        done, total: a bar shows this share; of an unknown ``total`` (0) ``done`` alone. unit: ``B`` for bytes. Bars of
        tqdm, also those of huggingface_hub and transformers, are reported without a call.

        Raises: TypeError: ``message`` or ``unit`` is not a text. ValueError: ``done`` or ``total`` is not a finite
        number from 0.
        """

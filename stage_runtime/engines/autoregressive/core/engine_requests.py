"""Requests and outputs of an engine core, as a client gives and gets them: in its process, or by messages.

Names follow vLLM's. The core's own request, which the scheduler keeps, is `rules.autoregressive.requests.Request`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import AddedRows
from stage_runtime.kv_transfer.interface import Source
from stage_runtime.rules.autoregressive.requests import FinishReason, Hold, Reason

GRAMMAR_END: Final = "grammar"  #: The reason of an answer whose grammar lets nothing follow: its last token is text.


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """hold: what it waits for before it is scheduled. cache_salt: requests with another one share no prefix.

    prompt_embeds: a float tensor ``[rows, hidden]``, one row for each `prompt_rows.ROW` among the token ids.
    prompt_positions: ``[3, tokens]`` for models that place tokens on three axes; generated tokens stand at their index
    and ``position_delta``. added_rows: what is added after named layers. open: more will come, by
    `EngineCore.extend_request`: of the prompt, and of a stream for each generated token where the model feeds itself.
    adapter: the name of one that the engine has; adapter_digest: of its files, where another engine computes a part.
    pin, data_parallel_rank: for a client of several engines, see `rules.autoregressive.balancing`; the engine does not
    look at them. kv_source: for a decode engine in a process of its own, set by its stage.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt_embeds: Any = None
    prompt_positions: Any = None
    position_delta: int = 0
    added_rows: Sequence[AddedRows] = ()
    open: bool = False
    priority: int = 0
    hold: Hold | None = None
    cache_salt: str = ""
    adapter: str = ""
    adapter_digest: bytes = b""
    pin: str = ""
    data_parallel_rank: int | None = None
    kv_source: Source | None = None


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step for one request. reason: the stop token, or what failed. refused: the wrong field."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    reason: Reason = None
    refused: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_rows: tuple[Any, ...] = ()  #: ``[hidden]`` of each new token, if they were asked for.
    rows: GivenRows | None = None

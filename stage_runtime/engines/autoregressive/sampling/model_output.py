"""What a step of the model gives. Without torch: the core and its clients need no more of the model than this."""

from __future__ import annotations

from typing import Any, NamedTuple


class TokenLogprobs(NamedTuple):
    """Of one generated token, before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...]  #: (token, logprob), likeliest first


class ModelOutput(NamedTuple):
    """By request id. ``failed``: why. ``prompt_logprobs``: of prompts that are computed to their ends.

    hidden_rows: ``[hidden]``, the last hidden state from which the token was chosen.
    """

    sampled: dict[str, int]
    failed: dict[str, str]
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    hidden_rows: dict[str, Any] = {}

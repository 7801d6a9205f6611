"""The scheduler's inputs and outputs: limits, the rows of a step, what a step has done, counts. Pure.

`scheduling` decides which tokens a step computes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stage_runtime.rules.autoregressive.requests import FinishReason, Reason, Request

Policy = Literal["fcfs", "priority", "shortest"]


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """max_requests: rows of one step. max_batched_tokens: tokens of one step. max_chunk: of one prompt in one step.
    max_model_len: tokens of one request, prompt and answer together. num_speculative_tokens: of one request's draft.
    """

    block_size: int = 16
    max_requests: int = 32
    max_batched_tokens: int = 512
    max_chunk: int = 512
    max_model_len: int = 2048
    policy: Policy = "fcfs"
    prefix_caching: bool = True
    num_speculative_tokens: int = 0


class Row(msgspec.Struct, frozen=True):
    """Tokens ``start .. start + count`` of a request, in one step.

    samples: it ends at the request's last token, so that the next token is sampled from it. blocks: the request's: it
    may lose them while the step is under way. place: of the next token in the answer. unknown: how many of its last
    tokens the step before it gives, which was under way when it was scheduled. spare: tokens after the row's own for
    which there is room, so that a draft may be verified there. accepted: how many of its drafts' tokens were known to
    be right: when more are, the row's tokens and its place come so many later.
    """

    request: Request
    start: int
    count: int
    samples: bool
    blocks: list[int]
    place: int = 0
    unknown: int = 0
    spare: int = 0
    accepted: int = 0


def row(request: Request, start: int, count: int) -> Row:
    end, expected = start + count, request.expected
    samples = not request.open and end == expected
    place, unknown = expected - request.prompt_tokens, max(end - len(request.tokens), 0)
    return Row(request, start, count, samples, request.blocks, place, unknown, accepted=request.accepted)


class SchedulerOutput(msgspec.Struct, frozen=True):
    """One step. ``finished``: requests that have ended since the last one: the runner forgets them. preempted: those
    that have lost their blocks, and are computed from the start when they are in a step again.
    """

    rows: tuple[Row, ...]
    finished: tuple[str, ...]
    preempted: tuple[str, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Room for drafts is counted, too."""
        return sum(row.count + row.spare for row in self.rows)


class Update(msgspec.Struct, frozen=True):
    """The effect of a step on one request. accepted: which token of its draft this is; None: it was sampled."""

    request: Request
    token: int | None = None
    finish: FinishReason | None = None
    reason: Reason = None
    accepted: int | None = None


class SchedulerCounts:
    """Counters, since the scheduler was made."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.prompt_tokens = 0  #: Prompt tokens of requests that were scheduled.
        self.hit_tokens = 0  #: Those of them that were found in the prefix cache.
        self.received_tokens = 0  #: Those of them that another engine computed.
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.drafts = 0  #: That were verified.
        self.draft_tokens = 0  #: Those of them that are drafts.
        self.accepted_tokens = 0  #: Those of them that are tokens of answers.

    def count_draft(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted

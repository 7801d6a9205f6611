"""Drafts: tokens that are guessed, and verified in the step of the token before them. Room for them, and its use. Pure.

A draft is made where the step is computed, from tokens that are known there only. So a row has room for one, its last
slots, and the next step may be scheduled before anybody knows how many of its tokens were right: its rows begin with
the tokens that are certain, and are moved by those that were right. Slots of rejected tokens are written again by the
rows that follow. Called by `scheduling`; names are vLLM's where the thing is the same.
"""

from __future__ import annotations

import msgspec

from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.steps import Row, SchedulerLimits


def with_room(row: Row, limits: SchedulerLimits, pool: BlockPool, longest: int, budget: int) -> Row:
    """The row, with room for a draft as far as there are tokens of the step and free blocks, which are taken.

    longest: tokens that one request may have. budget: tokens that are left of the step.
    """
    request = row.request
    if not (row.samples and row.count == 1 and request.speculates and row.place):
        return row
    most = request.expected + request.hoped  # tokens that it has before this row, if all drafts are right
    bounds = (request.limits.max_tokens + request.prompt_tokens - most - 1, longest - most - 1)
    spare = min(limits.num_speculative_tokens, budget, *bounds)
    end = row.start + row.count + request.hoped
    spare = min(spare, (len(request.blocks) + pool.free) * limits.block_size - end)
    if spare <= 0:
        return row
    request.blocks += pool.take(max(-(-(end + spare) // limits.block_size) - len(request.blocks), 0))
    return msgspec.structs.replace(row, spare=spare)


def written(row: Row) -> Row:
    """The tokens whose keys and values are in their slots for good by this row, and were not before it.

    Those of a draft count with the row after it: only then is it known that they are the request's tokens.
    """
    later = row.request.accepted - row.accepted
    uncached = row.request.uncached
    if not later and not uncached:
        return row
    start = row.start + later - uncached
    return msgspec.structs.replace(row, start=start, count=row.count + uncached, place=row.place + later)

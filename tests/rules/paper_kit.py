"""A model of paper for tests of the scheduler: its KV is the tokens themselves.

It writes tokens into paged memory, as attention writes KV, and samples the next one from what it reads there. So a row
that reads a block of somebody else, or one that was never written, samples another token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.requests import Hold, Request, TokenLimits
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row, SchedulerLimits, SchedulerOutput, Update


def successor(tokens: list[int]) -> int:
    return (sum((index + 1) * token for index, token in enumerate(tokens)) * 31 + 7 * len(tokens)) % 50


def expected(prompt: list[int], limits: TokenLimits, name: str = "alone", feeds_itself: bool = False) -> list[int]:
    request = Request(name, prompt, limits, feeds_itself=feeds_itself)
    while request.generated == 0 or request.ending() is None:
        request.tokens.append(successor([written(request, at) for at in range(len(request.tokens))]))
    return request.tokens


def written(request: Request, position: int, last: int = -1) -> int:
    """The number that the model keeps of a token; one that a request generated for itself is its own alone.

    last: the token that a step under way gives.
    """
    own = request.feeds_itself and position >= request.prompt_tokens
    token = request.tokens[position] if position < len(request.tokens) else last
    return token + 100 * sum(map(ord, request.id)) * own


class Given(dict[str, int]):
    """Sampled tokens by request id, and before them those of drafts that were right."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[str, list[int]] = {}


class Paper:
    """A model whose KV is the tokens themselves. Its drafts are right for a while, and then wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.limits.block_size
        self.memory = [[-1] * self.size for _ in range(scheduler.pool.capacity + 1)]
        self.last: dict[str, int] = {}
        self.accepted: dict[str, int] = {}

    def run(self, step: SchedulerOutput) -> Given:
        rows = [self._placed(row) for row in step.rows]
        for row in rows:
            for position in range(row.start, row.start + row.count):
                self._write(row, position, written(row.request, position, self.last.get(row.request.id, -1)))
        given = Given()
        for row in rows:
            if row.samples:
                accepted, given[row.request.id] = self._sample(row)
                if row.spare:
                    given.accepted[row.request.id] = accepted
                    self.accepted[row.request.id] = self.accepted.get(row.request.id, 0) + len(accepted)
        self.last.update(given)
        return given

    def _placed(self, row: Row) -> Row:
        """It was scheduled before a draft of its request was verified."""
        later = self.accepted.get(row.request.id, 0) - row.accepted
        return msgspec.structs.replace(row, start=row.start + later, place=row.place + later)

    def _write(self, row: Row, position: int, token: int) -> None:
        self.memory[row.blocks[position // self.size]][position % self.size] = token

    def _read(self, row: Row, end: int) -> int:
        return successor([self.memory[row.blocks[at // self.size]][at % self.size] for at in range(end)])

    def _sample(self, row: Row) -> tuple[list[int], int]:
        """Tokens of a draft of ``spare`` tokens that are right, and the one after them."""
        end, accepted = row.start + row.count, list[int]()
        token = self._read(row, end)
        right = (token + end) % (row.spare + 1)
        for at in range(right):
            if row.request.ends_by(token, row.place + at) is not None:
                break
            self._write(row, end + at, token)
            accepted.append(token)
            token = self._read(row, end + at + 1)
        for at in range(len(accepted), row.spare):
            self._write(row, end + at, -7)  # rejected
        return accepted, token

    def step(self) -> list[Update]:
        step = self.scheduler.schedule()
        given = self.run(step)
        return self.scheduler.update_from_output(step, given, {}, {}, given.accepted)


def make(blocks: int = 20, **limits: Any) -> Scheduler:
    chosen = {"block_size": 2, "max_requests": 4, "max_batched_tokens": 8, "max_chunk": 8, "max_model_len": 30}
    return Scheduler(SchedulerLimits(**{**chosen, **limits}), BlockPool(blocks))


def ask(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    *,
    priority: int = 0,
    hold: Hold | None = None,
    open: bool = False,
    feeds_itself: bool = False,
    fed: int | None = None,
    speculates: bool = False,
    tail: int = 0,
    **limits: Any,
) -> Request:
    request = Request(
        name,
        prompt,
        TokenLimits(**{"max_tokens": 4, **limits}),
        priority=priority,
        open=open,
        feeds_itself=feeds_itself,
        fed=fed,
    )
    request.speculates = speculates and not feeds_itself
    request.tail = tail
    scheduler.add(request, hold)
    return request

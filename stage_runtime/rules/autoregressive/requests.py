"""A request in the engine core: a table (state, event) -> state, and when its tokens end it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

import msgspec

from stage_runtime.errors import IllegalEvent
from stage_runtime.rules.autoregressive.blocks import hash_blocks


class RequestStatus(Enum):
    WAITING = "waiting"  #: The state in the queue, without blocks.
    HELD = "held"  #: Waits for something outside (remote KV, upstream rows); not in the queue, never polled.
    RUNNING = "running"  #: Scheduled in every step that has room for it.
    PAUSED = "paused"  #: All rows that have come are computed; it keeps its blocks and waits for more, never polled.
    PREEMPTED = "preempted"  #: Its blocks were taken away: in the queue again, to be computed from the start.
    FINISHED = "finished"


class RequestEvent(Enum):
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    HELD = "held"
    RELEASED = "released"
    PAUSED = "paused"
    RESUMED = "resumed"
    FINISHED = "finished"


TRANSITIONS: Final[dict[tuple[RequestStatus, RequestEvent], RequestStatus]] = {
    (RequestStatus.WAITING, RequestEvent.SCHEDULED): RequestStatus.RUNNING,
    (RequestStatus.WAITING, RequestEvent.HELD): RequestStatus.HELD,
    (RequestStatus.WAITING, RequestEvent.FINISHED): RequestStatus.FINISHED,
    (RequestStatus.HELD, RequestEvent.RELEASED): RequestStatus.WAITING,
    (RequestStatus.HELD, RequestEvent.FINISHED): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.PREEMPTED): RequestStatus.PREEMPTED,
    (RequestStatus.RUNNING, RequestEvent.PAUSED): RequestStatus.PAUSED,
    (RequestStatus.RUNNING, RequestEvent.FINISHED): RequestStatus.FINISHED,
    (RequestStatus.PAUSED, RequestEvent.RESUMED): RequestStatus.RUNNING,
    (RequestStatus.PAUSED, RequestEvent.PREEMPTED): RequestStatus.HELD,
    (RequestStatus.PAUSED, RequestEvent.FINISHED): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestEvent.SCHEDULED): RequestStatus.RUNNING,
    (RequestStatus.PREEMPTED, RequestEvent.FINISHED): RequestStatus.FINISHED,
}

QUEUED: Final = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class FinishReason(Enum):
    STOP = "stop"  #: An end-of-sequence token, a stop token or a stop string.
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Hold(Enum):
    """The condition that a request waits for before it is queued."""

    REMOTE_KV = "remote_kv"
    UPSTREAM_ROWS = "upstream_rows"


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a request's tokens end it.

    end_ids: the model's end-of-sequence tokens, empty if they are ignored. stop_ids: the client's. Neither ends a
    request before ``min_tokens`` are generated; the sampler chooses none before.
    """

    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()


Reason: TypeAlias = int | str | None


class Request:
    """The scheduler's view of one request. Changed by the scheduler alone."""

    __slots__ = (
        "accepted", "adapter", "arrival", "begun", "blocks", "computed", "fed", "feeds_itself", "follows", "hashes",
        "hit_tokens", "hoped", "id", "in_flight", "lacks", "length", "limits", "matcher", "open", "preemptions",
        "priority", "private", "prompt_tokens", "rows", "salt", "speculates", "state", "tail", "ticket", "tokens",
        "uncached", "unknown",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        limits: TokenLimits,
        *,
        priority: int = 0,
        hashes: Sequence[bytes] = (),
        salt: bytes = b"",
        open: bool = False,
        feeds_itself: bool = False,
        fed: int | None = None,
    ) -> None:
        """priority: lower ones first, where the policy looks at it. hashes: of the prompt's first full blocks, with
        ``salt``. open: more of the prompt will come. feeds_itself, fed: see the fields."""
        self.id = id
        self.limits = limits
        self.priority = priority
        self.arrival = 0  #: Its place in the order in which requests came.
        self.length = 0  #: Tokens of its prompt when it came.
        self.tokens = list(prompt)  #: The prompt, then what was generated.
        self.prompt_tokens = len(self.tokens)
        self.tail = (
            0  #: The last tokens of its prompt that have a chunk of their own; 0: the last chunk is as it comes.
        )
        self.computed = 0  #: Tokens whose KV is, or is being, written.
        self.blocks: list[int] = []  #: Block ids in order of positions; empty unless RUNNING or PAUSED.
        self.hashes = list(hashes)  #: Hashes of the first full blocks of ``tokens``; the rest are computed when needed.
        self.salt = salt
        self.private = False  #: No other request has its salt, so none finds its blocks.
        self.open = open
        #: The model takes rows made from its own steps in place of generated tokens, so their blocks are not shared.
        self.feeds_itself = feeds_itself
        #: Rows of its stream that have come: each generated token is computed with one. None: it waits for none.
        self.fed = fed
        self.begun = False  #: It has been scheduled.
        self.state = RequestStatus.WAITING
        self.matcher: Any = None  #: Its grammar's state: the core's alone.
        self.adapter: Any = None  #: The adapter that computes it beside the model: the core's and the model's alone.
        self.rows: Any = None  #: Rows that the model takes in place of negative tokens; read here for their key only.
        self.in_flight = 0  #: Batches under way that hold a row of it.
        self.unknown = 0  #: Tokens that those will give: the next step is scheduled as if they were there.
        self.speculates = False  #: Drafts of its next tokens may be verified.
        self.hoped = 0  #: Tokens that those batches may give beside, if drafts are right.
        self.accepted = 0  #: Tokens of drafts that were right.
        #: Tokens of the last step's draft: their keys and values are written, and their block is not known.
        self.uncached = 0
        self.ticket = 0  #: The ticket of its entry in the queue; entries with another one are stale.
        #: The block that it waits for in the queue: the last one that is being computed for another request.
        self.follows = b""
        self.lacks = 0  #: While it waits so: the blocks that it will need beside those.
        self.preemptions = 0
        self.hit_tokens = 0  #: Tokens that the prefix cache spared it, when it was first scheduled.

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def expected(self) -> int:
        """Tokens that it has when the steps under way are done, unless they end it."""
        return len(self.tokens) + self.unknown

    @property
    def ready(self) -> int:
        """Tokens that may be computed now. The last one of an open prompt waits: the answer may follow it."""
        come = self.expected - (self.open and bool(self.tokens))
        return come if self.fed is None else min(come, self.prompt_tokens + self.fed)

    @property
    def shareable(self) -> int:
        """Tokens whose keys and values are the same wherever the same tokens stand before them."""
        return self.prompt_tokens if self.feeds_itself else len(self.tokens)

    def hash(self, block_size: int) -> list[bytes]:
        """The hashes of its full blocks, as far as others may share them; known ones are not computed again."""
        if (len(self.hashes) + 1) * block_size <= self.shareable:
            also = None if self.rows is None else self.rows.key
            tokens = self.tokens[: self.shareable] if self.feeds_itself else self.tokens
            self.hashes = hash_blocks(tokens, block_size, self.hashes, self.salt, also)
        return self.hashes

    def grow(self, tokens: Sequence[int], *, last: bool) -> None:
        """More of an open prompt. last: it is whole."""
        self.tokens += tokens
        self.prompt_tokens = len(self.tokens)
        self.open = not last

    def feed(self, rows: int, *, last: bool) -> None:
        """More rows of its stream. last: it waits for none from now on."""
        self.fed = None if last or self.fed is None else self.fed + rows

    def happen(self, event: RequestEvent) -> None:
        """Raises: IllegalEvent: the table does not list it; nothing is changed then."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalEvent(f"request {self.id}", f"{event.value} while it is {self.state.value}", ())
        self.state = after

    def ending(self) -> tuple[FinishReason, Reason] | None:
        """Whether the token generated last ends it, and the stop token that did."""
        return self._ending(self.tokens[-1], self.generated)

    def ends_by(self, token: int, place: int) -> tuple[FinishReason, Reason] | None:
        """The same as `ending`, if ``token`` were the one at ``place`` of the answer."""
        return self._ending(token, place + 1)

    def _ending(self, last: int, generated: int) -> tuple[FinishReason, Reason] | None:
        limits = self.limits
        if generated >= limits.min_tokens:
            if last in limits.end_ids:
                return FinishReason.STOP, None
            if last in limits.stop_ids:
                return FinishReason.STOP, last
        return (FinishReason.LENGTH, None) if generated >= limits.max_tokens else None

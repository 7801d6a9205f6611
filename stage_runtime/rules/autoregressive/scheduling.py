"""The tokens of requests that the next step computes, and what becomes of the requests after it. Pure.

`schedule` fills a token budget: rows that decode first, then prompts in chunks, in the order of the policy. A request
that finds no block takes those of the newest one, which is computed again later. A request whose next block is being
computed for another one waits for it. `update_from_output` appends the sampled tokens and ends requests. Called by the
engine core alone, in its thread. The plan of a step is in `steps`.

One module, because choosing rows, giving blocks and ending requests all change the same queue and pool, and each must
leave both consistent. These parts stand apart: the order of the queue (`waiting_queue`), the pool (`blocks`), blocks
that come from elsewhere (`filling`, `rules.kv.handover`), drafts (`drafts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from stage_runtime.errors import ContextLengthExceeded, IllegalEvent
from stage_runtime.rules.autoregressive import drafts, steps
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.filling import BlocksBeingFilled
from stage_runtime.rules.autoregressive.requests import (
    QUEUED,
    FinishReason,
    Hold,
    Reason,
    Request,
    RequestEvent,
    RequestStatus,
)
from stage_runtime.rules.autoregressive.steps import (
    Row,
    SchedulerCounts,
    SchedulerLimits,
    SchedulerOutput,
    Update,
)
from stage_runtime.rules.autoregressive.waiting_queue import ORDER, WaitingQueue
from stage_runtime.rules.kv.handover import Loads


class Scheduler:
    """Owns the requests, the queue and the block pool."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.stats = SchedulerCounts()
        self.loads = Loads(pool)  #: Loads of requests whose prompts' keys and values come from afar.
        self.on_end: Callable[[Request], None] = lambda request: None  #: One has ended.
        self._key = ORDER[limits.policy]
        self._requests: dict[str, Request] = {}  #: Every request that has not finished.
        self._queue = WaitingQueue(self._key, self._requests)
        self._running: list[Request] = []  #: Requests in order of the policy.
        self._filling = BlocksBeingFilled(self._key)
        self._holds: dict[str, Hold] = {}
        self._paused: dict[str, Request] = {}
        self._resuming: dict[str, Request] = {}  #: Those of ``_paused`` whose rows have come.
        self._finished: list[str] = []
        self._preempted: list[str] = []  #: Those that have lost their blocks since the last step.
        self._arrivals = 0
        self._budget = 0  #: Tokens that are left of the step that is being scheduled.

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def held(self) -> int:
        return len(self._holds) + len(self._paused) - len(self._resuming)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def longest(self) -> int:
        """Tokens that one request may have: what the pool can hold for it alone bounds the model's length."""
        return min(self.limits.max_model_len, self.pool.capacity * self.limits.block_size)

    def has_requests(self) -> bool:
        """Whether a step could do something: requests that are held wait outside."""
        return bool(self._queue or self._running or self._finished or self._resuming)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request, hold: Hold | None = None) -> None:
        """Queue a request, or hold it until `release`.

        Raises: IllegalEvent: the id is in use. ValueError: it can never be computed, or is empty.
        """
        if request.id in self._requests:
            raise IllegalEvent(f"request {request.id}", "added twice", ())
        if request.id in self._finished:  # the runner gets no notice of that end: it knows the new request already
            self._finished.remove(request.id)
        self._check_length(len(request.tokens), whole=not request.open)
        self._arrivals += 1
        request.arrival = self._arrivals
        request.length = request.prompt_tokens
        self._requests[request.id] = request
        if hold is None and not request.ready:
            hold = Hold.UPSTREAM_ROWS
        if hold is not None:
            request.happen(RequestEvent.HELD)
            self._holds[request.id] = hold
        else:
            self._queue.add(request)

    def release(self, request_id: str) -> None:
        """A held request has what it waited for.

        Raises: IllegalEvent: it is not held. A request that has finished meanwhile is not a fault.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.state is RequestStatus.HELD and not request.ready:
            self._holds[request_id] = Hold.UPSTREAM_ROWS
            return
        request.happen(RequestEvent.RELEASED)
        del self._holds[request_id]
        self._queue.add(request)

    def extend(self, request_id: str, tokens: Sequence[int], *, last: bool) -> None:
        """More of an open request's prompt has come. last: it is whole.

        Raises: IllegalEvent: it is whole already. ValueError: it becomes too long, or is whole and empty. Nothing is
        changed then. A request that has finished meanwhile is not a fault.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if not request.open:
            raise IllegalEvent(f"request {request_id}", "extended while its prompt is whole", ())
        self._check_length(len(request.tokens) + len(tokens), whole=last)
        request.grow(tokens, last=last)
        if request.begun:
            self.stats.prompt_tokens += len(tokens)
        self._rows_came(request)

    def feed(self, request_id: str, rows: int, *, last: bool) -> None:
        """More rows of a request's stream have come, one for each token that it generates. last: it waits for none.

        Raises: IllegalEvent: it waits for none. A request that has finished meanwhile is not a fault.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.fed is None:
            raise IllegalEvent(f"request {request_id}", "fed while it waits for no rows", ())
        request.feed(rows, last=last)
        self._rows_came(request)

    def _rows_came(self, request: Request) -> None:
        if request.ready <= request.computed:
            return
        if request.state is RequestStatus.PAUSED:
            self._resuming[request.id] = request
        elif self._holds.get(request.id) is Hold.UPSTREAM_ROWS:
            self.release(request.id)

    def _check_length(self, count: int, *, whole: bool) -> None:
        if whole and not count:
            raise ValueError("the prompt is empty")
        if count >= self.longest:
            raise ContextLengthExceeded(count, self.longest)

    def finish(self, request_ids: Iterable[str], finish: FinishReason = FinishReason.ABORT) -> list[Request]:
        """End requests, in whatever state they are. Ids that are not known are ignored: aborts may come twice."""
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request)
                ended.append(request)
        return ended

    def _end(self, request: Request) -> None:
        before = request.state
        request.happen(RequestEvent.FINISHED)
        if before in QUEUED:
            self._queue.ended()
        elif before is RequestStatus.HELD:
            del self._holds[request.id]
        elif before is RequestStatus.PAUSED:
            del self._paused[request.id]
            self._resuming.pop(request.id, None)
        else:
            self._running.remove(request)
        self._free(request)
        del self._requests[request.id]
        self._finished.append(request.id)
        self._queue.prune()
        self.on_end(request)

    def _free(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        if self._filling:
            self._filling.filled(request, request.hashes)

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step's rows. Their requests' ``computed`` is advanced: a step may be under way when the next one
        is scheduled, with a placeholder for each token that it will give.
        """
        rows: dict[str, Row] = {}
        self._budget = self.limits.max_batched_tokens
        preempted = self.stats.preemptions
        self._resume()
        followers: list[Request] = []
        for request in sorted(self._running, key=lambda one: (one.ready - one.computed > 1, self._key(one))):
            if request.ready - request.computed > 1 and self.stats.preemptions == preempted:
                while self._comes_before(request) and self._begin(rows, followers):
                    pass
            self._continue(request, rows)
        if self.stats.preemptions == preempted:  # else no block is left for others
            while self._begin(rows, followers):
                pass
        for request in followers:
            self._queue.put_back(request)
        if self.limits.num_speculative_tokens:
            self._leave_room(rows)
        for row in rows.values():
            row.request.computed += row.count
            row.request.in_flight += 1
            row.request.unknown += row.samples
            row.request.hoped += row.spare
            self.stats.computed_tokens += row.count
        finished, self._finished = tuple(self._finished), []
        lost, self._preempted = tuple(self._preempted), []
        return SchedulerOutput(tuple(rows.values()), finished, lost)

    def _comes_before(self, running: Request) -> bool:
        """Whether the first of the queue does, where short prompts do not wait for the rest of long ones."""
        first = self._queue.first() if self.limits.policy == "shortest" else None
        return first is not None and self._key(first) < self._key(running)

    def _leave_room(self, rows: dict[str, Row]) -> None:
        """Gives rows room for drafts, after all others have got their tokens and blocks."""
        for name, row in rows.items():
            rows[name] = drafts.with_room(row, self.limits, self.pool, self.longest, self._budget)
            self._budget -= rows[name].spare

    def _plan(self, rows: dict[str, Row], request: Request, count: int) -> None:
        rows[request.id] = steps.row(request, request.computed, count)
        self._budget -= count

    def _continue(self, request: Request, rows: dict[str, Row]) -> None:
        """A row for a running request, unless it was preempted, is about to end, or nothing is left for it."""
        if request.state is not RequestStatus.RUNNING or self._is_about_to_end(request):
            return
        count = self._chunk(request, request.computed)
        if count <= 0:
            return
        fresh = max(self._blocks_for(request.computed + count + request.hoped) - len(request.blocks), 0)
        while fresh > self.pool.free:
            victim = max((*self._running, *self._paused.values()), key=self._key)
            self._preempt(victim)  # with a row under way, too: later steps write into its blocks after that row has
            if (lost := rows.pop(victim.id, None)) is not None:
                self._budget += lost.count
            if victim is request:
                return
        request.blocks += self.pool.take(fresh)
        self._plan(rows, request, count)

    def _chunk(self, request: Request, computed: int) -> int:
        """Tokens of a request's next row, behind ``computed`` ones.

        The chunk that would be its last leaves its tail to the next one, unless it is hardly longer than that.
        """
        left = request.ready - computed
        count = min(left, self._budget, self.limits.max_chunk)
        return left - request.tail if count == left and 2 * left > 3 * request.tail > 0 else count

    def _is_about_to_end(self, request: Request) -> bool:
        """Whether the step under way gives its last token, whatever it is."""
        place = request.expected - request.prompt_tokens
        return request.unknown > 0 and (place >= request.limits.max_tokens or request.expected >= self.longest)

    def _begin(self, rows: dict[str, Row], followers: list[Request]) -> bool:
        """A row for the first request of the queue, if there is room for it.

        followers: requests that were taken from the queue and wait for blocks of others. The requests behind them
        leave them the places and the blocks that they will need.
        """
        request = self._queue.first()
        if request is None or self._budget <= 0 or len(self._running) + len(followers) >= self.limits.max_requests:
            return False
        if request.in_flight:  # preempted with a row under way, whose token belongs to it
            return False
        size = self.limits.block_size
        if self._filling.precedes(request.follows, request):
            self._queue.set_aside()
            followers.append(request)
            return True
        # One token at least is computed: the next one is sampled from its logits.
        usable = self._hashes(request, (request.ready - 1) // size) if self.limits.prefix_caching else []
        found = self.pool.find(usable)
        whole = self._blocks_for(len(request.tokens)) - len(found)
        if being_filled := self._filling.for_others(request, usable[len(found) :]):
            self._queue.set_aside()
            request.follows, request.lacks = being_filled[-1], whole - len(being_filled)
            followers.append(request)
            return True
        spared = sum(one.lacks for one in followers)
        # Begun with fewer blocks, it would soon preempt or be preempted.
        if self.pool.need(found, whole) + spared > self.pool.free:
            if self._running:
                return False
            if self.loads.let_go():
                return True
            if not self._paused:
                return False
            self._preempt(max(self._paused.values(), key=self._key))  # or it would wait for another stage
            return True
        self._queue.take()
        request.happen(RequestEvent.SCHEDULED)
        self._run(request)
        hits = len(found) * size
        count = self._chunk(request, hits)
        self.pool.share(found)
        request.blocks = [*found, *self.pool.take(self._blocks_for(hits + count) - len(found))]
        request.computed = hits
        request.follows = b""
        load = self.loads.end(request.id)
        if self.limits.prefix_caching:
            self._filling.begin(request, self._hashes(request, request.ready // size)[len(found) :])
        if not request.begun:
            request.begun = True
            received = 0 if load is None else min(len(load.filled) * size, hits)
            request.hit_tokens = hits - received
            self.stats.prompt_tokens += request.prompt_tokens
            self.stats.hit_tokens += request.hit_tokens
            self.stats.received_tokens += received
        self._plan(rows, request, count)
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _run(self, request: Request) -> None:
        self._running.append(request)
        self._running.sort(key=self._key)

    def _pause(self, request: Request) -> None:
        request.happen(RequestEvent.PAUSED)
        self._running.remove(request)
        self._paused[request.id] = request

    def _resume(self) -> None:
        """Paused requests whose rows have come run again, as far as there is room."""
        for request in sorted(self._resuming.values(), key=self._key):
            if len(self._running) >= self.limits.max_requests:
                return
            request.happen(RequestEvent.RESUMED)
            del self._resuming[request.id], self._paused[request.id]
            self._run(request)

    def _preempt(self, request: Request) -> None:
        request.happen(RequestEvent.PREEMPTED)
        self._free(request)
        request.computed = request.uncached = 0
        request.preemptions += 1
        self._preempted.append(request.id)
        self.stats.preemptions += 1
        if request.state is RequestStatus.PREEMPTED:
            self._running.remove(request)
            self._queue.add(request)
            return
        del self._paused[request.id]
        self._holds[request.id] = Hold.UPSTREAM_ROWS
        if self._resuming.pop(request.id, None) is not None:
            self.release(request.id)

    # --- its result ---------------------------------------------------------------------------------------------

    def update_from_output(
        self,
        step: SchedulerOutput,
        sampled: Mapping[str, int],
        failed: Mapping[str, str],
        ended: Mapping[str, Reason] = {},
        accepted: Mapping[str, Sequence[int]] = {},
    ) -> list[Update]:
        """Append what was sampled; end the requests that it ends, and those that failed.

        sampled: request id -> token, of every row that `Row.samples`. failed: request id -> why. ended: requests that
        end by their token, whatever it is. accepted: request id -> tokens of its draft before that.
        Returns: one for each token, and for each request that fails; nothing of those that ended meanwhile.
        """
        updates = []
        for row in step.rows:
            request = row.request
            request.in_flight -= 1
            request.unknown -= row.samples
            request.hoped -= row.spare
            if request.state is RequestStatus.FINISHED:
                continue
            if request.id in failed:
                self._end(request)
                updates.append(Update(request, finish=FinishReason.ERROR, reason=failed[request.id]))
                continue
            if request.state is RequestStatus.RUNNING:  # else it has lost its blocks
                self._cache(request, drafts.written(row))
                request.uncached = 0
            token = sampled.get(request.id)
            if token is not None:
                if request.id in accepted:
                    updates += self._accept(request, accepted[request.id])
                ending = (FinishReason.STOP, ended[request.id]) if request.id in ended else None
                updates.append(self._append(request, token, ending))
            if request.state is RequestStatus.RUNNING and not request.in_flight and request.computed >= request.ready:
                self._pause(request)
        return updates

    def _accept(self, request: Request, tokens: Sequence[int]) -> list[Update]:
        """Tokens of its draft are its next ones. None of them ends it: nothing is verified beyond such a token."""
        request.accepted += len(tokens)
        if request.state is RequestStatus.RUNNING:
            request.computed += len(tokens)
            request.uncached = len(tokens)
        updates = [self._append(request, token, None) for token in tokens]
        return [msgspec.structs.replace(one, accepted=index) for index, one in enumerate(updates)]

    def _append(self, request: Request, token: int, ending: tuple[FinishReason, Reason] | None) -> Update:
        request.tokens.append(token)
        self.stats.generated_tokens += 1
        ending = ending or request.ending()
        if ending is None and len(request.tokens) >= self.longest:
            ending = (FinishReason.LENGTH, None)
        if ending is None:
            return Update(request, token)
        self._end(request)
        return Update(request, token, *ending)

    def _cache(self, request: Request, row: Row) -> None:
        """Make the blocks that the row has filled known."""
        size = self.limits.block_size
        first, last = row.start // size, (row.start + row.count) // size
        if first == last or not self.limits.prefix_caching:
            return
        filled = self._hashes(request, last)[first:]
        for index, content in enumerate(filled, first):
            self.pool.cache(request.blocks[index], content)
        self._filling.filled(request, filled)

    def _hashes(self, request: Request, blocks: int) -> list[bytes]:
        """The hashes of the request's first ``blocks`` full blocks, as far as others may share them."""
        known = request.hashes if blocks <= len(request.hashes) else request.hash(self.limits.block_size)
        return known[:blocks]

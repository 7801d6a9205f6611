"""The engine core: requests in, steps, outputs. Threads and text are the business of `busy_loop`, `output_processor`.

Names follow vLLM's, whose design this is.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.core.kv_connector import KVConnector, KVLoads, Post
from stage_runtime.engines.autoregressive.core.step_dumps import StepDumps
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, ModelOutput, TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.grammar_texts import Grammar, GrammarRefused
from stage_runtime.engines.autoregressive.text.prompt_rows import (
    ROW,
    AddedRows,
    Embeddings,
    Extension,
    PlacedRows,
    RequestRows,
)
from stage_runtime.engines.autoregressive.text.reasoning import Matcher
from stage_runtime.errors import ContextLengthExceeded, describe
from stage_runtime.rules.autoregressive import drafts
from stage_runtime.rules.autoregressive.requests import FinishReason, Hold, Reason, Request, RequestStatus, TokenLimits
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput, Update

log = logging.getLogger(__name__)

GRAMMAR_END: Final = "grammar"  #: The reason of an answer whose grammar lets nothing follow: its last token is text.


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """hold: what it waits for before it is scheduled. cache_salt: requests with another one share no prefix.

    prompt_embeds: a float tensor ``[rows, hidden]``, one row for each `prompt_rows.ROW` among the token ids.
    prompt_positions: ``[3, tokens]`` for models that place tokens on three axes; generated tokens stand at their index
    and ``position_delta``. added_rows: what is added after named layers. open: more will come, by
    `EngineCore.extend_request`: of the prompt, and of a stream for each generated token where the model feeds itself.
    pin, data_parallel_rank: for a client of several engines, see `rules.autoregressive.balancing`; the engine does not
    look at them.
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
    pin: str = ""
    data_parallel_rank: int | None = None


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


class Executor(Protocol):
    """Where steps are computed, in the order in which they are given."""

    @property
    def max_concurrent_batches(self) -> int: ...
    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None: ...
    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Call a function with the model runner, after the steps that were given before."""

    def execute_model(self, step: SchedulerOutput, hold: bool = False) -> Future[ModelOutput]:
        """hold: no token is chosen until `sample_tokens`, which gives the output."""

    def sample_tokens(self, masks: Mapping[str, npt.NDArray[np.bool_]]) -> Future[ModelOutput]:
        """Choose the tokens of the step that was held. masks: request id -> which tokens it may get."""

    def shutdown(self) -> None: ...


class EngineCore:
    """Scheduler and executor. Every call on one thread, but for `preprocess_add_request` and ``aborts_queue``."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        end_ids: frozenset[int] = frozenset(),
        vocab_size: int,
        ends: frozenset[int] = frozenset(),
        grammars: Callable[[Grammar], Matcher] | None = None,
        embeddings: Embeddings | None = None,
        feeds_itself: bool = False,
        dumps: StepDumps | None = None,
    ) -> None:
        """ends: tokens by which grammars end, beside ``end_ids``. grammars: compiles one; in any thread; raises
        ValueError. embeddings: of prompts with rows; None: the model takes none. feeds_itself: see `Request`.
        dumps: of steps that fail; None: they leave no files.
        """
        self.kv: KVLoads | None = None  #: Of a connector.
        self._dumps = dumps
        self._feeds_itself = feeds_itself
        self._grammars = grammars
        self._embeddings = embeddings
        self.scheduler = scheduler
        self.executor = executor
        self.aborts_queue: SimpleQueue[str] = SimpleQueue()  #: Ids, looked at between a pass and its update.
        self.steps = 0
        self.on_scheduled: Callable[[SchedulerOutput], None] = lambda step: None  #: Called before a step is executed.
        self._end_ids = end_ids
        self._ends = end_ids | ends  #: Tokens that are not text.
        self._vocab_size = vocab_size
        self._unmasked: dict[str, Exception] = {}  #: Requests of steps under way whose grammars have failed, and why.
        self._masks: ThreadPoolExecutor | None = None  #: Makes masks while this thread executes the model.
        self._batch_queue: deque[tuple[Future[ModelOutput], SchedulerOutput]] = deque()
        self.step_fn: Callable[[], tuple[list[EngineCoreOutput], bool]] = (
            self.step if executor.max_concurrent_batches == 1 else self.step_with_batch_queue
        )

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """Check a request and hash its blocks. In any thread.

        Raises: ValueError: it can never be computed. Its message is for the client.
        """
        params = request.params
        if type(request.priority) is not int:
            raise ValueError("priority must be a whole number")
        self._check_tokens(params.stop_token_ids)
        self._check_stops(params)
        self._check_tokens(params.logit_bias)
        count = len(request.prompt_token_ids)
        if count >= self.scheduler.longest:
            raise ContextLengthExceeded(count, self.scheduler.longest)
        placed = self._place(request)
        if (not placed.plain or request.open) and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: a prompt with embeddings, or that grows by a stream, has none")
        matcher = None
        if params.grammar is not None:
            if self._grammars is None:
                raise ValueError("this engine follows no grammars")
            matcher = self._grammars(params.grammar)
        limits = TokenLimits(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            end_ids=frozenset() if params.ignore_eos else self._end_ids,
            stop_ids=frozenset(params.stop_token_ids),
        )
        salt = request.cache_salt.encode()
        if params.prompt_logprobs is not None:  # all of the prompt must be computed
            salt = os.urandom(16)
        made = Request(
            request.request_id,
            placed.tokens,
            limits,
            priority=request.priority,
            salt=salt,
            open=request.open,
            feeds_itself=self._feeds_itself,
            fed=0 if self._feeds_itself and request.open else None,
        )
        made.matcher = matcher
        made.speculates = matcher is None and not self._feeds_itself and not params.hidden_rows
        if self._feeds_itself:
            made.rows = RequestRows()
        _keep_rows(made, placed, 0)
        made.hash(self.scheduler.limits.block_size)
        return made

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the vocabulary has {self._vocab_size} tokens, and no token {wrong}")

    def _check_stops(self, params: SamplingParams) -> None:
        """Raises: ValueError: each token would end the answer, and none may before ``min_tokens``."""
        if params.min_tokens and len(self._end_ids | set(params.stop_token_ids)) >= self._vocab_size:
            raise ValueError("stop_token_ids: no token is left for the min_tokens before the end")

    def preprocess_extension(self, more: Extension) -> PlacedRows:
        """Check a part of a prompt or of a stream. In any thread. Raises: ValueError: it does not fit the model."""
        if len(more.prompt_token_ids) >= self.scheduler.longest:
            raise ContextLengthExceeded(len(more.prompt_token_ids), self.scheduler.longest)
        placed = self._place(more)
        if more.feed is None:
            return placed
        if self._embeddings is None:
            raise ValueError("this model takes token ids only, no rows of a stream")
        return placed._replace(feed=self._embeddings.fed(more.feed))

    def extend_request(self, request_id: str, more: PlacedRows, *, last: bool) -> None:
        """More of an open request's prompt has come, or rows of its stream. last: nothing more comes.

        Raises: ValueError, IllegalEvent: it does not fit; nothing is changed then.
        """
        request = self.scheduler.get(request_id)
        if request is None:
            return
        if request.fed is None and more.feed is not None:
            raise ValueError("this request takes no rows of a stream")
        whole, first = last or more.feed is not None, len(request.tokens)
        if request.open or more.tokens or request.fed is None:
            self.scheduler.extend(request_id, more.tokens, last=whole)
            _keep_rows(request, more, first)
        if request.fed is not None and whole:
            rows = 0
            if more.feed is not None:  # before the scheduler counts them: a step may need them at once
                request.rows.feed(more.feed)
                rows = 0 if more.feed.rows is None else len(more.feed.rows)
            self.scheduler.feed(request_id, rows, last=last)

    def _place(self, part: EngineCoreRequest | Extension) -> PlacedRows:
        """Part of a prompt, checked. Raises: ValueError."""
        tokens = part.prompt_token_ids
        if part.prompt_embeds is None and part.prompt_positions is None and not part.added_rows:
            self._check_tokens(tokens)
            return PlacedRows(list(tokens), [])
        if self._embeddings is None:
            raise ValueError("this model takes token ids only, no embeddings")
        self._check_tokens(token for token in tokens if token != ROW)
        return self._embeddings.place(
            tokens, part.prompt_embeds, part.prompt_positions, part.position_delta, part.added_rows
        )

    def add_request(self, request: EngineCoreRequest, prepared: Request | None = None) -> None:
        """Raises: ValueError, IllegalEvent: it can never be computed, or its id is in use; nothing is changed then.
        What the executor raises: the request is not scheduled.
        """
        made = prepared or self.preprocess_add_request(request)
        if self.kv is None:
            self.scheduler.add(made, request.hold)
        else:
            self.kv.add(request, made)
        try:
            self.executor.add(request.request_id, request.params, request.prompt_token_ids)
        except BaseException:
            self.scheduler.finish([request.request_id])
            raise
        if self.kv is not None:
            self.kv.start()

    def connect(self, connector: KVConnector, post: Post) -> KVLoads:
        """Bring prompts' keys and values by a connector, and let it save them. post: see `kv_connector`."""
        self.kv = KVLoads(self.scheduler, self.executor, connector, post)
        return self.kv

    def gauges(self) -> dict[str, int]:
        """The values of parts that not every engine has, for `/metrics`. In any thread: single numbers are read."""
        found = {} if self.kv is None else self.kv.gauges()
        if self.scheduler.limits.num_speculative_tokens:
            stats = self.scheduler.stats
            found["spec_decode_drafts_total"] = stats.drafts
            found["spec_decode_draft_tokens_total"] = stats.draft_tokens
            found["spec_decode_accepted_tokens_total"] = stats.accepted_tokens
        return found

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Idempotent: an abort may come by two ways, and after the end."""
        self.scheduler.finish(request_ids)

    def release(self, request_id: str) -> None:
        """A held request has what it waited for. Raises: IllegalEvent: it is not held; nothing is changed then."""
        self.scheduler.release(request_id)

    def has_work(self) -> bool:
        return bool(self._batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Schedule, execute, update. Returns: outputs, and whether the model was executed."""
        if not self.scheduler.has_requests():
            return [], False
        scheduled = self.scheduler.schedule()
        self.on_scheduled(scheduled)
        future = self._execute(scheduled)
        return self._update(scheduled, future), scheduled.total_num_scheduled_tokens > 0

    def step_with_batch_queue(self) -> tuple[list[EngineCoreOutput], bool]:
        """As `step`, with the next batch scheduled while the oldest one is computed: the tokens that this one will give
        have placeholders there.
        """
        scheduled = self.scheduler.schedule()
        self.on_scheduled(scheduled)
        executed = scheduled.total_num_scheduled_tokens > 0
        if executed and self._batch_queue and any(row.unknown for row in _structured(scheduled)):
            return self._step_with_late_masks(scheduled), True
        if executed or scheduled.finished:
            self._batch_queue.appendleft((self._execute(scheduled), scheduled))
            if len(self._batch_queue) < self.executor.max_concurrent_batches and not self._batch_queue[-1][0].done():
                return [], True
        if not self._batch_queue:
            return [], False
        future, oldest = self._batch_queue.pop()
        return self._update(oldest, future), executed or bool(oldest.rows)

    def _step_with_late_masks(self, scheduled: SchedulerOutput) -> list[EngineCoreOutput]:
        """The model computes the batch while the oldest one's tokens are taken into the grammars that it follows."""
        self.executor.execute_model(scheduled, hold=True)
        future, oldest = self._batch_queue.pop()
        outputs = self._update(oldest, future)
        going = [row.request for row in _structured(scheduled) if row.request.state is not RequestStatus.FINISHED]
        masks = self.get_grammar_bitmask(going)
        self._batch_queue.appendleft((self.executor.sample_tokens(masks), scheduled))
        return outputs

    def _execute(self, scheduled: SchedulerOutput) -> Future[ModelOutput]:
        structured = [row.request for row in _structured(scheduled)]
        if not structured:
            return self.executor.execute_model(scheduled)
        if self.executor.max_concurrent_batches > 1:  # the model is executed in another thread
            self.executor.execute_model(scheduled, hold=True)
            return self.executor.sample_tokens(self.get_grammar_bitmask(structured))
        if self._masks is None:
            self._masks = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        masks = self._masks.submit(self.get_grammar_bitmask, structured)
        self.executor.execute_model(scheduled, hold=True)
        return self.executor.sample_tokens(masks.result())

    def get_grammar_bitmask(self, requests: Iterable[Request]) -> dict[str, npt.NDArray[np.bool_]]:
        """The tokens that each request may get next, by its grammar. One whose grammar fails ends with this step."""
        masks = {}
        for request in requests:
            try:
                masks[request.id] = request.matcher.mask()
            except Exception as error:
                self._unmasked[request.id] = error
        return masks

    def drain_aborts(self) -> None:
        """End what was aborted meanwhile."""
        found = []
        while True:
            try:
                found.append(self.aborts_queue.get_nowait())
            except Empty:
                break
        self.abort_requests(found)

    def _update(self, scheduled: SchedulerOutput, future: Future[ModelOutput]) -> list[EngineCoreOutput]:
        self.steps += bool(scheduled.rows)
        try:
            output = future.result()
        except Exception as error:  # the executor's own: its rows fail, the engine goes on
            log.exception("a step failed")
            output = ModelOutput({}, {row.request.id: describe(error) for row in scheduled.rows}, {})
        self._note_failures(scheduled, output)
        if self.kv is not None:
            self.kv.save([drafts.written(row) for row in scheduled.rows], output.failed.__contains__)
        refused = self._note_unmasked(scheduled, output)
        self.drain_aborts()
        ended = self._advance(scheduled, output)
        accepted = {name: one.accepted for name, one in output.drafts.items()}
        for one in output.drafts.values():
            self.scheduler.stats.count_draft(one.proposed, len(one.accepted))
        updates = self.scheduler.update_from_output(scheduled, output.sampled, output.failed, ended, accepted)
        return [_output(update, output, refused.get(update.request.id)) for update in updates]

    def _note_failures(self, scheduled: SchedulerOutput, output: ModelOutput) -> None:
        if self._dumps is None:
            return
        if output.failed:
            self._dumps.write(self.steps, scheduled, output.failed, self.scheduler)
        if scheduled.rows:
            self._dumps.note(self.steps, scheduled, output)

    def _note_unmasked(self, scheduled: SchedulerOutput, output: ModelOutput) -> dict[str, str]:
        """A token sampled without its grammar mask is discarded. Returns: by request, the field whose grammar cannot be
        followed.
        """
        refused = {}
        for row in scheduled.rows:
            error = self._unmasked.pop(row.request.id, None)
            if error is None:
                continue
            output.failed[row.request.id] = describe(error)
            if isinstance(error, GrammarRefused):
                output.failed[row.request.id], refused[row.request.id] = str(error), error.place
        return refused

    def _advance(self, scheduled: SchedulerOutput, output: ModelOutput) -> dict[str, Reason]:
        """Take the new tokens into their requests' grammars. Returns: the requests whose grammars end, and by what."""
        ended: dict[str, Reason] = dict(output.ended)
        for row in scheduled.rows:
            request, token = row.request, output.sampled.get(row.request.id)
            if request.matcher is None or token is None or request.id in output.failed:
                continue
            if request.state is RequestStatus.FINISHED:  # by the step before: this token is past its end
                continue
            try:
                if not request.matcher.take(token):
                    output.failed[request.id] = f"token {token} is not allowed by the request's grammar"
                elif request.matcher.ended:
                    ended[request.id] = None if token in self._ends else GRAMMAR_END
            except Exception as error:
                output.failed[request.id] = f"its grammar cannot be followed: {describe(error)}"
        return ended

    def shutdown(self) -> None:
        """End every request and the executor."""
        self.scheduler.finish([request.id for request in self.scheduler])
        if self.kv is not None:
            self.kv.connector.close()
        self.executor.shutdown()
        if self._masks is not None:
            self._masks.shutdown()


def _structured(step: SchedulerOutput) -> list[Row]:
    """Rows whose next token must be one that a grammar allows."""
    return [row for row in step.rows if row.samples and row.request.matcher is not None]


def _keep_rows(request: Request, part: PlacedRows, first: int) -> None:
    """first: the part's place in the prompt."""
    if part.plain:
        return
    if request.rows is None:
        request.rows = RequestRows()
    request.rows.keep(first, part)


def _output(update: Update, output: ModelOutput, refused: str | None) -> EngineCoreOutput:
    request = update.request
    if update.accepted is not None:
        logprobs = output.drafts[request.id].logprobs[update.accepted : update.accepted + 1]
    else:
        logprobs = (output.logprobs[request.id],) if request.id in output.logprobs else ()
    return EngineCoreOutput(
        request_id=request.id,
        new_token_ids=() if update.token is None else (update.token,),
        logprobs=logprobs,
        finish=update.finish,
        reason=update.reason,
        refused=refused,
        cached_tokens=request.hit_tokens,
        prompt_logprobs=output.prompt_logprobs.get(request.id, ()),
        hidden_rows=(output.hidden_rows[request.id],) if request.id in output.hidden_rows else (),
        rows=output.rows.get(request.id),
    )

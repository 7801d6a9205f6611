"""The engine core: requests in, steps, outputs. Threads and text are the business of `busy_loop`, `output_processor`.

Names follow vLLM's, whose design this is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from stage_runtime.engines.autoregressive.core.engine_requests import GRAMMAR_END, EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.core.executors import Executor, Mask
from stage_runtime.engines.autoregressive.core.kv_connector import KVConnector, KVLoads, Post
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts, Preprocessor, keep_rows
from stage_runtime.engines.autoregressive.core.step_dumps import StepDumps
from stage_runtime.engines.autoregressive.sampling.model_output import Drafted, ModelOutput
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import (
    Extension,
    PlacedRows,
)
from stage_runtime.engines.autoregressive.text.structured_output import draft_masks
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import GrammarRefused
from stage_runtime.errors import describe, safe_str
from stage_runtime.rules.autoregressive import drafts
from stage_runtime.rules.autoregressive.requests import Reason, Request, RequestStatus
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput, Update

log = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and executor. Every call on one thread, but for `preprocess_add_request` and ``aborts_queue``."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        model: ModelFacts,
        *,
        dumps: StepDumps | None = None,
    ) -> None:
        """dumps: of steps that fail; None: they leave no files."""
        self.kv: KVLoads | None = None  #: The loads of a connector.
        self.post: Post | None = None  #: The loop's: has a function called between two steps, from any thread.
        self.adapters = model.adapters
        self._dumps = dumps
        self._preprocessor = Preprocessor(model, longest=scheduler.longest, block_size=scheduler.limits.block_size)
        self.scheduler = scheduler
        self.executor = executor
        self.aborts_queue: SimpleQueue[str] = SimpleQueue()  #: Ids, looked at between a pass and its update.
        self.steps = 0
        self.on_scheduled: Callable[[SchedulerOutput], None] = lambda step: None  #: Called before a step is executed.
        self._ends = model.ends.of_answers | model.ends.of_grammars  #: Tokens that are not text.
        self._unmasked: dict[str, Exception] = {}  #: Requests of steps under way whose grammars have failed, and why.
        self._masks: ThreadPoolExecutor | None = None  #: Makes masks while this thread executes the model.
        self._batch_queue: deque[tuple[Future[ModelOutput], SchedulerOutput]] = deque()
        self.step_fn: Callable[[], tuple[list[EngineCoreOutput], bool]] = (
            self.step if executor.max_concurrent_batches == 1 else self.step_with_batch_queue
        )

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """`Preprocessor.request`. Any thread may call this. Raises: ValueError."""
        return self._preprocessor.request(request)

    def preprocess_extension(self, more: Extension) -> PlacedRows:
        """`Preprocessor.extension`. Any thread may call this. Raises: ValueError."""
        return self._preprocessor.extension(more)

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
            keep_rows(request, more, first)
        if request.fed is not None and whole:
            rows = 0
            if more.feed is not None:  # before the scheduler counts them: a step may need them at once
                request.rows.feed(more.feed)
                rows = 0 if more.feed.rows is None else len(more.feed.rows)
            self.scheduler.feed(request_id, rows, last=last)

    def add_request(self, request: EngineCoreRequest, prepared: Request | None = None) -> None:
        """Raises: ValueError, IllegalEvent: it can never be computed, or its id is in use; nothing is changed then.
        An exception of the executor means that the request is not scheduled.
        """
        made = prepared or self.preprocess_add_request(request)
        if made.adapter is not None and self.adapters is not None:
            self.adapters.enter(made.adapter)
            request = msgspec.structs.replace(request, adapter_digest=made.adapter.digest)
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
        """The values of parts that not every engine has, for `/metrics`. Any thread may call this:
        single numbers are read."""
        found = {} if self.kv is None else self.kv.gauges()
        if self.adapters is not None:
            found |= self.adapters.gauges()
        if self.scheduler.limits.num_speculative_tokens:
            stats = self.scheduler.stats
            found["spec_decode_drafts_total"] = stats.drafts
            found["spec_decode_draft_tokens_total"] = stats.draft_tokens
            found["spec_decode_accepted_tokens_total"] = stats.accepted_tokens
        return found

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Idempotent: an abort may come by two ways, and after the end."""
        self.scheduler.finish(request_ids)
        self._drop_unused_adapters()

    def release(self, request_id: str) -> None:
        """A held request has what it waited for. Raises: IllegalEvent: it is not held; nothing is changed then."""
        self.scheduler.release(request_id)

    def has_work(self) -> bool:
        return bool(self._batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Schedule, execute, update. Returns: outputs, and whether the model was executed."""
        if not self.scheduler.has_requests():
            return [], False
        scheduled = self._schedule()
        future = self._execute(scheduled)
        return self._update(scheduled, future), scheduled.total_num_scheduled_tokens > 0

    def step_with_batch_queue(self) -> tuple[list[EngineCoreOutput], bool]:
        """The same as `step`, but the next batch is scheduled while the oldest one is computed: placeholders stand for
        the tokens that the oldest will give.
        """
        scheduled = self._schedule()
        executed = scheduled.total_num_scheduled_tokens > 0
        if executed and self._batch_queue and any(row.unknown for row in _structured(scheduled)):
            return self._step_with_late_masks(scheduled), True
        if executed or scheduled.finished or scheduled.preempted:
            self._batch_queue.appendleft((self._execute(scheduled), scheduled))
            if len(self._batch_queue) < self.executor.max_concurrent_batches and not self._batch_queue[-1][0].done():
                return [], True
        if not self._batch_queue:
            return [], False
        future, oldest = self._batch_queue.pop()
        return self._update(oldest, future), executed or bool(oldest.rows)

    def _schedule(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        self.on_scheduled(scheduled)
        if self.kv is not None:
            self.kv.found(scheduled.rows)
        return scheduled

    def _step_with_late_masks(self, scheduled: SchedulerOutput) -> list[EngineCoreOutput]:
        """The model computes the batch while the oldest one's tokens are taken into the grammars that it follows."""
        drafted = self._hold(scheduled)
        future, oldest = self._batch_queue.pop()
        outputs = self._update(oldest, future)
        going = [row.request for row in _structured(scheduled) if row.request.state is not RequestStatus.FINISHED]
        masks = self._masked(going, drafted)
        self._batch_queue.appendleft((self.executor.sample_tokens(*masks), scheduled))
        return outputs

    def _execute(self, scheduled: SchedulerOutput) -> Future[ModelOutput]:
        structured = [row.request for row in _structured(scheduled)]
        if not structured:
            return self.executor.execute_model(scheduled)
        if self.executor.max_concurrent_batches > 1:  # the model is executed in another thread
            drafted = self._hold(scheduled)
            return self.executor.sample_tokens(*self._masked(structured, drafted))
        drafted = _drafted(scheduled)
        masks = self._masked_beside(structured, drafted)
        self._hold(scheduled, drafted)
        return self.executor.sample_tokens(*(self._masked(structured, drafted) if masks is None else masks.result()))

    def _masked_beside(self, requests: Sequence[Request], drafted: Drafted | None) -> Future[tuple[Any, ...]] | None:
        """The result of `_masked` to come, from a thread of its own. None: no thread can start."""
        if self._masks is None:
            self._masks = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        try:
            return self._masks.submit(self._masked, requests, drafted)
        except RuntimeError:
            self._masks = None  # it would carry this call out when it has a thread
            return None

    def _hold(self, scheduled: SchedulerOutput, drafted: Drafted | None = None) -> Drafted | None:
        """Begin a step whose tokens wait for masks. Returns: its drafts to come, if rows with grammars may have any."""
        drafted = drafted or _drafted(scheduled)
        if drafted is None:
            self.executor.execute_model(scheduled, hold=True)
        else:
            self.executor.execute_model(scheduled, True, drafted)
        return drafted

    def _masked(self, requests: Sequence[Request], drafted: Drafted | None) -> tuple[Any, ...]:
        """The arguments of `Executor.sample_tokens`."""
        masks = self.get_grammar_bitmask(requests)
        if drafted is None:
            return (masks,)
        drafts = drafted.result()
        known = [request for request in requests if request.id in masks]
        return masks, {one.id: draft_masks.along(one.matcher, masks[one.id], drafts.get(one.id, ())) for one in known}

    def get_grammar_bitmask(self, requests: Iterable[Request]) -> dict[str, Mask]:
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
        ended = self._advance(scheduled, output, refused)
        accepted = {name: one.accepted for name, one in output.drafts.items()}
        for one in output.drafts.values():
            self.scheduler.stats.count_draft(one.proposed, len(one.accepted))
        updates = self.scheduler.update_from_output(scheduled, output.sampled, output.failed, ended, accepted)
        self._drop_unused_adapters()
        return [_output(update, output, refused.get(update.request.id)) for update in updates]

    def _drop_unused_adapters(self) -> None:
        if self.adapters is not None and self.adapters.retired:
            self.adapters.drop_unused(self.adapters_in_use())

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapters of unfinished requests."""
        return {request.adapter.number for request in self.scheduler if request.adapter is not None}

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
                output.failed[row.request.id], refused[row.request.id] = safe_str(error), error.place
        return refused

    def _advance(self, scheduled: SchedulerOutput, output: ModelOutput, fields: dict[str, str]) -> dict[str, Reason]:
        """Take the new tokens into their requests' grammars. fields: gets those of grammars that cannot be followed.

        Returns: the requests whose grammars end, and by what.
        """
        ended: dict[str, Reason] = dict(output.ended)
        for row in scheduled.rows:
            request, token = row.request, output.sampled.get(row.request.id)
            if request.matcher is None or token is None or request.id in output.failed:
                continue
            if request.state is RequestStatus.FINISHED:  # by the step before: this token is past its end
                continue
            accepted = output.drafts[request.id].accepted if request.id in output.drafts else ()
            try:
                refused = next((one for one in (*accepted, token) if not request.matcher.take(one)), None)
                if refused is not None:
                    output.failed[request.id] = f"token {refused} is not allowed by the request's grammar"
                elif request.matcher.ended:
                    ended[request.id] = None if token in self._ends else GRAMMAR_END
            except GrammarRefused as error:
                output.failed[request.id], fields[request.id] = safe_str(error), error.place
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


def _drafted(step: SchedulerOutput) -> Drafted | None:
    """A place for the step's drafts; None: no row with a grammar has room for one."""
    return Future() if any(row.spare for row in _structured(step)) else None


def _structured(step: SchedulerOutput) -> list[Row]:
    """Rows whose next token must be one that a grammar allows."""
    return [row for row in step.rows if row.samples and row.request.matcher is not None]


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

"""The requests of one stage that generates tokens: from what arrives to prompts, from outputs to chunks and results.

What computes them is elsewhere: `stage` has the engine core in its own thread. Everything here is on the stage's
thread, but for `name`. A request whose consumer lags behind is not waited for: its deltas are joined until its gate
opens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

from stage_runtime.api import Autoregressive, Generation, Prompt, StageContext
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive import parameters, prompting
from stage_runtime.engines.autoregressive.core import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.output_processor import (
    OutputProcessor,
    RequestOutput,
    RequestOutputCollector,
)
from stage_runtime.engines.base import Gate, Outbox, Work
from stage_runtime.engines.custom import RequestIds
from stage_runtime.engines.running import Yields
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.profiler import events as profile
from stage_runtime.rules.autoregressive.requests import Finish, Request
from stage_runtime.wire.values import StagePayload

LONG: Final = 8_000  # characters of a prompt that is encoded apart: more would take milliseconds of a step

#: A request for the engine, and what its check has made of it.
Entered: TypeAlias = tuple[EngineCoreRequest, Request | None]


class _Coming(NamedTuple):
    """A request that has not become tokens yet."""

    name: str
    work: Work
    payload: StagePayload
    prompt: Prompt
    params: parameters.SamplingParams


class _Answer:
    """One request, from its arrival to its end here."""

    def __init__(self, work: Work, payload: StagePayload, outbox: Outbox, prompt_tokens: int) -> None:
        self.work = work
        self.payload = payload
        self.prompt_tokens = prompt_tokens
        self.collector = RequestOutputCollector(parameters.OutputKind.DELTA)
        self.yields = Yields(work, outbox)
        self.gate: Gate | None = None  #: Its consumer lags behind.
        self.scheduled = False
        self.text = ""  #: All that was given out.


class Answers:
    """All requests of the stage that have not ended here."""

    def __init__(
        self,
        spec: Autoregressive,
        tokenizer: Any,
        context: StageContext | None,
        *,
        wake: Callable[[], None],
        abort: Callable[[Sequence[str]], None],
        check: Callable[[EngineCoreRequest], Request | None] = lambda request: None,
    ) -> None:
        """wake: a gate has opened, or a long prompt is encoded; called in any thread. abort: these are to be computed
        no further. check: whether the engine could compute a request; in any thread; raises ValueError if not.
        """
        from stage_runtime.engines.autoregressive.loading import decoder

        self.outbox: Outbox  #: Set before anything arrives.
        self._tokenizer = tokenizer
        self._prompt = spec.prompt or prompting.default_prompt
        self._deliver = spec.deliver or prompting.default_deliver
        self._defaults = parameters.from_params(
            {key: value for key, value in spec.params.items() if key != "max_tokens"},
            parameters.SamplingParams(max_tokens=int(spec.params.get("max_tokens", 256))),
        )
        self._context = context
        self._wake = wake
        self._abort = abort
        self._check = check
        self._own_tokenizer = copy.deepcopy(tokenizer)  #: Of the encoder's thread: none is for two threads at once.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._encoding: dict[str, Work] = {}  #: Requests whose prompts are being encoded.
        self._encoded: SimpleQueue[tuple[_Coming, Entered | BaseException]] = SimpleQueue()
        self._processor = OutputProcessor(decoder(tokenizer))
        self._ids = RequestIds()
        self._answers: dict[str, _Answer] = {}
        self._names: dict[Work, str] = {}  #: Read in any thread.
        self._opened: SimpleQueue[str] = SimpleQueue()  #: Requests whose gates are done.

    def __len__(self) -> int:
        return len(self._answers) + len(self._encoding)

    def name(self, work: Work) -> str | None:
        """By which the engine knows a request. In any thread."""
        return self._names.get(work)

    # --- what comes in --------------------------------------------------------------------------------------------

    def start(self, event: events.Start) -> Entered | None:
        """Prompt to tokens. None: it has failed, alone, whatever was wrong; or its prompt is long, see `encoded`."""
        work = event.work
        name = self._ids.of(work)
        try:
            self._emit(profile.SCHEDULER_REQUEST_BUILD_START, work)
            prompt = self._prompt(event.payload)
            params = parameters.from_params(prompt.params, self._defaults)
            coming = _Coming(name, work, event.payload.detach(), prompt, params)
            if prompting.size(prompt) > LONG:
                self._encoding[name] = work
                self._names[work] = name
                self._encoder.submit(self._encode_apart, coming)
                return None
            return self._enter(coming, *self._encode(coming, self._tokenizer))
        except BaseException as error:  # SystemExit too: one request's code must not end the engine
            self._refuse(name, work, error)
            return None

    def encoded(self) -> Entered | None:
        """The next request with a long prompt that has become tokens; None: none now."""
        while True:
            try:
                coming, found = self._encoded.get_nowait()
            except Empty:
                return None
            if self._encoding.pop(coming.name, None) is not coming.work:
                continue  # aborted meanwhile
            if isinstance(found, BaseException):
                self._refuse(coming.name, coming.work, found)
                continue
            try:
                entered = self._enter(coming, *found)
            except BaseException as error:
                self._refuse(coming.name, coming.work, error)
                continue
            if entered is not None:
                return entered

    def _encode(self, coming: _Coming, tokenizer: Any) -> Entered:
        """In any thread, one at a time with the same tokenizer."""
        prompt = coming.prompt
        request = EngineCoreRequest(
            request_id=coming.name,
            prompt_token_ids=prompting.encode(prompt, tokenizer),
            params=coming.params,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
        )
        try:
            return request, self._check(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def _encode_apart(self, coming: _Coming) -> None:
        """On the encoder's thread: steps go on meanwhile."""
        if coming.work.cancelled:
            return
        try:
            found: Entered | BaseException = self._encode(coming, self._own_tokenizer)
        except BaseException as error:
            found = error
        self._encoded.put((coming, found))
        self._wake()

    def _enter(self, coming: _Coming, request: EngineCoreRequest, prepared: Request | None) -> Entered | None:
        name, work, count = coming.name, coming.work, len(request.prompt_token_ids)
        answer = _Answer(work, coming.payload, self.outbox, count)
        self._answers[name] = answer
        self._names[work] = name
        self._processor.add_request(name, coming.params, count, answer.collector)
        self._emit(profile.SCHEDULER_REQUEST_BUILD_END, work)
        if not self._give(name, answer, Generation(begins=True, prompt_tokens=count)):
            return None
        self._emit(profile.SCHEDULER_QUEUE_ENTER, work, prompt_tokens=count)
        return request, prepared

    def _refuse(self, name: str, work: Work, error: BaseException) -> None:
        self.outbox.fail(work, error)
        self._names.pop(work, None)
        self._drop(name)
        self._ids.end(name)

    def forget(self, work: Work) -> str | None:
        """A request was aborted. Returns: its name, if the engine may have it."""
        name = self._names.pop(work, None)
        if name is None:
            return None
        self._ids.abort(work)
        if self._encoding.pop(name, None) is not None:
            return None
        self._drop(name)
        return name

    # --- what goes out --------------------------------------------------------------------------------------------

    def scheduled(self, requests: Iterable[tuple[str, int]]) -> None:
        """These are computed now. Each with how many tokens of its prompt were cached."""
        for name, cached_tokens in requests:
            answer = self._answers.get(name)
            if answer is not None and not answer.scheduled:
                answer.scheduled = True
                self.outbox.began(answer.work)
                self._emit(profile.SCHEDULER_PREFILL_START, answer.work, cached_tokens=cached_tokens)

    def deliver(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """Deliver a step's outputs. Returns: the requests that the engine must end, for their text has ended."""
        processed = self._processor.process_outputs(outputs)
        for name in processed.ready:
            self._flush(name)
        self.outbox.settle()
        return processed.reqs_to_abort

    def flush_opened(self) -> None:
        """Deliver what was held for readers that have caught up."""
        while True:
            try:
                name = self._opened.get_nowait()
            except Empty:
                return
            answer = self._answers.get(name)
            if answer is not None and answer.gate is not None and answer.gate.done():
                answer.gate = None
                self._flush(name)

    def fail(self, name: str, error: BaseException) -> None:
        answer = self._answers.get(name)
        if answer is not None:
            self.outbox.fail(answer.work, error)
            self._drop(name)
            self._ids.end(name)

    def _flush(self, name: str) -> None:
        """Give out what waits in a collector."""
        answer = self._answers.get(name)
        if answer is None or answer.gate is not None:
            return
        output = answer.collector.get_nowait()
        if output is None:
            return
        if output.finish is Finish.ERROR:
            self.fail(name, RequestError("stage_failed", str(output.reason)))
            return
        answer.text += output.text
        if not self._give(name, answer, _generation(output, answer.text)):
            self._abort([name])

    def _give(self, name: str, answer: _Answer, generation: Generation) -> bool:
        """Call the author's ``deliver``. False: it failed."""
        if 0 < generation.completion_tokens == len(generation.tokens):
            self._emit(profile.SCHEDULER_FIRST_EMIT, answer.work)
        try:
            for item in self._deliver(answer.payload, generation):
                gate = answer.yields.take(item)
                if gate is not None and not gate.done():
                    answer.gate = gate
            if generation.finish is not None:
                answer.yields.end()
        except BaseException as error:
            self.fail(name, error)
            return False
        if generation.finish is not None:
            self._drop(name)
            self._ids.end(name)
        elif answer.gate is not None:
            answer.gate.add_done_callback(lambda _gate: self._open(name))
        return True

    def _open(self, name: str) -> None:
        """A gate is done. In any thread."""
        self._opened.put(name)
        self._wake()

    def _drop(self, name: str) -> None:
        """Nothing more is said of a request here."""
        answer = self._answers.pop(name, None)
        self._processor.abort_requests([name])
        if answer is not None:
            self._names.pop(answer.work, None)

    def _emit(self, event: str, work: Work, **metadata: Any) -> None:
        if self._context is not None:
            self._context.emit(event, work.request_id, **metadata)


def _generation(output: RequestOutput, answer: str) -> Generation:
    return Generation(
        text=output.text,
        answer=answer,
        tokens=output.token_ids,
        finish=None if output.finish is None else output.finish.value,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=output.generated,
        cached_tokens=output.cached_tokens,
        logprobs=tuple((one.logprob, one.top) for one in output.logprobs),
    )

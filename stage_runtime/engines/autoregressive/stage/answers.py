"""The requests of one stage that generates tokens: from what arrives to prompts, from outputs to chunks and results.

Here is nothing that computes them. Everything here is on the stage's thread, but for `names`. A request whose consumer
lags behind is not waited for: its deltas are joined until its gate opens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from stage_runtime.api import Autoregressive, Generation, Prompt, StageContext
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput, EngineCoreRequest
from stage_runtime.engines.autoregressive.core.output.choices import Choice, Echo
from stage_runtime.engines.autoregressive.core.output.output_processor import OutputProcessor
from stage_runtime.engines.autoregressive.lora import settings as lora_settings
from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.stage.client_reports import ClientReport
from stage_runtime.engines.autoregressive.text import decoding, reasoning, token_requests
from stage_runtime.engines.autoregressive.text.detokenizer import Spelling
from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import AddedRows
from stage_runtime.engines.autoregressive.text.reasoning import THINK, THOUGHT, ThoughtSplitter
from stage_runtime.engines.autoregressive.text.token_requests import TokenRequests
from stage_runtime.engines.autoregressive.text.tool_calls import call_forms
from stage_runtime.engines.base import Gate, Outbox, Work
from stage_runtime.engines.custom import RequestIds
from stage_runtime.engines.running import Yields
from stage_runtime.errors import refusal
from stage_runtime.profiler import events as profile
from stage_runtime.rules.autoregressive.requests import FinishReason, Request
from stage_runtime.wire.values import Note, StagePayload, Text

THINKING: Final = 16  # tokens at the end of a prompt that may begin the model's thinking

#: A request for the engine, and what its check has made of it.
Entered: TypeAlias = tuple[EngineCoreRequest, Request | None]

Told: TypeAlias = Note | Text  #: The answer to a request for tokens.


class _Pending(NamedTuple):
    """A request that has not become tokens yet."""

    name: str
    work: Work
    payload: StagePayload
    prompt: Prompt
    params: parameters.SamplingParams
    open: bool = False


class _Answer:
    """One request, from its arrival to its end here."""

    def __init__(self, name: str, work: Work, payload: StagePayload, outbox: Outbox) -> None:
        self.name = name
        self.work = work
        self.payload = payload
        self.choices: dict[str, Choice] = {}  #: Choices by the engine's names.
        self.yields = Yields(work, outbox)
        self.report: ClientReport | None = None  #: The report of a terminal stage.
        self.gate: Gate | None = None  #: Its consumer lags behind.
        self.scheduled = False
        self.ends_first = False  #: Its text has ended one of the choices, which the engine still computes.


class GenerationAnswers:
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
        self.outbox: Outbox  #: Set before anything arrives.
        unsaid = prompting.default_prompt if spec.stream is None else prompting.no_prompt
        self._prompt = spec.prompt or unsaid
        self._deliver = spec.deliver or prompting.default_deliver
        self._defaults = parameters.of_stage(spec.params)
        self._hidden_rows = spec.hidden_rows
        self._adapts = lora_settings.checked(spec) is not None
        self._model = spec.model
        self._context = context
        self._wake = wake
        self._abort = abort
        self._check = check
        #: A tokenizer of the encoder's thread: none is for two threads at once.
        own_tokenizer = copy.deepcopy(tokenizer)
        self._texts = TextEncoder(tokenizer, control_strings=spec.control_strings)
        self._own_texts = TextEncoder(own_tokenizer, control_strings=spec.control_strings)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._encoding: dict[str, Work] = {}  #: Requests whose prompts are being encoded.
        self._encoded: SimpleQueue[tuple[_Pending, list[Entered] | Told | BaseException]] = SimpleQueue()
        self._form = call_forms.form_of(spec.tool_calls, getattr(tokenizer, "chat_template", None))
        self._spelling = Spelling(tokenizer)
        self._token_requests = TokenRequests(own_tokenizer, spec.max_model_len)
        self._splits = reasoning.splits(spec.reasoning, tokenizer)
        kept = (self._form.mark, *((THINK, THOUGHT) if self._splits else ()))
        self._processor = OutputProcessor(decoding.decoder(tokenizer, kept), self._spelling)
        self._ids = RequestIds()
        self._answers: dict[str, _Answer] = {}
        self._of: dict[str, _Answer] = {}  #: Answers by the engine's names: one for each of ``n`` answers.
        self._names: dict[Work, tuple[str, ...]] = {}  #: The names by which the engine knows them. Read in any thread.
        self._opened: SimpleQueue[_Answer] = SimpleQueue()  #: Requests whose gates are done.
        #: Answers that begin with a long prompt's log probabilities, by the engine's names; some are made in a turn.
        self._echoing: dict[str, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers) + len(self._encoding)

    def names(self, work: Work) -> Sequence[str]:
        """The names by which the engine knows a request. Any thread may call this."""
        return self._names.get(work, ())

    def origin(self, name: str) -> str | None:
        """The client's request to which a request of the engine belongs."""
        answer = self._of.get(name)
        return None if answer is None else answer.work.request_id

    # --- what comes in --------------------------------------------------------------------------------------------

    def start(self, work: Work, payload: StagePayload, *, open: bool = False) -> list[Entered]:
        """Prompt to tokens. Empty: it has failed, alone, whatever was wrong; or it is long, see `encoded`.

        open: more of the prompt will come, so that it is encoded now, however long.
        """
        name = self._ids.of(work)
        try:
            self._emit(profile.SCHEDULER_REQUEST_BUILD_START, work)
            asks_for_tokens = payload.request.kind in token_requests.KINDS
            if asks_for_tokens and not payload.request.messages():
                prompt = Prompt(text="")
            else:
                prompt = prompting.checked(self._prompt(payload))
            params = self._params(prompt)
            pending = _Pending(name, work, payload.detach(), prompt, params, open)
            if asks_for_tokens or (prompting.is_long(prompt, params.grammar, params.n) and not open):
                self._encoding[name] = work
                self._names[work] = (name,)
                self._encoder.submit(self._encode_apart, pending)
                return []
            return self._enter(pending, self._encode(pending, self._texts))
        except BaseException as error:  # SystemExit too: one request's code must not end the engine
            self._refuse(name, work, error)
            return []

    def _params(self, prompt: Prompt) -> parameters.SamplingParams:
        params = parameters.from_params(prompt.params, self._defaults, self._form)
        return msgspec.structs.replace(params, hidden_rows=True) if self._hidden_rows else params

    def encoded(self) -> list[Entered]:
        """The long requests that have become tokens."""
        entered: list[Entered] = []
        while True:
            try:
                pending, found = self._encoded.get_nowait()
            except Empty:
                return entered
            if self._encoding.pop(pending.name, None) is not pending.work:
                continue  # aborted meanwhile
            try:
                if isinstance(found, BaseException):
                    raise found
                if isinstance(found, Note | Text):
                    self._told(pending, found)
                    continue
                entered += self._enter(pending, found)
            except BaseException as error:
                self._refuse(pending.name, pending.work, error)

    def _encode(self, pending: _Pending, texts: TextEncoder) -> list[Entered]:
        """A request for each answer. Any thread may call this, one at a time with the same encoder."""
        prompt, params = pending.prompt, pending.params
        tokens, embeds = prompting.encode(prompt, texts, whole=not pending.open, form=self._form)
        params = self._with_thinking(prompt, params, tokens)
        entered = []
        for index in range(params.n):
            seed = None if params.seed is None else (params.seed + index) % 2**63
            request = EngineCoreRequest(
                request_id=pending.name if params.n == 1 else f"{pending.name}\0{index}",
                prompt_token_ids=tokens,
                prompt_embeds=embeds,
                prompt_positions=prompt.positions,
                position_delta=prompt.position_delta,
                added_rows=[AddedRows(*one) for one in prompt.added_rows],
                open=pending.open,
                params=msgspec.structs.replace(params, n=1, seed=seed),
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
                adapter=self._adapter(pending),
                pin=prompt.pin,
                data_parallel_rank=prompt.data_parallel_rank,
            )
            try:
                entered.append((request, self._check(request)))
            except ValueError as error:
                raise refusal(error) from error
        return entered

    def _adapter(self, pending: _Pending) -> str:
        """The adapter's name, of the author's prompt or of the client; empty: none."""
        if pending.prompt.adapter is not None:
            return pending.prompt.adapter
        named = pending.payload.request.model
        return named if self._adapts and named != self._model else ""

    def _with_thinking(
        self, prompt: Prompt, params: parameters.SamplingParams, tokens: Sequence[int]
    ) -> parameters.SamplingParams:
        """A grammar holds for the answer, not for what the model thinks before it."""
        if params.grammar is None or not self._thinks(prompt):
            return params
        thinking = "begun" if self._has_begun(tokens) else "may"
        return msgspec.structs.replace(params, grammar=msgspec.structs.replace(params.grammar, thinking=thinking))

    def _thinks(self, prompt: Prompt) -> bool:
        """Whether the answer's thinking is put aside."""
        return self._splits and prompt.messages is not None

    def _has_begun(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt has begun the model's thinking. Any thread may call this."""
        end = self._spelling.text_of_all([token for token in tokens[-THINKING:] if token >= 0])
        return end.rstrip().endswith(THINK)

    def _encode_apart(self, pending: _Pending) -> None:
        """Encodes a long prompt. The encoder's thread calls it: steps go on meanwhile."""
        if pending.work.cancelled:
            return
        try:
            found: list[Entered] | Told | BaseException
            if pending.payload.request.kind in token_requests.KINDS:
                found = self._tell(pending)
            else:
                found = self._encode(pending, self._own_texts)
        except BaseException as error:
            found = error
        self._encoded.put((pending, found))
        self._wake()

    def _tell(self, pending: _Pending) -> Told:
        """The answer to a request for tokens. It runs on the encoder's thread."""
        request = pending.payload.request
        tokens = self._token_requests.own_tokens(request)
        if tokens is None:
            tokens, _embeds = prompting.encode(pending.prompt, self._own_texts, form=self._form)
        return self._token_requests.answer(request, tokens)

    def _told(self, pending: _Pending, answer: Told) -> None:
        self._names.pop(pending.work, None)
        self._ids.end(pending.name)
        self.outbox.began(pending.work)
        self.outbox.done(pending.work, answer, has_data=True)

    def _enter(self, pending: _Pending, entered: list[Entered]) -> list[Entered]:
        name, work, count = pending.name, pending.work, len(entered[0][0].prompt_token_ids)
        answer = _Answer(name, work, pending.payload, self.outbox)
        if self._context is not None and self._context.terminal:
            answer.report = ClientReport(completes=pending.payload.request.kind != "pipeline")
        self._answers[name] = answer
        self._names[work] = tuple(request.request_id for request, _prepared in entered)
        tokens = entered[0][0].prompt_token_ids
        thinks = self._thinks(pending.prompt)
        asked = call_forms.asked(pending.prompt.params, pending.prompt.template.get("tools"), self._form)
        begun = (thinks or asked is not None) and self._has_begun(tokens)
        if asked is not None:
            asked = msgspec.structs.replace(asked, thinking=begun and not thinks)
        echo = self._echo(pending, tokens) if pending.params.echo else None
        for index, (request, _prepared) in enumerate(entered):
            given = tokens if pending.params.return_token_ids else ()
            choice = Choice(index, pending.params, self._spelling, echo, given, kind=pending.payload.request.kind)
            parser = None if asked is None else self._form.parser(asked)
            answer.choices[request.request_id] = choice
            self._of[request.request_id] = answer
            splitter = ThoughtSplitter(begun=begun) if thinks else None
            self._processor.add_request(request.request_id, request.params, count, choice.collector, parser, splitter)
        self._emit(profile.SCHEDULER_REQUEST_BUILD_END, work)
        if not self._give(answer, Generation(begins=True, prompt_tokens=count)):
            return []
        self._emit(profile.SCHEDULER_QUEUE_ENTER, work, prompt_tokens=count)
        return entered

    def _echo(self, pending: _Pending, tokens: Sequence[int]) -> Echo:
        text = pending.prompt.text
        readable = [token for token in tokens if token >= 0]
        return Echo(self._spelling.text_of_all(readable) if text is None else text, readable)

    def extended(self, work: Work, prompt_tokens: int) -> Sequence[str]:
        """The prompt of a request has so many tokens more. Returns: the names by which the engine knows it."""
        names = self.names(work)
        for name in names:
            self._processor.extend_request(name, prompt_tokens)
        return names

    def _refuse(self, name: str, work: Work, error: BaseException) -> None:
        self.outbox.fail(work, error)
        self._names.pop(work, None)
        self._encoding.pop(name, None)
        self._drop(name)
        self._ids.end(name)

    def forget(self, work: Work) -> Sequence[str]:
        """A request was aborted. Returns: the names by which the engine may have it."""
        names = self._names.pop(work, ())
        if not names:
            return ()
        self._ids.abort(work)
        if self._encoding.pop(names[0], None) is not None:
            return ()
        self._drop(self._of[names[0]].name)
        return names

    # --- what goes out --------------------------------------------------------------------------------------------

    def scheduled(self, requests: Iterable[tuple[str, int]]) -> None:
        """These are computed now. Each with how many tokens of its prompt were cached."""
        for name, cached_tokens in requests:
            answer = self._of.get(name)
            if answer is not None and not answer.scheduled:
                answer.scheduled = True
                self.outbox.began(answer.work)
                self._emit(profile.SCHEDULER_PREFILL_START, answer.work, cached_tokens=cached_tokens)

    def deliver(self, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """Deliver a step's outputs. Returns: the requests that the engine must end, for their text has ended."""
        processed = self._processor.process_outputs(outputs)
        for name in processed.reqs_to_abort:
            self._of[name].ends_first = True
        with self.outbox.together():
            for name in processed.ready:
                answer = self._of.get(name)
                if answer is not None and name not in self._echoing:
                    self._flush(answer, name)
        self.outbox.settle()
        return processed.reqs_to_abort

    def flush_opened(self) -> None:
        """Deliver what was held for readers that have caught up, and make some of a long echo."""
        for name in list(self._echoing)[:1]:
            self._flush(self._echoing.pop(name), name)
        while True:
            try:
                answer = self._opened.get_nowait()
            except Empty:
                return
            if self._answers.get(answer.name) is answer and answer.gate is not None and answer.gate.done():
                answer.gate = None
                for name in [one for one in answer.choices if one not in self._echoing]:
                    self._flush(answer, name)

    def fail(self, name: str, error: BaseException) -> None:
        """One of the engine's requests has failed: all answers to the same request fail with it."""
        answer = self._of.get(name)
        if answer is None:
            return
        self.outbox.fail(answer.work, error)
        others = [one for one, choice in answer.choices.items() if one != name and not choice.over]
        self._drop(answer.name)
        self._ids.abort(answer.work)
        if others:
            self._abort(others)

    def give_up(self, work: Work, error: BaseException) -> None:
        """A request fails here; the engine may still be computing it."""
        names = self.names(work)
        if names:
            self.fail(names[0], error)
            self._abort(names[:1])

    def _flush(self, answer: _Answer, name: str) -> None:
        """Give out what waits in a collector."""
        if answer.gate is not None or self._of.get(name) is not answer:
            return
        choice = answer.choices[name]
        output = choice.collector.get_nowait()
        if output is None:
            return
        if output.finish is FinishReason.ERROR:
            self.fail(name, output.error)
            return
        last = all(one.over for one in answer.choices.values() if one is not choice)
        try:
            if choice.echoes(output):
                choice.collector.put(output)
                self._echoing[name] = answer
                self._wake()
                return
            goes_on = self._give(answer, choice.part(output, last=last))
        except Exception as error:  # a tokenizer's, which lacks one of the likeliest tokens
            self.fail(name, error)
            goes_on = False
        if not goes_on and not choice.over:
            self._abort([name])

    def _give(self, answer: _Answer, generation: Generation) -> bool:
        """Call the author's ``deliver``. False: it failed."""
        if 0 < generation.completion_tokens == len(generation.tokens):
            self._emit(profile.SCHEDULER_FIRST_EMIT, answer.work)
        try:
            given = prompting.delivered(self._deliver(answer.payload, generation))
            for item in given if answer.report is None else answer.report.added_to(given, generation):
                gate = answer.yields.take(item)
                if gate is not None and not gate.done():
                    answer.gate = gate
            if generation.ends:
                answer.yields.end()
        except BaseException as error:
            self.fail(list(answer.choices)[generation.choice], error)
            return False
        if generation.ends:
            self._drop(answer.name)
            if answer.ends_first:
                self._ids.abort(answer.work)
            self._ids.end(answer.name)
        elif answer.gate is not None:
            answer.gate.add_done_callback(lambda _gate: self._open(answer))
        return True

    def _open(self, answer: _Answer) -> None:
        """A gate is done. Any thread may call this."""
        self._opened.put(answer)
        self._wake()

    def _drop(self, name: str) -> None:
        """Nothing more of a request is sent from here."""
        answer = self._answers.pop(name, None)
        if answer is not None:
            self._names.pop(answer.work, None)
            self._processor.abort_requests(answer.choices)
            for one in answer.choices:
                self._of.pop(one, None)
                self._echoing.pop(one, None)

    def _emit(self, event: str, work: Work, **metadata: Any) -> None:
        if self._context is not None:
            self._context.emit(event, work.request_id, **metadata)

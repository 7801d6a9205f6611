"""A stage whose model writes a given text, letter by letter, or what its grammar allows instead; and its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import stage_runtime as omni
from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent, ResultEvent
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.preprocessing import EndTokens, ModelFacts
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput, TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.stage.thread_engine import AutoregressiveEngine
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import Row, SchedulerLimits, SchedulerOutput
from stage_runtime.web.translating.generation import chat, text_completions
from stage_runtime.web.translating.generation.completions import Completion, CompletionChunks
from stage_runtime.wire.values import Audio, OmniRequest
from tests.engines.engine_kit import running
from tests.engines.generation_kit import END, VOCABULARY, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


class WritingExecutor:
    """`core.Executor`. script: the tokens that it wants to generate, and then ``end``."""

    max_concurrent_batches = 1

    def __init__(self, script: Sequence[int], end: int) -> None:
        self._script = [*script]
        self._end = end
        self._params: dict[str, SamplingParams] = {}
        self._held: list[Row] = []

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params[request_id] = params

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        raise AssertionError("no blocks cross")

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        self._held = [row for row in step.rows if row.samples]
        return Future() if hold else self.sample_tokens({})

    def sample_tokens(self, masks: Mapping[str, npt.NDArray[np.bool_]], after: Any = None) -> Future[ModelOutput]:
        future: Future[ModelOutput] = Future()
        sampled = {row.request.id: self._next(row, masks.get(row.request.id)) for row in self._held}
        logprobs = {
            name: TokenLogprobs(-1.0, ((token, -1.0), (token // 2, -2.0))[: self._params[name].logprobs])
            for name, token in sampled.items()
            if self._params[name].logprobs is not None
        }
        future.set_result(ModelOutput(sampled, {}, logprobs))
        return future

    def _next(self, row: Row, mask: npt.NDArray[np.bool_] | None) -> int:
        place = row.place
        wanted = self._script[place] if place < len(self._script) else self._end
        if mask is None or mask[wanted]:
            return wanted
        return int(mask.nonzero()[0][0])

    def shutdown(self) -> None: ...


class Answer(NamedTuple):
    """One choice, as a client gets it. calls: (name, arguments). shown: ``logprobs.content``."""

    content: str | None
    calls: list[tuple[str, str]]
    finish: str
    shown: list[dict[str, Any]]
    error: str = ""
    reasoning: str = ""


class Writing:
    """One answer after another by a model that writes ``text``."""

    def __init__(
        self,
        text: str | Sequence[int],
        *,
        form: str = "hermes",
        tokenizer: Any = None,
        end: int = END,
        prompt: str = "",
        reasoning: str = "auto",
    ) -> None:
        """prompt: at the end of the chat template's text."""
        self._reasoning = reasoning
        self._tokenizer = tokenizer or tiny_tokenizer()
        self._tokenizer.chat_template = (
            "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if tools %}{% endif %}" + prompt
        )
        self._script = self._tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        self._form = form
        self._end = end
        size = max(len(self._tokenizer), VOCABULARY)
        self._grammars = Grammars(self._tokenizer, size, frozenset({end}))
        self._size = size

    def __call__(self, **params: Any) -> list[Answer]:
        """One for each choice; streamed and whole ones are the same."""
        inputs = {"messages": MESSAGES}
        found = self._events(OmniRequest(id="r", kind="chat", inputs=inputs, params={"temperature": 0, **params}))
        if isinstance(found, str):
            return [Answer(None, [], "", [], error=found)]
        whole, streamed = _whole(found, params), _streamed(found, params)
        assert streamed == whole
        return whole

    def completed(self, prompt: str, **params: Any) -> dict[str, Any]:
        """The choice of a completion, as a client gets it."""
        body = text_completions.decode(json.dumps({"prompt": prompt, "temperature": 0, **params}).encode())
        accepts = frozenset({"logprobs", "echo"})
        call = text_completions.call(body, accepts)
        [request] = text_completions.requests(body, call, "r", accepts)
        found = self._events(request)
        assert not isinstance(found, str), found
        made = text_completions.TextCompletion(call=call, request_id="r", model="m", created=0)
        for event in found:
            list(made.add(0, event))
        [choice] = made.finish()["choices"]
        return dict(choice)

    def _events(self, request: OmniRequest) -> list[AnswerEvent] | str:
        """The events of a request; a text: why it was refused."""
        limits = SchedulerLimits(
            block_size=16, max_requests=8, max_batched_tokens=512, max_chunk=512, max_model_len=4096
        )
        core = EngineCore(
            Scheduler(limits, BlockPool(600)),
            WritingExecutor(self._script, self._end),
            ModelFacts(self._size, ends=EndTokens(frozenset({self._end})), grammars=self._grammars.compile),
        )
        spec = omni.Autoregressive(
            model="", params={"max_tokens": 2000}, tool_calls=self._form, reasoning=self._reasoning
        )
        engine = AutoregressiveEngine(spec, core, self._tokenizer, None)
        events: list[AnswerEvent] = []
        with running(engine) as rig:
            rig.ask(request)
            while True:
                _name, kind, *data = rig.outbox.next()
                if kind == "failed":
                    kind, _colon, message = str(data[0]).partition(": ")
                    assert kind in ("InvalidRequest", "GrammarRefused")  # 400
                    return message
                made = (data or [None])[0]
                events.append(
                    ResultEvent(stage="s", data=made) if kind == "done" else ChunkEvent(stage="s", index=0, data=made)
                )
                if kind == "done":
                    break
        core.shutdown()
        return events


def _call(params: Mapping[str, Any]) -> chat.ChatCall:
    body = {
        "messages": MESSAGES,
        **{key: value for key, value in params.items() if key in ("n", "logprobs", "include_reasoning")},
    }
    return chat.call(chat.decode(json.dumps(body).encode()), frozenset({"n", "logprobs"}))


def _whole(events: Sequence[AnswerEvent], params: Mapping[str, Any]) -> list[Answer]:
    made = Completion(call=_call(params), request_id="r", model="m", created=0)
    for event in events:
        made.add(event)
    found = []
    for choice in made.finish(None)["choices"]:
        message = choice["message"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        shown = (choice["logprobs"] or {}).get("content", [])
        thought = message.get("reasoning_content", "")
        assert thought == message.get("reasoning", "")
        found.append(Answer(message["content"] or "", calls, choice["finish_reason"], shown, reasoning=thought))
    return found


def _streamed(events: Sequence[AnswerEvent], params: Mapping[str, Any]) -> list[Answer]:
    made = CompletionChunks(call=_call(params), request_id="r", model="m", created=0)
    chunks = [one for event in events for one in made.add(event) if not isinstance(one, Audio)]
    chunks += made.finish()
    found: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            before = found.get(choice["index"], Answer("", [], "", []))
            delta = choice["delta"]
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in delta.get("tool_calls", ())]
            found[choice["index"]] = Answer(
                str(before.content) + (delta.get("content") or ""),
                before.calls + calls,
                choice["finish_reason"] or before.finish,
                before.shown + (choice["logprobs"] or {}).get("content", []),
                reasoning=before.reasoning + delta.get("reasoning_content", ""),
            )
    return [found[index] for index in sorted(found)]

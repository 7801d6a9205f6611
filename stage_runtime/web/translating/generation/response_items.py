"""Events of a request as OpenAI's response: its items, and the events of its stream in OpenAI's order. Pure.

A whole answer is the response in the last event of the stream that would have been sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.reading.responses_body import ResponsesBody
from stage_runtime.web.translating.answer_outputs import Outputs
from stage_runtime.wire.values import Reasoning, Text, ToolCall

Event = dict[str, Any]
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_LIMITED: Final = ("rate_limited", "unavailable")


class _OpenItem:
    """A message, or what the model thinks before one, that is being written."""

    def __init__(self, index: int, id: str, *, thinks: bool) -> None:
        self.index = index
        self.id = id
        self.thinks = thinks
        self.pieces: list[str] = []

    @property
    def name(self) -> str:
        return "reasoning_text" if self.thinks else "output_text"

    def part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.thinks:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self.part()]
        if self.thinks:
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class ResponseEvents:
    """One response. Each event that it yields has the next ``sequence_number``."""

    def __init__(self, body: ResponsesBody, *, request_id: str, model: str, created: int) -> None:
        self._base = _echoed(body, request_id=request_id, model=model, created=created)
        self._id = request_id
        self._outputs = Outputs()
        self._sent = 0
        self._items: dict[int, dict[str, Any]] = {}  #: Those that are done, by place.
        self._count = 0
        self._open: dict[str, _OpenItem] = {}  #: Items by stage: two terminals' words are not mixed.

    def begin(self) -> Iterator[Event]:
        """The events that come before all others."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, event: AnswerEvent) -> Iterator[Event]:
        for shown in self._outputs.take(event):
            match shown:
                case Text() | Reasoning() if shown.text and not shown.choice:
                    yield from self._piece(event.stage, shown.text, thinks=isinstance(shown, Reasoning))
                case ToolCall() if not shown.choice:
                    yield from self._close(event.stage, "completed")
                    yield from self._call(shown)

    def finish(self) -> Iterator[Event]:
        """The last events. Raises: RequestError: stage_failed: the terminals gave nothing that is shown."""
        self._outputs.check("responses")
        reason = _INCOMPLETE.get(self._outputs.reason())
        status = "completed" if reason is None else "incomplete"
        for stage in list(self._open):
            yield from self._close(stage, status)
        details = None if reason is None else {"reason": reason}
        response = self._response(status, incomplete_details=details, usage=self._usage())
        yield self._event(f"response.{status}", response=response)

    def fail(self, error: RequestError) -> Event:
        """The last event of a stream that cannot go on."""
        code = "rate_limit_exceeded" if error.code in _LIMITED else "server_error"
        facts = {"code": code, "message": errors.body(error, self._id)["error"]["message"]}
        return self._event("response.failed", response=self._response("failed", error=facts))

    def _piece(self, stage: str, text: str, *, thinks: bool) -> Iterator[Event]:
        item = self._open.get(stage)
        if item is not None and item.thinks != thinks:
            yield from self._close(stage, "completed")
            item = None
        if item is None:
            item = self._open[stage] = _OpenItem(self._count, self._new_id("rs" if thinks else "msg"), thinks=thinks)
            self._count += 1
            shown = item.item("in_progress", empty=True)
            yield self._event("response.output_item.added", output_index=item.index, item=shown)
            yield self._of(item, "response.content_part.added", part=item.part())
        item.pieces.append(text)
        logprobs: dict[str, Any] = {} if thinks else {"logprobs": []}
        yield self._of(item, f"response.{item.name}.delta", delta=text, **logprobs)

    def _close(self, stage: str, status: str) -> Iterator[Event]:
        item = self._open.pop(stage, None)
        if item is None:
            return
        logprobs: dict[str, Any] = {} if item.thinks else {"logprobs": []}
        yield self._of(item, f"response.{item.name}.done", text="".join(item.pieces), **logprobs)
        yield self._of(item, "response.content_part.done", part=item.part())
        done = self._items[item.index] = item.item(status)
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        index, self._count = self._count, self._count + 1
        facts = {"type": "function_call", "id": self._new_id("fc"), "call_id": call.id, "name": call.name}
        place = {"item_id": facts["id"], "output_index": index}
        begun = {**facts, "arguments": "", "status": "in_progress"}
        done = self._items[index] = {**facts, "arguments": call.arguments, "status": "completed"}
        name = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"{name}.delta", **place, delta=call.arguments)
        yield self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name)
        yield self._event("response.output_item.done", output_index=index, item=done)

    def _of(self, item: _OpenItem, type: str, **fields: Any) -> Event:
        return self._event(type, item_id=item.id, output_index=item.index, content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        self._sent += 1
        return {"type": type, "sequence_number": self._sent - 1, **fields}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{self._count}"

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        output = [self._items[index] for index in sorted(self._items)]
        return {**self._base, "status": status, "output": output, **fields}

    def _usage(self) -> dict[str, Any]:
        found = self._outputs.usage
        return {
            "input_tokens": found.prompt_tokens,
            "input_tokens_details": {"cached_tokens": found.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": found.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": found.reasoning_tokens},
            "total_tokens": found.prompt_tokens + found.completion_tokens,
        }


def _echoed(body: ResponsesBody, *, request_id: str, model: str, created: int) -> dict[str, Any]:
    """The fields that say what was asked for."""
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    reasoning = body.reasoning
    return {
        "id": request_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }

"""One response on its way: what a request's outputs become, in OpenAI's order of events. Pure.

Each begun output is ended, in whichever way the response ends.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any, Final

from stage_runtime.web.realtime import configuration, formats, items
from stage_runtime.web.realtime.configuration import SessionConfig
from stage_runtime.web.realtime.items import Item, Part
from stage_runtime.wire.values import ToolCall, Usage

Event = dict[str, Any]

#: Why an answer ended, where that was not its own end.
_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Response:
    """A response in progress. Each method gives the events that follow, without ids."""

    def __init__(
        self,
        response_id: str,
        config: SessionConfig,
        *,
        conversation_id: str | None,
        metadata: dict[str, str] | None,
        new_id: Callable[[str], str],
        added: Callable[[Item], str | None],
        beta: bool,
    ) -> None:
        """conversation_id: None: apart from it. added: takes an item of the answer, gives the id of the one before."""
        self.id = response_id
        self.config = config
        self.in_conversation = conversation_id is not None
        self._head = {
            "object": "realtime.response",
            "id": response_id,
            "conversation_id": conversation_id,
            "metadata": metadata,
            **configuration.answer_shown(config, beta=beta),
        }
        self._new_id = new_id
        self._added = added
        self._beta = beta
        self._items: list[Item] = []
        self._before: dict[str, str | None] = {}  #: Ids of the items before, by item of the conversation.
        self._message: Item | None = None  #: The one that is open.
        self.whole = False  #: All of its sound has come.

    def shown(
        self, status: str, *, details: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        output = [items.shown(item, beta=self._beta) for item in self._items]
        return {**self._head, "status": status, "status_details": details, "output": output, "usage": usage}

    def text(self, text: str) -> Iterator[Event]:
        """A piece of text: the answer, or what its sound says."""
        if not text:
            return
        yield from self._open()
        part = self._part()
        part.text += text
        name = "output_audio_transcript" if part.type == "output_audio" else "output_text"
        yield self._of_part(f"response.{name}.delta", delta=text)

    def sound(self, data: bytes) -> Iterator[Event]:
        """Encoded sound."""
        if not data:
            return
        yield from self._open()
        part = self._part()
        part.audio_ms += len(data) / formats.FORMATS[self.config.output_format].bytes_per_ms
        yield self._of_part("response.output_audio.delta", delta=base64.b64encode(data).decode())

    def call(self, call: ToolCall) -> Iterator[Event]:
        """A call of a function, whole."""
        yield from self._close("completed")
        item = Item(
            id=self._new_id("item"), type="function_call", status="in_progress", call_id=call.id, name=call.name
        )
        yield from self._begin(item)
        place = {"response_id": self.id, "item_id": item.id, "output_index": len(self._items) - 1}
        named = {"call_id": call.id, "name": call.name}
        yield {
            "type": "response.function_call_arguments.delta",
            **place,
            "call_id": call.id,
            "delta": call.arguments,
        }
        item.arguments = call.arguments
        yield {"type": "response.function_call_arguments.done", **place, **named, "arguments": call.arguments}
        yield from self._end(item, "completed")

    def complete(self, usage: Usage, reason: str) -> Iterator[Event]:
        """The request has ended well. reason: as chat's ``finish_reason``."""
        cut = _REASONS.get(reason)
        self.whole = True
        yield from self._close("completed" if cut is None else "incomplete")
        status = "completed" if cut is None else "incomplete"
        details = None if cut is None else {"type": status, "reason": cut}
        yield {"type": "response.done", "response": self.shown(status, details=details, usage=usage_shown(usage))}

    def cancel(self, reason: str) -> Iterator[Event]:
        """reason: ``turn_detected`` or ``client_cancelled``."""
        yield from self._close("incomplete")
        details = {"type": "cancelled", "reason": reason}
        yield {
            "type": "response.done",
            "response": self.shown("cancelled", details=details, usage=usage_shown(Usage())),
        }

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("incomplete")
        details = {"type": "failed", "error": error}
        yield {"type": "response.done", "response": self.shown("failed", details=details)}

    def _part(self) -> Part:
        assert self._message is not None
        return self._message.content[0]

    def _open(self) -> Iterator[Event]:
        if self._message is not None:
            return
        type: Any = "output_audio" if "audio" in self.config.modalities else "output_text"
        item = Item(id=self._new_id("item"), type="message", status="in_progress", role="assistant")
        yield from self._begin(item)
        item.content = [Part(type, transcribed=True)]
        self._message = item
        yield self._of_part("response.content_part.added", part=self._part_shown(""))

    def _close(self, status: Any) -> Iterator[Event]:
        """End the open message, if there is one."""
        item = self._message
        if item is None:
            return
        part = self._part()
        if part.type == "output_audio":
            yield self._of_part("response.output_audio.done")
            yield self._of_part("response.output_audio_transcript.done", transcript=part.text)
        else:
            yield self._of_part("response.output_text.done", text=part.text)
        yield self._of_part("response.content_part.done", part=self._part_shown(part.text))
        self._message = None
        yield from self._end(item, status)

    def _begin(self, item: Item) -> Iterator[Event]:
        self._items.append(item)
        place = {"response_id": self.id, "output_index": len(self._items) - 1}
        yield {"type": "response.output_item.added", **place, "item": items.shown(item, beta=self._beta)}
        if self.in_conversation:
            before = self._before[item.id] = self._added(item)
            shown = items.shown(item, beta=self._beta)
            yield {"type": "conversation.item.added", "previous_item_id": before, "item": shown}

    def _end(self, item: Item, status: Any) -> Iterator[Event]:
        item.status = status
        shown = items.shown(item, beta=self._beta)
        place = {"response_id": self.id, "output_index": self._items.index(item)}
        yield {"type": "response.output_item.done", **place, "item": shown}
        if self.in_conversation:
            yield {"type": "conversation.item.done", "previous_item_id": self._before[item.id], "item": shown}

    def _of_part(self, type: str, **fields: Any) -> Event:
        assert self._message is not None
        place = {"response_id": self.id, "item_id": self._message.id, "output_index": self._items.index(self._message)}
        return {"type": type, **place, "content_index": 0, **fields}

    def _part_shown(self, text: str) -> dict[str, Any]:
        spoken = self._part().type == "output_audio"
        return {"type": "audio", "transcript": text} if spoken else {"type": "text", "text": text}


def usage_shown(usage: Usage) -> dict[str, Any]:
    asked, said = usage.prompt_tokens, usage.completion_tokens
    heard, spoken = usage.prompt_audio_tokens, usage.completion_audio_tokens
    return {
        "total_tokens": asked + said,
        "input_tokens": asked,
        "output_tokens": said,
        "input_token_details": {
            "cached_tokens": usage.cached_tokens,
            "text_tokens": max(0, asked - heard - usage.prompt_image_tokens),
            "audio_tokens": heard,
            "image_tokens": usage.prompt_image_tokens,
        },
        "output_token_details": {"text_tokens": max(0, said - spoken), "audio_tokens": spoken},
    }

"""The outputs of terminal stages for a client, sorted: the common half of chat, speech and transcription.

A result's `Text` or `Audio` is the whole: it is dropped if its stage has streamed any of that kind. A `ToolCall` is
dropped if its stage has streamed one of that id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.events import AnswerEvent, ChunkEvent
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Audio, Finish, Note, Reasoning, Text, ToolCall, Usage

Shown = Text | Reasoning | Audio | Note | ToolCall
_OUTPUTS = (Text, Reasoning, Audio, Usage, Finish, Note, ToolCall)


class StreamedKinds:
    """The kinds of output that each stage has streamed: its result has them again as a whole."""

    def __init__(self) -> None:
        self._streamed: set[tuple[str, type[Any]]] = set()

    def repeats(self, event: AnswerEvent, kind: type[Any]) -> bool:
        """Whether an output of this kind in ``event`` was streamed before. Call it for each, in order."""
        if isinstance(event, ChunkEvent):
            self._streamed.add((event.stage, kind))
            return False
        return (event.stage, kind) in self._streamed


class Outputs:
    """Takes a request's events in order; adds up what is only known at the end."""

    def __init__(self) -> None:
        self._counts = TokenCounts()
        self.reasons: dict[int, str] = {}  #: Reasons by choice.
        self._streamed = StreamedKinds()
        self._calls: dict[int, int] = {}  #: How many calls of tools a choice has.
        self._streamed_calls: set[tuple[str, int, str]] = set()  #: (stage, choice, id)
        self._known = False  #: Any of the client outputs was seen.
        self._unknown: tuple[str, str] | None = None  #: The first (stage, type) that no OpenAI route can show.

    def take(self, event: AnswerEvent) -> Iterator[Shown]:
        """The parts of the event for the client's eyes and ears, in order."""
        self._counts.note(event)
        for value in _values(event):
            if not isinstance(value, _OUTPUTS):
                self._unknown = self._unknown or (event.stage, type(value).__name__)
                continue
            self._known = True
            match value:
                case Usage():
                    self._counts.add(event.stage, value)
                case Finish():
                    # a request cut short anywhere was cut short
                    if self.reasons.get(value.choice) in (None, "stop"):
                        self.reasons[value.choice] = value.reason
                case Text() | Reasoning() | Audio() if self._streamed.repeats(event, type(value)):
                    pass
                case ToolCall():
                    yield from self._call(event, value)
                case _:
                    yield value

    def only_text(self, event: AnswerEvent) -> Text | None:
        """The event's output, which is taken with it, if that is one streamed `Text`: nearly all events of a chat are.

        None: it is something else, or more, and is not taken.
        """
        data = event.data
        value = data[0] if type(data) is list and len(data) == 1 else data
        if type(value) is not Text or type(event) is not ChunkEvent:
            return None
        self._counts.note(event)
        self._known = True
        self._streamed.repeats(event, Text)
        return value

    @property
    def usage(self) -> Usage:
        """Zeros when no terminal gave one."""
        return self._counts.total

    def reason(self, choice: int = 0) -> str:
        """Why a choice ended. One with calls of tools waits for them, unless a stage gave another reason."""
        return self.reasons.get(choice, "tool_calls" if choice in self._calls else "stop")

    def _call(self, event: AnswerEvent, call: ToolCall) -> Iterator[ToolCall]:
        """The call, unless it is a streamed one again. Its place is by order: several stages may have a first one."""
        key = (event.stage, call.choice, call.id)
        if isinstance(event, ChunkEvent):
            self._streamed_calls.add(key)
        elif key in self._streamed_calls:
            return
        place = self._calls.get(call.choice, 0)
        self._calls[call.choice] = place + 1
        yield msgspec.structs.replace(call, index=place)

    def tokens(self) -> dict[str, int]:
        """The counts of tokens, as OpenAI's audio routes name them."""
        usage = self.usage
        total = usage.prompt_tokens + usage.completion_tokens
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, "total_tokens": total}

    def check(self, route: str) -> None:
        """Called at the end: it is the pipeline's fault if its terminals gave nothing that this route can show.

        Raises: RequestError: stage_failed, naming the stage and what it gave.
        """
        if self._unknown is None or self._known:
            return
        stage, kind = self._unknown
        raise RequestError(
            "stage_failed",
            f"stage {stage!r} sent the client a {kind}: {route} shows omni.Text, omni.Audio, omni.Usage, omni.Finish "
            "and omni.Note; other values reach clients by /v1/pipeline",
            stage=stage,
        )


def no_sound() -> RequestError:
    """The pipeline's fault, too: sound was all that the client asked for."""
    return RequestError("stage_failed", "no terminal stage gave an omni.Audio")


def _values(event: AnswerEvent) -> list[Any]:
    if event.data is None:
        return []
    return event.data if isinstance(event.data, list) else [event.data]

"""Prompts that grow by the chunks of upstream stages: each chunk becomes token ids or rows, in order of arrival.

A request begins with its first message. Its tokens are computed as they come; its answer begins when all its streams
have ended. The engine's side is `scheduling.Scheduler.extend`. Used by stages with ``stream``, on their thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from stage_runtime.api import Feed, Prompt
from stage_runtime.engines import events, streaming
from stage_runtime.engines.autoregressive.stage.answers import Entered, GenerationAnswers
from stage_runtime.engines.autoregressive.text.prompts import prompting
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import AddedRows, Extension
from stage_runtime.engines.base import Outbox, Work
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Chunk, OmniRequest, StagePayload

FromStream: TypeAlias = events.Start | events.ChunkIn | events.StreamDone | events.StreamFailed | events.NoPayload


class Grown(NamedTuple):
    """One of the engine's requests, by its name, has more of its prompt."""

    name: str
    more: Extension


class _Streams:
    """The streams of one request."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.open = set(sources)  #: Sources that may still send.
        self.request: OmniRequest | None = None
        self.begun = False  #: The engine has it.
        self.whole = False  #: The engine knows that nothing more comes.
        self.parts: list[Extension] = []  #: Extensions that came before the engine had it.


def extensions(given: Any) -> list[Extension]:
    """The extensions that an author's ``stream`` returned for a chunk. Raises: InvalidRequest, TypeError: it is
    something else.
    """
    match given:
        case None:
            return []
        case Feed():
            return [Extension(feed=given)]
        case Prompt():
            if given.parts is None:
                raise TypeError("stream: a Prompt must have parts: token ids and rows")
            tokens, embeds = prompting.joined(given.parts)
            return [
                Extension(
                    prompt_token_ids=tokens,
                    prompt_embeds=embeds,
                    prompt_positions=given.positions,
                    position_delta=given.position_delta,
                    added_rows=[AddedRows(*one) for one in given.added_rows],
                )
            ]
        case list() | tuple() if any(not isinstance(one, int) for one in given):
            return [made for one in given for made in extensions(one)]
    tokens, embeds = prompting.joined([given])
    return [Extension(prompt_token_ids=tokens, prompt_embeds=embeds)]


class GrowingPrompts:
    """All requests of the stage that have not ended."""

    def __init__(self, stream: Callable[[Chunk], Any], sources: Sequence[str], answers: GenerationAnswers) -> None:
        self._stream = stream
        self._sources = tuple(sources)
        self._answers = answers
        self._streams: dict[Work, _Streams] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def forget(self, work: Work) -> None:
        self._streams.pop(work, None)

    def close(self, outbox: Outbox) -> None:
        """No more events come: requests whose streams have not ended never will. Idempotent."""
        for work, streams in list(self._streams.items()):
            if not streams.whole and not work.over:
                self._fail(work, outbox, RequestError("unavailable", "the stage ends before the request's streams"))

    def take(self, event: FromStream, outbox: Outbox) -> list[Entered | Grown]:
        """The extensions that the engine gets. A fault of a chunk fails its request alone."""
        work = event.work
        if isinstance(event, events.StreamFailed):
            self._fail(work, outbox, streaming.cause(event))
            return []
        streams = self._of(work)
        if streams.whole:
            return []
        try:
            self._note(streams, event)
            if isinstance(event, events.ChunkIn):
                outbox.consumed(work, event.chunk.source, 1)
            return self._growth(work, streams)
        except BaseException as error:  # SystemExit too: one request's code must not end the engine
            self._fail(work, outbox, error)
            return []

    def _of(self, work: Work) -> _Streams:
        found = self._streams.get(work)
        if found is None:
            for other in [one for one in self._streams if one.over]:
                del self._streams[other]
            found = self._streams[work] = _Streams(self._sources)
        return found

    def _note(self, streams: _Streams, event: FromStream) -> None:
        match event:
            case events.Start():
                streams.request = streams.request or event.payload.request
            case events.ChunkIn():
                streams.request = streams.request or event.chunk.request
                streams.parts += extensions(self._stream(event.chunk))
            case events.StreamDone():
                streams.request = streams.request or event.request
                streams.open.discard(event.source)

    def _growth(self, work: Work, streams: _Streams) -> list[Entered | Grown]:
        inputs: list[Entered | Grown] = []
        if not streams.begun and streams.request is not None:
            inputs += self._answers.start(work, StagePayload(request=streams.request, data=None), open=True)
            streams.begun = bool(inputs)
            if not inputs:  # it has failed
                self.forget(work)
                return []
        if not streams.begun:
            return []
        parts, streams.parts = streams.parts, []
        for part in parts:
            inputs += self._grown(work, part)
        if not streams.open:
            inputs += self._grown(work, Extension(last=True))
            streams.whole = True
        return inputs

    def _grown(self, work: Work, more: Extension) -> list[Grown]:
        return [Grown(name, more) for name in self._answers.extended(work, len(more.prompt_token_ids))]

    def _fail(self, work: Work, outbox: Outbox, error: BaseException) -> None:
        self.forget(work)
        if self._answers.names(work):
            self._answers.give_up(work, error)
        else:
            outbox.fail(work, error)

"""The client's reports of a generation, whatever the author's ``deliver`` gives: usage and reason.

Chunks for the client carry the tokens so far (`wire.outputs.USAGE_SO_FAR`): a stream may be cancelled, or its client
may want them. An author's ``deliver`` that has given no `Usage` or no `Finish` is completed at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.api import Generation
from stage_runtime.wire import outputs
from stage_runtime.wire.values import Chunk, Finish, Result, Usage


class ClientReport:
    """The reports of one request."""

    def __init__(self, *, completes: bool) -> None:
        """completes: what is missing at the end is added."""
        self._completes = completes
        self._tokens: dict[int, int] = {}  #: Tokens of the answer, by choice.
        self._thought: dict[int, int] = {}  #: Tokens of thinking, by choice.
        self._reasons: dict[int, str] = {}  #: The reason of the end, by choice.
        self._has_usage = False  #: ``deliver`` has given one.
        self._finished: set[int] = set()  #: Choices of which it has given the reason.

    def added_to(self, items: Iterable[Any], generation: Generation) -> Iterator[Any]:
        """The output of ``deliver`` for one generation, and the rest."""
        self._tokens[generation.choice] = generation.completion_tokens
        self._thought[generation.choice] = generation.reasoning_tokens
        if generation.finish is not None:
            self._reasons[generation.choice] = generation.finish
        answered, thought = sum(self._tokens.values()), sum(self._thought.values())
        usage = Usage(generation.prompt_tokens, answered, generation.cached_tokens, reasoning_tokens=thought)
        result: Result | None = None
        for item in items:
            if result is not None:  # something after a result, which the reader refuses
                yield result
                result = None
            if isinstance(item, Result):
                self._see(item.data)
                result = item
            else:
                yield self._carrying(item, usage)
        if generation.ends and self._completes and (rest := self._missing(usage)):
            yield Chunk(rest, to=COORDINATOR)
        if result is not None:
            yield result

    def _carrying(self, item: Any, usage: Usage) -> Any:
        if isinstance(item, Chunk) and outputs.shows(item.data):
            self._see(item.data)
            counts = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
            if item.metadata is None or type(item.metadata) is dict:  # else it is refused where it is sent
                item.metadata = {**(item.metadata or {}), outputs.USAGE_SO_FAR: counts}
        return item

    def _see(self, data: Any) -> None:
        for value in data if type(data) is list else [data]:
            if isinstance(value, Usage):
                self._has_usage = True
            elif isinstance(value, Finish):
                self._finished.add(value.choice)

    def _missing(self, usage: Usage) -> list[Any]:
        reasons = sorted(self._reasons.items())
        given: list[Any] = [] if self._has_usage else [usage]
        return given + [Finish(reason, choice) for choice, reason in reasons if choice not in self._finished]

"""The proposer of drafts, where steps are computed; and the rows of a step with their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from stage_runtime.engines.autoregressive.sampling.sampler import RowState
from stage_runtime.engines.autoregressive.speculation.settings import Speculation
from stage_runtime.rules.autoregressive.prompt_lookup import PromptLookup
from stage_runtime.rules.autoregressive.steps import Row


class Proposer(Protocol):
    """Called in the thread that computes steps, with rows as they are computed."""

    def add(self, request_id: str, state: RowState) -> None:
        """Rows of this request will come. state: its sampler's, which is not changed."""

    def propose(self, rows: Sequence[Row]) -> Mapping[str, Sequence[int]]:
        """Drafts by request id, each of at most `Row.spare` tokens. rows: all of a step, before it is computed."""

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        """A step has given a request these tokens."""

    def drop(self, request_id: str) -> None:
        """It has ended. One that is not known is not a fault."""


class NgramProposer:
    """Drafts from the tokens of the request itself."""

    def __init__(self, settings: Speculation) -> None:
        self._settings = settings
        self._known: dict[str, PromptLookup] = {}

    def add(self, request_id: str, state: RowState) -> None: ...

    def propose(self, rows: Sequence[Row]) -> Mapping[str, Sequence[int]]:
        return {row.request.id: self._known[row.request.id].draft(row.spare) for row in rows if row.spare}

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        request = row.request
        if not request.speculates:
            return
        if not row.place:
            settings = self._settings
            known = self._known[request.id] = PromptLookup(settings.prompt_lookup_max, settings.prompt_lookup_min)
            known.add(request.tokens[: request.prompt_tokens])
        self._known[request.id].add(tokens)

    def drop(self, request_id: str) -> None:
        self._known.pop(request_id, None)


class StepDrafts:
    """The drafts of the step that is being computed. Empty without a proposer."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer
        self._of: dict[str, Sequence[int]] = {}
        self._accepted: dict[str, int] = {}  #: Tokens of a request's drafts that were right.

    def add(self, request_id: str, state: RowState) -> None:
        """Its id may be that of a request whose end was not noticed."""
        if self._proposer is not None:
            self._accepted.pop(request_id, None)
            self._proposer.add(request_id, state)

    def begin(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of a step where the tokens known by now place them, with their drafts' tokens counted."""
        if self._proposer is None:
            return rows
        placed = [self._placed(row) for row in rows]
        self._of = {name: draft for name, draft in self._proposer.propose(placed).items() if draft}
        return [_longer(row, len(self.of(row))) for row in placed] if self._of else placed

    def _placed(self, row: Row) -> Row:
        later = self._accepted.get(row.request.id, 0) - row.accepted
        if not later:
            return row
        return msgspec.structs.replace(row, start=row.start + later, place=row.place + later)

    def of(self, row: Row) -> Sequence[int]:
        return self._of.get(row.request.id, ()) if self._of else ()

    def take(self, row: Row, accepted: Sequence[int], token: int) -> None:
        """A step has given a request these tokens of its draft, and one after them."""
        if self._proposer is None:
            return
        if accepted:
            self._accepted[row.request.id] = self._accepted.get(row.request.id, 0) + len(accepted)
        self._proposer.take(row, [*accepted, token])

    def drop(self, request_id: str) -> None:
        if self._proposer is not None:
            self._accepted.pop(request_id, None)
            self._proposer.drop(request_id)


def _longer(row: Row, tokens: int) -> Row:
    return msgspec.structs.replace(row, count=row.count + tokens) if tokens else row

"""A smaller model that guesses the next tokens of requests: a `Proposer`.

Its keys and values lie in blocks of the same numbers as the model's, in pages of its own: what shares a prefix, or
comes from another engine, has both. A hole in them costs right guesses and no answer, for each guess is verified.
Called by `ModelRunner`, in its thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.models import FlatBatch, PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import AttentionBackend, BatchMeta
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import Page
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, guess
from stage_runtime.errors import describe
from stage_runtime.rules.autoregressive.steps import Row

log = logging.getLogger(__name__)

CATCH_UP: Final = 64  # tokens of one request in a step: as many as a few drafts cost


class Part(NamedTuple):
    """Tokens of one request, from ``start`` on, in its blocks."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class _Known:
    """One request, as far as the draft model has computed it."""

    def __init__(self, state: RowState) -> None:
        self.state = state
        self.answer: list[int] = []  #: Its generated tokens: the scheduler may not have them yet.
        self.done = 0  #: Tokens whose keys and values are written, or were found with their blocks.
        self.next = -1  #: The position where its next row begins, unless it is computed again.
        self.drafted = 0  #: Tokens of its last draft.

    def tokens(self, row: Row, start: int, end: int) -> list[int]:
        prompt, request = row.request.prompt_tokens, row.request
        answer = self.answer[max(start - prompt, 0) : max(end - prompt, 0)]
        return [*request.tokens[start : min(end, prompt)], *answer]


class _Asked(NamedTuple):
    row: Row
    known: _Known
    part: Part
    most: int  #: Tokens of its draft.


class DraftModel:
    """`Proposer`."""

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        catch_up: int = CATCH_UP,
    ) -> None:
        """vocab_size: of the model whose tokens are guessed; what only one of both has is padding."""
        self.model = model
        self._backend = backend
        self._block_size = block_size
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._catch_up = catch_up
        self._known: dict[str, _Known] = {}
        self._failed = False
        backend.alloc(model.layers, num_blocks, block_size, model.dtype, str(model.device))

    def regions(self) -> Sequence[Page]:
        """Its keys and values, which cross with those of the model. They have no heads that ranks could share."""
        return [Page(f"draft.{one.name}", one.values.flatten(2)) for one in self._backend.regions()]

    def warm_up(self) -> None:
        """A pass over padding."""
        with torch.inference_mode():
            self._compute([Part([0], 0, [0])])
            self._backend.clear([0])

    def add(self, request_id: str, state: RowState) -> None:
        self._known[request_id] = _Known(state)

    def drop(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        known, right = self._known[row.request.id], len(tokens) - 1
        known.answer += tokens
        known.next += right
        known.done += min(right, max(known.drafted - 1, 0))  # nothing follows a draft's last token
        known.drafted = 0

    def propose(self, rows: Sequence[Row]) -> Mapping[str, Sequence[int]]:
        if self._failed:
            return {}
        try:
            with torch.inference_mode():
                return self._propose([one for one in map(self._asked, rows) if one is not None])
        except Exception as error:
            self._failed = True  # answers need no drafts
            log.exception("the draft model has failed, and makes no more drafts: %s", describe(error))
            return {}

    def _asked(self, row: Row) -> _Asked | None:
        """The part of a row's request that is to be computed now, if any is."""
        request, end = row.request, row.start + row.count
        known = self._known[request.id]
        if row.start != known.next:  # its first row, or computed again: what lies before was found in the cache
            known.done = row.start
        known.next, known.drafted = end, 0
        if not request.speculates or request.rows is not None or end > self.model.positions:
            return None
        if not (row.spare or row.count > 1 or end <= request.prompt_tokens):
            return None  # its token is computed with the next draft
        start, most = known.done, max(row.count, self._catch_up)
        stop = min(end, start + most)
        spare = min(row.spare, self.model.positions - end) if stop == end else 0
        return _Asked(row, known, Part(known.tokens(row, start, stop), start, row.blocks), spare)

    def _propose(self, asked: Sequence[_Asked]) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = {}
        if not asked:
            return found
        logits = self._compute([one.part for one in asked])
        for one in asked:
            one.known.done = one.part.start + len(one.part.tokens)
        going = [(index, one) for index, one in enumerate(asked) if one.most]
        while going:
            places = [one.row.place + one.known.drafted for _index, one in going]
            states = [one.known.state for _index, one in going]
            tokens = guess(logits[[index for index, _one in going], : self._vocab_size], states, places)
            following = []
            for (_index, one), place, token in zip(going, places, tokens, strict=True):
                if token is None:
                    self._backend.clear(one.row.blocks)  # or what is not finite would stay in what others share
                    continue
                found.setdefault(one.row.request.id, []).append(token)
                one.known.drafted += 1
                if one.known.drafted < one.most and one.row.request.ends_by(token, place) is None:
                    end = one.row.start + one.row.count + one.known.drafted - 1
                    following.append((Part([token], end, one.row.blocks), one))
            if following:
                logits = self._compute([part for part, _one in following])
            going = [(index, one) for index, (_part, one) in enumerate(following)]
        return found

    def _compute(self, parts: Sequence[Part]) -> Tensor:
        """The logits after each part's last token, ``[parts, vocabulary]`` f32; the cache is written."""
        size, device = self._block_size, self.model.device
        ends = [part.start + len(part.tokens) for part in parts]
        starts = [0, *accumulate(len(part.tokens) for part in parts)]
        places = [at for part, end in zip(parts, ends, strict=True) for at in range(part.start, end)]
        slots = [
            part.blocks[at // size] * size + at % size
            for part, end in zip(parts, ends, strict=True)
            for at in range(part.start, end)
        ]
        tables = [list(part.blocks[: -(-end // size)]) for part, end in zip(parts, ends, strict=True)]
        meta = BatchMeta(starts, [part.start for part in parts], tables, torch.tensor(slots, device=device))
        positions = torch.tensor(places, device=device)
        flat = FlatBatch(
            ids=torch.tensor([token for part in parts for token in part.tokens], device=device),
            positions=positions if self.model.axes == 1 else positions.expand(self.model.axes, -1),
            rows=torch.tensor([end - 1 for end in starts[1:]], device=device),
        )
        return self.model.forward(self._backend, self._backend.plan(meta), flat).logits

"""A step's rows as one flat batch on the host: ids, positions, slots of the cache, given rows, and what is asked for.

Called by `ModelRunner`, which computes a `Pass` on its device; ranks of a tensor-parallel engine get the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.rows.kept_rows import OwnRows
from stage_runtime.engines.autoregressive.sampling.sampler import RowState
from stage_runtime.engines.autoregressive.speculation.proposing import StepDrafts
from stage_runtime.rules.autoregressive.steps import Row


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One pass over a flat batch, on the host. tables: blocks of each row. last: each row's last token.

    positions: of each token, on one axis after the other. places: tokens that are given as ``embeddings``, the bytes
    of ``[places, hidden]`` in the model's dtype. added: layer, places, and bytes as those. hidden: the last hidden rows
    are wanted, too. names: of the rows' requests. adapters: of each row its adapter's number, 0: none; empty: no row
    has one. See `attention.BatchMeta`.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]
    computed: list[int]
    tables: list[list[int]]
    last: list[int]
    places: list[int] = []
    embeddings: bytes = b""
    hidden: bool = False
    added: list[tuple[int, list[int], bytes]] = []
    names: list[str] = []
    adapters: list[int] = []


class BatchBuilder:
    """Makes the passes of one runner."""

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        states: Mapping[str, RowState],
        drafts: StepDrafts,
        own: Mapping[str, OwnRows],
    ) -> None:
        """states, own: the runner's, by request id. drafts: of the step that is begun."""
        self._model = model
        self._block_size = block_size
        self._states = states
        self._drafts = drafts
        self._own = own

    def build(self, rows: Sequence[Row]) -> Pass:
        """The pass of these rows. Its logits: of each row's last token, then of the prompts' tokens whose probabilities
        are asked for, then of drafts.

        NaN anywhere in a row reaches its last token, so a prompt's chunk is checked, too.
        """
        ids: list[int] = []
        positions: list[list[int]] = [[] for _axis in range(self._model.axes)]
        slots: list[int] = []
        starts, last, tables = [0], [], []
        places: list[int] = []
        embeddings: list[bytes] = []
        size = self._block_size
        added: list[tuple[int, list[int], bytes]] = []
        for row in rows:
            request, end, offset = row.request, row.start + row.count, starts[-1] - row.start
            draft = self._drafts.of(row)
            ids += request.tokens[row.start : end - row.unknown - len(draft)]
            ids += [self._states[request.id].last] * row.unknown
            ids += draft
            if request.rows is not None:
                for at, some in self._inputs(row):
                    places += range(offset + at, offset + at + len(some))
                    embeddings.append(_bytes(some))
                for layer, chosen, some in request.rows.added(row.start, end):
                    added.append((layer, [offset + at for at in chosen], _bytes(some)))
            for axis, of_axis in enumerate(self._positions(row)):
                positions[axis] += of_axis
            blocks = row.blocks[: -(-end // size)]  # more may be added for the next step meanwhile
            slots += [blocks[at // size] * size + at % size for at in range(row.start, end)]
            starts.append(len(ids))
            tables.append(blocks)
            last.append(len(ids) - 1 - len(draft))
        last += [at for row, first in zip(rows, starts, strict=False) for at in self.asked(row, first)]
        last += [
            at for row, end in zip(rows, starts[1:], strict=True) for at in range(end - len(self._drafts.of(row)), end)
        ]
        for at in places:
            ids[at] = 0  # a row's name is not a token
        sampling = [self._states[row.request.id].params for row in rows if row.samples]
        hidden = bool(sampling) and (
            self._model.after_step is not None or any(params.hidden_rows for params in sampling)
        )
        computed = [row.start for row in rows]
        where = [at for axis in positions for at in axis]
        names = [row.request.id for row in rows]
        numbers = [0 if row.request.adapter is None else row.request.adapter.number for row in rows]
        adapters = numbers if any(numbers) else []
        rest = b"".join(embeddings), hidden, added, names, adapters
        return Pass(ids, where, slots, starts, computed, tables, last, places, *rest)

    def _inputs(self, row: Row) -> list[tuple[int, Tensor]]:
        """Rows in place of the token ids of one request in a step, each with the position of its first one."""
        request, end = row.request, row.start + row.count
        found: list[tuple[int, Tensor]] = request.rows.within(row.start, min(end, request.prompt_tokens))
        own = self._own.get(request.id)
        if own is None:
            return found
        for at in range(max(row.start, request.prompt_tokens), end):
            place = at - request.prompt_tokens
            fed = request.rows.fed_row(place)
            found.append((at, (own.rows[place] if fed is None else own.rows[place] + fed)[None]))
        return found

    def _positions(self, row: Row) -> Sequence[Sequence[int]]:
        """The positions of one request's tokens in a step, on each axis."""
        end = row.start + row.count
        if self._model.axes > 1 and row.request.rows is not None:
            found: list[list[int]] = row.request.rows.positions(row.start, end)
            return found
        return [range(row.start, end)] * self._model.axes

    def asked(self, row: Row, first: int) -> range:
        """Tokens of a row, at ``first`` of the flat batch, from which the prompt's next one is predicted."""
        state = self._states[row.request.id]
        if state.params.prompt_logprobs is None:
            return range(0)
        skipped = max(len(state.prompt_logprobs) - row.start, 0)  # known from before a preemption
        count = min(row.start + row.count, row.request.prompt_tokens - 1) - row.start
        return range(first + skipped, first + max(count, skipped))


def _bytes(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()

"""Carries out one step: the scheduler's rows as a flat batch through the model, then sampling.

An error in a pass is met by one pass for each row, so that only the requests that cause it fail.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stage_runtime.api import NextRows, Step
from stage_runtime.engines.autoregressive.model.attention import AttentionBackend, BatchMeta
from stage_runtime.engines.autoregressive.model.block_pages import BlockPages
from stage_runtime.engines.autoregressive.model.kept_rows import KeptRows, OwnRows
from stage_runtime.engines.autoregressive.model.models import Computed, FlatBatch, PagedModel
from stage_runtime.engines.autoregressive.model.states import StateSlots
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, ModelOutput, VerifiedDraft
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, Sampled, reports, sample, uniforms
from stage_runtime.engines.autoregressive.speculation.proposing import Proposer, StepDrafts
from stage_runtime.engines.autoregressive.speculation.verifying import Drafted, verify
from stage_runtime.errors import describe
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput

log = logging.getLogger(__name__)

Masks: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]

NAN = "the model's logits are not finite"


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One pass over a flat batch, on the host. tables: blocks of each row. last: each row's last token.

    positions: of each token, on one axis after the other. places: tokens that are given as ``embeddings``, the bytes
    of ``[places, hidden]`` in the model's dtype. added: layer, places, and bytes as those. hidden: the last hidden rows
    are wanted, too. names: of the rows' requests. See `attention.BatchMeta`.
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


class ModelRunner:
    """One model on one device, with its KV cache. Every call on one thread at a time."""

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        kept: KeptRows | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """kept: rows of layers that are given out; None: none are. proposer: makes drafts of next tokens."""
        self.model = model
        self._kept = kept
        self._backend = backend
        self._block_size = block_size
        self._rows: dict[str, RowState] = {}
        self._own: dict[str, OwnRows] = {}  #: Of requests whose decoder makes their next rows.
        self._drafts = StepDrafts(proposer)
        self._states = StateSlots() if model.state_layers else None
        self._held: tuple[Sequence[Row], Computed | None] = ((), None)  #: A pass whose tokens are not chosen yet.
        backend.alloc(model.layers, num_blocks, block_size, model.dtype, str(model.device))
        self.pages = BlockPages((*backend.regions(), *(() if kept is None else kept.regions())))

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        """A request whose rows will come."""
        self.keep(request_id, self.state_of(params, prompt))

    def state_of(self, params: SamplingParams, prompt: Sequence[int]) -> RowState:
        """For `keep`. In any thread."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(7), "little")
        return RowState(params, seed, self.model.end_ids, prompt)

    def keep(self, request_id: str, state: RowState) -> None:
        """As `add`."""
        self._rows[request_id] = state
        if self.model.after_step is not None:
            self._own[request_id] = OwnRows()

    def execute_model(self, step: SchedulerOutput, hold: bool = False) -> ModelOutput:
        """Never raises for what a request does: that request is among ``failed``.

        hold: only the pass; `sample_tokens` gives the output.
        """
        for request_id in step.finished:
            self._rows.pop(request_id, None)
            self._own.pop(request_id, None)
            self._drafts.drop(request_id)
            if self._states is not None:
                self._states.drop(request_id)
        output = _nothing()
        # Scheduled before the last token of a request was known: what that ends is not computed further.
        rows = self._drafts.begin([row for row in step.rows if not self._rows[row.request.id].over])
        if hold:
            self._held = (rows, self._tried(rows) if rows else None)
        elif rows:
            self._execute(rows, output, {})
            self._note_tokens(rows, output)
        return output

    def sample_tokens(self, masks: Masks) -> ModelOutput:
        """The output of the pass that was held. masks: request id -> which tokens it may get."""
        (rows, computed), self._held = self._held, ((), None)
        output = _nothing()
        if rows:
            self._execute(rows, output, masks, computed)
            self._note_tokens(rows, output)
        return output

    def _note_tokens(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """The next step's rows may have been scheduled before these tokens were known."""
        for row in rows:
            state, token = self._rows[row.request.id], output.sampled.get(row.request.id)
            if row.request.id in output.failed or row.request.id in output.ended:
                state.over = True
            elif token is not None:
                accepted = output.drafts[row.request.id].accepted if row.request.id in output.drafts else ()
                state.last = token
                state.over = row.request.ends_by(token, row.place + len(accepted)) is not None
                self._drafts.take(row, accepted, token)

    def _tried(self, rows: Sequence[Row]) -> Computed | None:
        """None: the pass has failed; it is computed again, and then row by row."""
        try:
            with torch.inference_mode():
                return self._forward(rows)
        except Exception as error:
            log.warning("a step of %d requests failed: %s", len(rows), describe(error))
            return None

    def execute_dummy_batch(self, tokens: int = 1) -> None:
        """A pass over padding: for a rank in lockstep that has nothing to compute, and to warm up."""
        count = max(min(tokens, self.model.positions), 1)
        blocks = [0] * -(-count // self._block_size)
        with torch.inference_mode():
            places = [*range(count)] * self.model.axes
            self.compute(Pass([0] * count, places, [0] * count, [0, count], [0], [blocks], [count - 1]))
            self.clear([0])

    def compute(self, batch: Pass) -> Computed:
        """Compute the logits of the rows' last tokens and write the cache."""
        device = self.model.device
        meta = BatchMeta(batch.starts, batch.computed, batch.tables, torch.tensor(batch.slots, device=device))
        return self._compute(batch, self._backend.plan(meta))

    def _compute(self, batch: Pass, plan: Any) -> Computed:
        device = self.model.device
        ids, positions, last = (torch.tensor(one, device=device) for one in (batch.ids, batch.positions, batch.last))
        keep = () if self._kept is None else self._kept.layers
        flat = FlatBatch(
            ids=ids,
            positions=positions if self.model.axes == 1 else positions.view(self.model.axes, -1),
            rows=last,
            embeddings=self._given(batch.places, batch.embeddings) if batch.places else None,
            added=[(layer, *self._given(places, rows)) for layer, places, rows in batch.added],
            hidden=batch.hidden,
            keep=keep,
        )
        if self._states is None:
            computed = self.model.forward(self._backend, plan, flat)
        else:
            step = self._states.begin(batch.names, batch.starts, batch.computed, device)
            computed = self.model.forward(self._backend, plan, flat, step)
            counts = (end - start for start, end in itertools.pairwise(batch.starts))
            ends = [at + count for at, count in zip(batch.computed, counts, strict=True)]
            self._states.keep(batch.names, ends, step)
        if self._kept is not None:
            self._kept.write(computed.kept, torch.tensor(batch.slots, device=device))
        return computed

    def _given(self, places: Sequence[int], rows: bytes) -> tuple[Tensor, Tensor]:
        """Places in the batch, and ``[places, hidden]`` on the device."""
        found = torch.frombuffer(bytearray(rows), dtype=self.model.dtype).view(len(places), -1)
        return torch.tensor(places, device=self.model.device), found.to(self.model.device)

    def clear(self, blocks: Sequence[int]) -> None:
        """`AttentionBackend.clear`."""
        self._backend.clear(blocks)

    def close(self) -> None:
        """Nothing more will be computed."""

    def _execute(
        self, rows: Sequence[Row], output: ModelOutput, masks: Masks, computed: Computed | None = None
    ) -> None:
        try:
            with torch.inference_mode():
                computed = computed or self._forward(rows)
                self._note_prompts(rows, computed.logits[len(rows) :], output)
                self._sample(rows, computed.logits, output, masks)
                self._clear([row for row in rows if row.request.id in output.failed])
            self._note_hidden(rows, computed.hidden, output)
            if self.model.after_step is not None:
                self._feed_back(rows, computed.hidden, output)
            if self._kept is not None:
                self._note_kept(rows, computed, output)
        except Exception as error:
            if len(rows) == 1:
                log.warning("request %s failed in the model: %s", rows[0].request.id, describe(error))
                output.failed[rows[0].request.id] = describe(error)
                return
            log.warning("a step of %d requests failed, each is computed alone: %s", len(rows), describe(error))
            for row in rows:
                self._execute([row], output, masks)

    def _forward(self, rows: Sequence[Row]) -> Computed:
        """The logits of each row's last token, of the prompts' tokens whose probabilities are asked for, and of drafts.

        NaN anywhere in a row reaches its last token, so a prompt's chunk is checked, too.
        """
        ids: list[int] = []
        positions: list[list[int]] = [[] for _axis in range(self.model.axes)]
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
            ids += [self._rows[request.id].last] * row.unknown
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
        last += [at for row, first in zip(rows, starts, strict=False) for at in self._asked(row, first)]
        last += [
            at for row, end in zip(rows, starts[1:], strict=True) for at in range(end - len(self._drafts.of(row)), end)
        ]
        for at in places:
            ids[at] = 0  # a row's name is not a token
        sampling = [self._rows[row.request.id].params for row in rows if row.samples]
        hidden = bool(sampling) and (self._takes_hidden or any(params.hidden_rows for params in sampling))
        computed = [row.start for row in rows]
        where = [at for axis in positions for at in axis]
        names = [row.request.id for row in rows]
        return self.compute(
            Pass(ids, where, slots, starts, computed, tables, last, places, b"".join(embeddings), hidden, added, names)
        )

    @property
    def _takes_hidden(self) -> bool:
        return self.model.after_step is not None

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
        if self.model.axes > 1 and row.request.rows is not None:
            found: list[list[int]] = row.request.rows.positions(row.start, end)
            return found
        return [range(row.start, end)] * self.model.axes

    def _asked(self, row: Row, first: int) -> range:
        """Tokens of a row, at ``first`` of the flat batch, from which the prompt's next one is predicted."""
        state = self._rows[row.request.id]
        if state.params.prompt_logprobs is None:
            return range(0)
        skipped = max(len(state.prompt_logprobs) - row.start, 0)  # known from before a preemption
        count = min(row.start + row.count, row.request.prompt_tokens - 1) - row.start
        return range(first + skipped, first + max(count, skipped))

    def _note_prompts(self, rows: Sequence[Row], logits: Tensor, output: ModelOutput) -> None:
        at = 0
        for row in rows:
            state, request = self._rows[row.request.id], row.request
            first, count = len(state.prompt_logprobs) + 1, len(self._asked(row, 0))
            if count:
                tokens = request.tokens[first : first + count]
                state.prompt_logprobs += reports(logits[at : at + count], tokens, state.params.prompt_logprobs or 0)
                at += count
            if state.params.prompt_logprobs is not None and row.samples and not row.place:
                output.prompt_logprobs[request.id] = tuple(state.prompt_logprobs)

    def _sample(self, rows: Sequence[Row], computed: Tensor, output: ModelOutput, masks: Masks) -> None:
        logits = computed[: len(rows)]
        sampling = [index for index, row in enumerate(rows) if row.samples]
        if len(sampling) < len(rows):
            for row, good in zip(rows, torch.isfinite(logits.amax(-1)).tolist(), strict=True):
                if not good and not row.samples:
                    output.failed[row.request.id] = NAN
            logits, rows = logits[sampling], [rows[index] for index in sampling]
        if not rows:
            return
        states = [self._rows[row.request.id] for row in rows]
        for index, row in enumerate(rows):
            if not row.place:
                states[index].begin(row.request.tokens)
            if (mask := masks.get(row.request.id)) is not None:
                states[index].mask = torch.from_numpy(~mask)
        sampled = sample(logits, states, [row.place for row in rows])
        drafted = [index for index, row in enumerate(rows) if self._drafts.of(row)]
        for row, one in zip(rows, sampled, strict=True):
            _note(row, [one], output)
        if drafted:
            self._verify([rows[index] for index in drafted], [sampled[index] for index in drafted], computed, output)

    def _verify(self, rows: Sequence[Row], sampled: Sequence[Sampled], computed: Tensor, output: ModelOutput) -> None:
        """rows: those with drafts, whose logits are the last ones of ``computed``. sampled: before the drafts."""
        lengths = [len(self._drafts.of(row)) for row in rows]
        firsts = [0, *itertools.accumulate(lengths)]
        logits = computed[len(computed) - firsts[-1] :]
        finite = torch.isfinite(logits[[first - 1 for first in firsts[1:]]].amax(-1)).tolist()
        drafted = [
            Drafted(row, self._rows[row.request.id], self._drafts.of(row), first)
            for row, first in zip(rows, firsts, strict=False)
        ]
        for row, tokens, proposed, good in zip(rows, verify(drafted, sampled, logits), lengths, finite, strict=True):
            _note(row, tokens if good else [Sampled(None, None)], output)
            accepted = tuple(one.token for one in tokens[:-1] if one.token is not None)
            logprobs = tuple(one.logprobs for one in tokens[:-1] if one.logprobs is not None)
            output.drafts[row.request.id] = VerifiedDraft(proposed, accepted, logprobs)

    def _note_hidden(self, rows: Sequence[Row], hidden: Tensor | None, output: ModelOutput) -> None:
        """Outside of inference mode, whose tensors an author's functions could not compute gradients with."""
        if hidden is None:
            return
        for index, row in enumerate(rows):
            if row.request.id in output.sampled and self._rows[row.request.id].params.hidden_rows:
                output.hidden_rows[row.request.id] = hidden[index].to("cpu", copy=True)

    def _feed_back(self, rows: Sequence[Row], hidden: Tensor | None, output: ModelOutput) -> None:
        """Let the decoder make the next row of each request that goes on. One for which it raises fails alone."""
        going = [
            (index, row, output.sampled[row.request.id])
            for index, row in enumerate(rows)
            if row.request.id in output.sampled
            and row.request.ends_by(output.sampled[row.request.id], row.place) is None
        ]
        if not going or hidden is None:
            return
        try:
            self._after_step(going, hidden, output)
        except BaseException as error:  # SystemExit too: an author's code must not end the engine
            if len(going) == 1:
                request = going[0][1].request
                log.warning("request %s failed in after_step: %s", request.id, describe(error))
                output.failed[request.id] = describe(error)
                return
            log.warning("after_step of %d requests failed, each is computed alone: %s", len(going), describe(error))
            for one in going:
                self._feed_back([rows[one[0]]], hidden[one[0] : one[0] + 1], output)

    def _after_step(self, going: Sequence[tuple[int, Row, int]], hidden: Tensor, output: ModelOutput) -> None:
        assert self.model.after_step is not None
        owns = [self._own[row.request.id] for _index, row, _token in going]
        states = [self._rows[row.request.id] for _index, row, _token in going]
        places = [row.place for _index, row, _token in going]
        step = Step(
            tokens=torch.tensor([token for _index, _row, token in going], device=self.model.device),
            hidden=hidden[[index for index, _row, _token in going]],
            places=places,
            states=[own.state for own in owns],
            sampling=[state.params for state in states],
            uniform=lambda count: uniforms([state.seed for state in states], places, count),
        )
        before = [dict(own.state) for own in owns]
        try:
            with torch.no_grad():
                rows, emitted, ends = _checked_rows(self.model.after_step(step), len(going), self.model)
        except BaseException:  # the requests are asked for again, one by one
            for own, state in zip(owns, before, strict=True):
                own.state = state
            raise
        for own, (_index, of, _token), row, gone, ended in zip(owns, going, rows, emitted, ends, strict=True):
            if ended:
                output.ended[of.request.id] = None
                continue
            own.rows.append(row)
            if gone is not None:
                output.rows[of.request.id] = GivenRows(emitted=(gone,))

    def _note_kept(self, rows: Sequence[Row], computed: Computed, output: ModelOutput) -> None:
        assert self._kept is not None
        ends = [at - 1 for at in _ends(rows)]
        for index, row in enumerate(rows):
            request = row.request
            if request.id not in output.sampled:
                continue
            given = self._kept.of_token(output.sampled[request.id], ends[index], computed)
            if not row.place:
                given = given.joined(self._kept.of_prompt(request, row.blocks))
            output.rows[request.id] = given.joined(output.rows.get(request.id, GivenRows()))

    def _clear(self, rows: Sequence[Row]) -> None:
        """Blocks that failed rows have written into. Those before hold what other requests may share, without NaN."""
        blocks = [block for row in rows for block in row.blocks[row.start // self._block_size :]]
        if blocks:
            self.clear(blocks)


def _nothing() -> ModelOutput:
    return ModelOutput({}, {}, {}, {}, {}, {}, {}, {})


def _note(row: Row, tokens: Sequence[Sampled], output: ModelOutput) -> None:
    """The last one is the sampled one. None: its logits, or those before it, are not finite."""
    last = tokens[-1]
    if last.token is None:
        output.failed[row.request.id] = NAN
        return
    output.sampled[row.request.id] = last.token
    if last.logprobs is not None:
        output.logprobs[row.request.id] = last.logprobs


def _bytes(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def _ends(rows: Sequence[Row]) -> list[int]:
    """Where each row ends in the flat batch."""
    return list(itertools.accumulate(row.count for row in rows))


def _checked_rows(given: Any, count: int, model: PagedModel) -> tuple[Tensor, Sequence[Any], Sequence[bool]]:
    """The result of a decoder's `after_step`, on the host: next rows, what goes out, and who ends.

    Raises: TypeError, ValueError: it is something else, or not of every request.
    """
    if not isinstance(given, NextRows):
        raise TypeError(f"after_step: expected omni.NextRows, got {type(given).__name__}")
    rows = given.rows
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (count, model.row_size):
        came = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"after_step: expected rows [{count}, {model.row_size}], got {came}")
    emitted = given.emitted
    if emitted is not None and (not isinstance(emitted, Tensor) or emitted.ndim < 1 or len(emitted) != count):
        raise ValueError(f"after_step: expected emitted [{count}, …], a tensor, got {type(emitted).__name__}")
    ends = list(given.ends) or [False] * count
    if len(ends) != count:
        raise ValueError(f"after_step: expected ends of {count} requests, got {len(ends)}")
    out = [None] * count if emitted is None else list(emitted.detach().to("cpu", copy=True))
    return rows.detach().to("cpu", model.dtype, copy=True), out, ends

"""Carries out one step: the scheduler's rows as a flat batch through the model, then sampling.

An error in a pass is met by one pass for each row, so that only the requests that cause it fail.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.adapted import AdapterFacts, AdapterRead, AdapterReads, AdapterTokens
from stage_runtime.engines.autoregressive.model.models import Computed, FlatBatch, PagedModel
from stage_runtime.engines.autoregressive.model.paged_attention.attention import AttentionBackend, BatchMeta
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages, Page
from stage_runtime.engines.autoregressive.model.rows.input_batch import BatchBuilder, Pass
from stage_runtime.engines.autoregressive.model.rows.kept_rows import KeptRows, OwnRows
from stage_runtime.engines.autoregressive.model.rows.self_feeding import SelfFeeding
from stage_runtime.engines.autoregressive.model.states import StateSlots
from stage_runtime.engines.autoregressive.sampling.model_output import (
    Drafted,
    DraftMasks,
    GivenRows,
    Masks,
    ModelOutput,
    VerifiedDraft,
)
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, Sampled, reports, sample
from stage_runtime.engines.autoregressive.speculation.proposing import Proposer, StepDrafts
from stage_runtime.engines.autoregressive.speculation.verifying import DraftedRow, verify
from stage_runtime.errors import describe
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput

log = logging.getLogger(__name__)

NAN = "the model's logits are not finite"


class Allowed(NamedTuple):
    """Tokens that requests with grammars may get: next, and after each token of their drafts."""

    next: Masks
    after: DraftMasks = {}


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
        beside: Sequence[Page] = (),
    ) -> None:
        """kept: rows of layers that are given out; None: none are. proposer: makes drafts of next tokens. beside: pages
        that cross with those of keys and values.
        """
        self.model = model
        self._adapter_reads = AdapterReads(lambda: self.model.adapters)
        self._kept = kept
        self._backend = backend
        self._block_size = block_size
        self._rows: dict[str, RowState] = {}
        self._drafts = StepDrafts(proposer)
        self._feeding = SelfFeeding(model, self._rows)
        self._batches = BatchBuilder(model, block_size, self._rows, self._drafts, self._feeding.own)
        self._states = StateSlots() if model.state_layers else None
        self._held: tuple[Sequence[Row], Computed | None] = ((), None)  #: A pass whose tokens are not chosen yet.
        backend.alloc(model.layers, num_blocks, block_size, model.dtype, str(model.device))
        self.pages = BlockPages((*backend.regions(), *(() if kept is None else kept.regions()), *beside))

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        """A request whose rows will come."""
        self.keep(request_id, self.state_of(params, prompt))

    def state_of(self, params: SamplingParams, prompt: Sequence[int]) -> RowState:
        """The state of a new request, which `keep` takes. Any thread may call it."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(7), "little")
        return RowState(params, seed, self.model.end_ids, prompt)

    def keep(self, request_id: str, state: RowState) -> None:
        """The same as `add`, with a state that is made already."""
        self._rows[request_id] = state
        self._drafts.add(request_id, state)
        if self._feeding.used:
            self._feeding.own[request_id] = OwnRows()

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Drafted | None = None) -> ModelOutput:
        """Never raises for what a request does: that request is among ``failed``.

        hold: only the pass; `sample_tokens` gives the output. drafted: gets the drafts of the step before the pass.
        """
        try:
            rows = self._begin(step)
        except BaseException as error:
            if drafted is not None:
                drafted.set_exception(error)
            raise
        if drafted is not None:
            drafted.set_result({row.request.id: self._drafts.of(row) for row in rows})
        output = _nothing()
        if hold:
            self._held = (rows, self._tried(rows) if rows else None)
        elif rows:
            self._execute(rows, output, Allowed({}))
            self._note_tokens(rows, output)
        return output

    def _begin(self, step: SchedulerOutput) -> Sequence[Row]:
        """Forget what has ended. Returns: the rows to compute, with their drafts."""
        for request_id in step.finished:
            self._rows.pop(request_id, None)
            self._feeding.own.pop(request_id, None)
            self._drafts.drop(request_id)
        if self._states is not None:
            for request_id in (*step.finished, *step.preempted):
                self._states.drop(request_id)
        # Scheduled before the last token of a request was known: what that ends is not computed further.
        return self._drafts.begin([row for row in step.rows if not self._rows[row.request.id].over])

    def sample_tokens(self, masks: Masks, after: DraftMasks | None = None) -> ModelOutput:
        """The output of the pass that was held. masks: request id -> which tokens it may get. after: as that, behind
        each token of its draft; of a request with a mask, what is drafted beyond them is not verified.
        """
        (rows, computed), self._held = self._held, ((), None)
        output = _nothing()
        if rows:
            self._execute(rows, output, Allowed(masks, after or {}), computed)
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
                return self.compute(self._batches.build(rows))
        except Exception as error:
            log.warning("a step of %d requests failed: %s", len(rows), describe(error))
            return None

    def execute_dummy_batch(self, tokens: int = 1) -> None:
        """A pass over padding, to warm up."""
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
            adapters=self._adapter_tokens(batch) if batch.adapters else (),
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

    def _adapter_tokens(self, batch: Pass) -> AdapterTokens:
        if len(set(batch.adapters)) == 1:
            return [(batch.adapters[0], None)]
        found: dict[int, list[int]] = {}
        for number, (start, end) in zip(batch.adapters, itertools.pairwise(batch.starts), strict=True):
            if number:
                found.setdefault(number, []).extend(range(start, end))
        return [(number, torch.tensor(places, device=self.model.device)) for number, places in found.items()]

    def read_adapter(self, number: int, path: str) -> Future[AdapterRead]:
        """Begin to read one, beside passes. Raises: AdapterRefused: the model takes none."""
        return self._adapter_reads.begin(number, path)

    def keep_adapter(self, number: int) -> AdapterFacts:
        """Passes may compute it from now on; it waits until it is read. Raises: AdapterRefused: it could not be."""
        return self._adapter_reads.keep(number)

    def drop_adapter(self, number: int) -> None:
        """Idempotent."""
        self._adapter_reads.drop(number)

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
        self, rows: Sequence[Row], output: ModelOutput, masks: Allowed, computed: Computed | None = None
    ) -> None:
        try:
            with torch.inference_mode():
                computed = computed or self.compute(self._batches.build(rows))
                self._note_prompts(rows, computed.logits[len(rows) :], output)
                self._sample(rows, computed.logits, output, masks)
                self._clear([row for row in rows if row.request.id in output.failed])
            self._note_hidden(rows, computed.hidden, output)
            if self._feeding.used:
                self._feeding.feed_back(rows, computed.hidden, output)
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

    def _note_prompts(self, rows: Sequence[Row], logits: Tensor, output: ModelOutput) -> None:
        at = 0
        for row in rows:
            state, request = self._rows[row.request.id], row.request
            first, count = len(state.prompt_logprobs) + 1, len(self._batches.asked(row, 0))
            if count:
                tokens = request.tokens[first : first + count]
                state.prompt_logprobs += reports(logits[at : at + count], tokens, state.params.prompt_logprobs or 0)
                at += count
            if state.params.prompt_logprobs is not None and row.samples and not row.place:
                output.prompt_logprobs[request.id] = tuple(state.prompt_logprobs)

    def _sample(self, rows: Sequence[Row], computed: Tensor, output: ModelOutput, masks: Allowed) -> None:
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
            if (mask := masks.next.get(row.request.id)) is not None:
                states[index].mask = torch.from_numpy(~mask)
        sampled = sample(logits, states, [row.place for row in rows])
        drafted = [index for index, row in enumerate(rows) if self._drafts.of(row)]
        for row, one in zip(rows, sampled, strict=True):
            _note(row, [one], output)
        if drafted:
            self._verify(
                [rows[index] for index in drafted], [sampled[index] for index in drafted], computed, output, masks
            )

    def _verify(
        self, rows: Sequence[Row], sampled: Sequence[Sampled], computed: Tensor, output: ModelOutput, masks: Allowed
    ) -> None:
        """rows: those with drafts, whose logits are the last ones of ``computed``. sampled: before the drafts."""
        lengths = [len(self._drafts.of(row)) for row in rows]
        firsts = [0, *itertools.accumulate(lengths)]
        logits = computed[len(computed) - firsts[-1] :]
        finite = torch.isfinite(logits[[first - 1 for first in firsts[1:]]].amax(-1)).tolist()
        drafted = []
        for row, first in zip(rows, firsts, strict=False):
            draft, after = self._drafts.of(row), None
            if row.request.id in masks.next:
                after = masks.after.get(row.request.id, ())
                draft = draft[: len(after)]
            drafted.append(DraftedRow(row, self._rows[row.request.id], draft, first, after))
        verified = verify(drafted, sampled, logits)
        for row, tokens, one, good in zip(rows, verified, drafted, finite, strict=True):
            proposed = len(one.draft)
            _note(row, tokens if good else [Sampled(None, None)], output)
            accepted = tuple(one.token for one in tokens[:-1] if one.token is not None)
            logprobs = tuple(one.logprobs for one in tokens[:-1] if one.logprobs is not None)
            output.drafts[row.request.id] = VerifiedDraft(proposed, accepted, logprobs)

    def _note_hidden(self, rows: Sequence[Row], hidden: Tensor | None, output: ModelOutput) -> None:
        """It runs outside of inference mode, whose tensors an author's functions could not compute gradients with."""
        if hidden is None:
            return
        for index, row in enumerate(rows):
            if row.request.id in output.sampled and self._rows[row.request.id].params.hidden_rows:
                output.hidden_rows[row.request.id] = hidden[index].to("cpu", copy=True)

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
    """Enter a row's tokens, of which the last one was sampled. Its token is None where logits are not finite: the
    request fails.
    """
    last = tokens[-1]
    if last.token is None:
        output.failed[row.request.id] = NAN
        return
    output.sampled[row.request.id] = last.token
    if last.logprobs is not None:
        output.logprobs[row.request.id] = last.logprobs


def _ends(rows: Sequence[Row]) -> list[int]:
    """The place where each row ends in the flat batch."""
    return list(itertools.accumulate(row.count for row in rows))

"""Carries out one step: the scheduler's rows as a flat batch through the model, then sampling.

An error in a pass is met by one pass for each row, so that only the requests that cause it fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.attention import AttentionBackend, BatchMeta
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, reports, sample
from stage_runtime.errors import describe
from stage_runtime.rules.autoregressive.steps import Row, SchedulerOutput

log = logging.getLogger(__name__)

Masks: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]

NAN = "the model's logits are not finite"


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One pass over a flat batch, on the host. tables: blocks of each row. last: each row's last token.

    places: tokens that are given as ``embeddings``, the bytes of ``[places, hidden]`` in the model's dtype. hidden:
    the last hidden rows are wanted, too. See `attention.BatchMeta`.
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


class Computed(NamedTuple):
    """logits: ``[last, vocabulary]``. hidden: ``[last, hidden]``, where it was wanted."""

    logits: Tensor
    hidden: Tensor | None = None


class ModelRunner:
    """One model on one device, with its KV cache. Every call on one thread at a time."""

    def __init__(self, model: PagedModel, backend: AttentionBackend, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self._backend = backend
        self._block_size = block_size
        self._rows: dict[str, RowState] = {}
        self._held: tuple[Sequence[Row], Computed | None] = ((), None)  #: A pass whose tokens are not chosen yet.
        backend.alloc(model.layers, num_blocks, block_size, model.dtype, str(model.device))

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int]) -> None:
        """A request whose rows will come."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(7), "little")
        self._rows[request_id] = RowState(params, seed, self.model.end_ids, prompt)

    def execute_model(self, step: SchedulerOutput, hold: bool = False) -> ModelOutput:
        """Never raises for what a request does: that request is among ``failed``.

        hold: only the pass; `sample_tokens` gives the output.
        """
        for request_id in step.finished:
            self._rows.pop(request_id, None)
        output = ModelOutput({}, {}, {}, {}, {})
        if hold:
            self._held = (step.rows, self._tried(step.rows))
        elif step.rows:
            self._execute(step.rows, output, {})
        return output

    def sample_tokens(self, masks: Masks) -> ModelOutput:
        """The output of the pass that was held. masks: request id -> which tokens it may get."""
        (rows, computed), self._held = self._held, ((), None)
        output = ModelOutput({}, {}, {}, {}, {})
        if rows:
            self._execute(rows, output, masks, computed)
        return output

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
            self.compute(Pass([0] * count, [*range(count)], [0] * count, [0, count], [0], [blocks], [count - 1]))
            self.clear([0])

    def compute(self, batch: Pass) -> Computed:
        """Of the rows' last tokens; the cache is written."""
        device = self.model.device
        meta = BatchMeta(batch.starts, batch.computed, batch.tables, torch.tensor(batch.slots, device=device))
        return self._compute(batch, self._backend.plan(meta))

    def _compute(self, batch: Pass, plan: Any) -> Computed:
        device = self.model.device
        ids, positions, last = (torch.tensor(one, device=device) for one in (batch.ids, batch.positions, batch.last))
        given = (self._backend, plan, ids, positions, last, self._embeddings(batch))
        if batch.hidden:
            return Computed(*self.model.forward_with_hidden(*given))
        return Computed(self.model.forward(*given))

    def _embeddings(self, batch: Pass) -> tuple[Tensor, Tensor] | None:
        if not batch.places:
            return None
        rows = torch.frombuffer(bytearray(batch.embeddings), dtype=self.model.dtype).view(len(batch.places), -1)
        return torch.tensor(batch.places, device=self.model.device), rows.to(self.model.device)

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
                self._sample(rows, computed.logits[: len(rows)], output, masks)
                self._clear([row for row in rows if row.request.id in output.failed])
            self._note_hidden(rows, computed.hidden, output)
        except Exception as error:
            if len(rows) == 1:
                log.warning("request %s failed in the model: %s", rows[0].request.id, describe(error))
                output.failed[rows[0].request.id] = describe(error)
                return
            log.warning("a step of %d requests failed, each is computed alone: %s", len(rows), describe(error))
            for row in rows:
                self._execute([row], output, masks)

    def _forward(self, rows: Sequence[Row]) -> Computed:
        """Of each row's last token, then of the prompts' tokens whose probabilities are asked for.

        NaN anywhere in a row reaches its last token, so a prompt's chunk is checked, too.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, last, tables = [0], [], []
        places: list[int] = []
        embeddings: list[bytes] = []
        size = self._block_size
        for row in rows:
            request, end = row.request, row.start + row.count
            ids += request.tokens[row.start : end]
            if request.rows is not None:
                for at, some in request.rows.within(row.start, end):
                    places += range(starts[-1] + at - row.start, starts[-1] + at - row.start + len(some))
                    embeddings.append(some.view(torch.uint8).numpy().tobytes())
            positions += range(row.start, end)
            blocks = row.blocks[: -(-end // size)]
            slots += [blocks[at // size] * size + at % size for at in range(row.start, end)]
            starts.append(len(ids))
            tables.append(blocks)
            last.append(len(ids) - 1)
        last += [at for row, first in zip(rows, starts, strict=False) for at in self._asked(row, first)]
        for at in places:
            ids[at] = 0  # a row's name is no token
        hidden = any(row.samples and self._rows[row.request.id].params.hidden_rows for row in rows)
        computed = [row.start for row in rows]
        return self.compute(
            Pass(ids, positions, slots, starts, computed, tables, last, places, b"".join(embeddings), hidden)
        )

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
            if state.params.prompt_logprobs is not None and row.samples and not request.generated:
                output.prompt_logprobs[request.id] = tuple(state.prompt_logprobs)

    def _sample(self, rows: Sequence[Row], logits: Tensor, output: ModelOutput, masks: Masks) -> None:
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
            if not row.request.generated:
                states[index].begin(row.request.tokens)
            if (mask := masks.get(row.request.id)) is not None:
                states[index].mask = torch.from_numpy(~mask)
        for row, one in zip(rows, sample(logits, states, [row.request.generated for row in rows]), strict=True):
            if one.token is None:
                output.failed[row.request.id] = NAN
                continue
            output.sampled[row.request.id] = one.token
            if one.logprobs is not None:
                output.logprobs[row.request.id] = one.logprobs

    def _note_hidden(self, rows: Sequence[Row], hidden: Tensor | None, output: ModelOutput) -> None:
        """Outside of inference mode, whose tensors an author's functions could not compute gradients with."""
        if hidden is None:
            return
        for index, row in enumerate(rows):
            if row.request.id in output.sampled and self._rows[row.request.id].params.hidden_rows:
                output.hidden_rows[row.request.id] = hidden[index].to("cpu", copy=True)

    def _clear(self, rows: Sequence[Row]) -> None:
        """Blocks that failed rows have written into. Those before hold what other requests may share, without NaN."""
        blocks = [block for row in rows for block in row.blocks[row.start // self._block_size :]]
        if blocks:
            self.clear(blocks)

"""Decoders that make their next input rows themselves (`after_step`): called after each step, for each request.

Not here: what such a decoder gets before the pass (`input_batch`). Called by `ModelRunner`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stage_runtime.api import NextRows, Step
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.model.rows.kept_rows import OwnRows
from stage_runtime.engines.autoregressive.sampling.model_output import GivenRows, ModelOutput
from stage_runtime.engines.autoregressive.sampling.sampler import RowState, uniforms
from stage_runtime.errors import describe
from stage_runtime.rules.autoregressive.steps import Row

log = logging.getLogger(__name__)


class SelfFeeding:
    """The rows of all requests of one runner. own: by request id."""

    def __init__(self, model: PagedModel, states: Mapping[str, RowState]) -> None:
        """states: the runner's, by request id."""
        self.own: dict[str, OwnRows] = {}
        self._model = model
        self._states = states

    @property
    def used(self) -> bool:
        """Whether the decoder does so."""
        return self._model.after_step is not None

    def feed_back(self, rows: Sequence[Row], hidden: Tensor | None, output: ModelOutput) -> None:
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
                self.feed_back([rows[one[0]]], hidden[one[0] : one[0] + 1], output)

    def _after_step(self, going: Sequence[tuple[int, Row, int]], hidden: Tensor, output: ModelOutput) -> None:
        assert self._model.after_step is not None
        owns = [self.own[row.request.id] for _index, row, _token in going]
        states = [self._states[row.request.id] for _index, row, _token in going]
        places = [row.place for _index, row, _token in going]
        step = Step(
            tokens=torch.tensor([token for _index, _row, token in going], device=self._model.device),
            hidden=hidden[[index for index, _row, _token in going]],
            places=places,
            states=[own.state for own in owns],
            sampling=[state.params for state in states],
            uniform=lambda count: uniforms([state.seed for state in states], places, count),
        )
        before = [dict(own.state) for own in owns]
        try:
            with torch.no_grad():
                rows, emitted, ends = _checked_rows(self._model.after_step(step), len(going), self._model)
        except BaseException:  # the requests are asked for again, one by one
            for own, state in zip(owns, before, strict=True):
                own.state = state
            raise
        for own, (_index, of, _token), row, gone, ended in zip(owns, going, rows, emitted, ends, strict=True):
            if ended:
                output.ended[of.request.id] = None
                continue
            own.rows.append(row.clone())  # else all rows of the step are kept as long as this one
            if gone is not None:
                output.rows[of.request.id] = GivenRows(emitted=(gone,))


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

"""Chooses a token for each row of a step by its logits, for all rows at once.

A row's token depends on its own logits, parameters, seed and place alone, so a seed gives the same answer in any batch,
after a preemption, and in another process: random numbers are hashes of (seed, place), not draws of a generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams

ROWS_AT_ONCE: Final = 64  # of log probabilities: more need much memory and are not faster
FIRST_CANDIDATES: Final = 256  # of a nucleus; sorting a whole vocabulary costs more than the rest of sampling


class RowState:
    """The sampler's state of one request: which tokens it has seen, where its penalties need that."""

    def __init__(self, params: SamplingParams, seed: int, end_ids: frozenset[int], prompt: Sequence[int] = ()) -> None:
        self.params = params
        self.seed = seed
        self.last = 0  #: The token that was chosen last.
        self.over = False  #: It gets no more tokens, though a step with it may be scheduled.
        self.mask: Tensor | None = None  #: ``[vocabulary]``: tokens that must not come next, by its grammar.
        #: Log probabilities of the prompt's tokens from the second on, as far as known.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._ends = sorted(end_ids | set(params.stop_token_ids)) if params.min_tokens else []
        self._held_back: Tensor | None = None  #: The same, on the device, once it is needed.
        self._bias: tuple[Tensor, Tensor] | None = None  #: Tokens, and what is added to their logits; as that.
        self._prompt: tuple[int, ...] = ()
        self.begin(prompt)
        self._seen: Tensor | None = None  #: ``[vocabulary]`` bool: in the prompt or generated.
        self._counts: Tensor | None = None  #: ``[vocabulary]``: how often it was generated.

    def begin(self, prompt: Sequence[int]) -> None:
        """Its first token is chosen now. prompt: whole."""
        if self.params.penalized:
            self._prompt = tuple(token for token in prompt if token >= 0)

    def prepare(self, logits: Tensor, generated: int) -> None:
        """Apply bias and penalties to one row ``[vocabulary]``, in place."""
        params = self.params
        if params.logit_bias:
            if self._bias is None:
                tokens, values = list(params.logit_bias), list(params.logit_bias.values())
                self._bias = torch.tensor(tokens, device=logits.device), logits.new_tensor(values)
            logits.index_add_(0, *self._bias)
        if self._ends and generated < params.min_tokens and self._leaves_others():
            if self._held_back is None:
                self._held_back = torch.tensor(self._ends, device=logits.device)
            logits.index_fill_(0, self._held_back, float("-inf"))
        if params.penalized:
            seen, counts = self._history(logits)
            if params.repetition_penalty != 1:
                penalty = params.repetition_penalty
                logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)

    def _leaves_others(self) -> bool:
        """Whether the grammar allows a token that does not end the answer. If not, it is followed all the same."""
        if self.mask is None:
            return True
        allowed = ~self.mask
        allowed[self._ends] = False
        return bool(allowed.any())

    def chosen(self, token: int) -> None:
        if self._seen is not None and self._counts is not None:
            self._seen[token] = True
            self._counts[token] += 1

    def _history(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            self._seen[list(self._prompt)] = True
            self._counts = torch.zeros_like(logits)
        return self._seen, self._counts


class Sampled(NamedTuple):
    """token: None when the row holds NaN, so that none can be chosen."""

    token: int | None
    logprobs: TokenLogprobs | None


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for the token at ``place`` of an answer."""
    digest = blake2b(seed.to_bytes(8, "little") + place.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def uniforms(seeds: Sequence[int], places: Sequence[int], count: int) -> Tensor:
    """``[seeds, count]`` numbers in [0, 1), each of its seed, place and index alone; other ones than `uniform`'s."""
    found = []
    for seed, place in zip(seeds, places, strict=True):
        first = blake2b(
            seed.to_bytes(8, "little") + place.to_bytes(8, "little"), digest_size=8, person=b"step"
        ).digest()
        inner = int.from_bytes(first, "little") >> 1
        found.append([uniform(inner, index) for index in range(count)])
    return torch.tensor(found, dtype=torch.float64)


def sample(logits: Tensor, rows: Sequence[RowState], places: Sequence[int]) -> list[Sampled]:
    """Choose a token for each row. ``logits [rows, vocabulary]`` f32 is written into.

    places: how many tokens each row's request has generated.
    """
    raw = _logprobs(logits, rows)
    for index, row in enumerate(rows):
        if row.params.changes_logits:
            row.prepare(logits[index], places[index])
        if row.mask is not None:
            logits[index].masked_fill_(row.mask.to(logits.device), float("-inf"))
            row.mask = None
    best, tokens = logits.max(-1)
    chosen: list[int] = tokens.tolist()
    bad = [not good for good in torch.isfinite(best).tolist()]  # the maximum of a row with NaN is NaN
    for index, row in enumerate(rows):
        if not bad[index] and not row.params.greedy:
            chosen[index] = _draw(logits[index], row.params, uniform(row.seed, places[index]))
    found = []
    for index, row in enumerate(rows):
        if bad[index]:
            found.append(Sampled(None, None))
            continue
        row.chosen(chosen[index])
        wanted = row.params.logprobs
        found.append(Sampled(chosen[index], report(raw[index], chosen[index], wanted) if wanted is not None else None))
    return found


def guess(logits: Tensor, rows: Sequence[RowState], places: Sequence[int]) -> list[int | None]:
    """A draft's token for each row of ``[rows, vocabulary]`` f32: with the random number of the token that is guessed,
    without penalties, bias and grammar. None: its logits are not finite. Nothing is noted in ``rows``.
    """
    best, tokens = logits.max(-1)
    found: list[int | None] = tokens.tolist()
    for index, (row, good) in enumerate(zip(rows, torch.isfinite(best).tolist(), strict=True)):
        if not good:
            found[index] = None
        elif not row.params.greedy:
            found[index] = _draw(logits[index], row.params, uniform(row.seed, places[index]))
    return found


def _logprobs(logits: Tensor, rows: Sequence[RowState]) -> dict[int, Tensor]:
    return {index: logits[index].log_softmax(-1) for index, row in enumerate(rows) if row.params.logprobs is not None}


def report(logprobs: Tensor, token: int, count: int) -> TokenLogprobs:
    """logprobs: of one row, ``[vocabulary]``."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(zip(map(int, tokens.tolist()), map(float, values.tolist()), strict=True))
    return TokenLogprobs(float(logprobs[token]), top)


def reports(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The `report` of each row. logits: ``[rows, vocabulary]``. tokens: one for each row."""
    found = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        some = tokens[start : start + ROWS_AT_ONCE]
        logprobs = logits[start : start + len(some)].log_softmax(-1)
        values, best = logprobs.topk(min(count, logprobs.shape[1]))
        own = logprobs.gather(1, torch.tensor(some, device=logits.device)[:, None])[:, 0].tolist()
        for logprob, row, scores in zip(own, best.tolist(), values.tolist(), strict=True):
            found.append(TokenLogprobs(logprob, tuple(zip(row, scores, strict=True))))
    return found


def _draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """A token of one row ``[vocabulary]``."""
    scaled = (logits - logits.max()) / params.temperature  # at most 0, so that a low temperature overflows to -inf only
    if not params.top_k and params.top_p >= 1:
        probabilities = scaled.softmax(-1)
        if params.min_p:
            probabilities = torch.where(probabilities >= params.min_p * probabilities.max(), probabilities, 0.0)
        return _pick(probabilities, u)
    probabilities, tokens = _candidates(scaled, params)
    if params.min_p:
        probabilities = torch.where(probabilities >= params.min_p * probabilities[0], probabilities, 0.0)
    if params.top_p < 1:
        # The nucleus: the fewest tokens whose probabilities reach top_p; the first is always in it.
        before = probabilities.double().cumsum(-1) - probabilities
        probabilities = torch.where(before < params.top_p, probabilities, 0.0)
        probabilities[0] = torch.maximum(probabilities[0], probabilities.new_tensor(1e-30))
    return int(tokens[_pick(probabilities, u)])


def _candidates(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The likeliest tokens with their probabilities, likeliest first: ``top_k``, or enough for the nucleus."""
    size = scaled.shape[0]
    if params.top_k:
        values, tokens = scaled.topk(min(params.top_k, size))
        return values.softmax(-1), tokens
    total = scaled.logsumexp(-1)
    values, tokens = scaled.topk(min(FIRST_CANDIDATES, size))
    probabilities = (values - total).exp()
    if probabilities.sum() < params.top_p and size > FIRST_CANDIDATES:
        values, tokens = scaled.sort(descending=True)
        probabilities = (values - total).exp()
    return probabilities, tokens


def _pick(weights: Tensor, u: float) -> int:
    """The index in which ``u`` of the weights' sum lies."""
    sums = weights.double().cumsum(-1)
    index = int(torch.searchsorted(sums, sums[-1:] * u, right=True))
    if index >= sums.shape[0]:  # u * sum was rounded up
        index = int(weights.nonzero()[-1])
    return index

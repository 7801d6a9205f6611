"""A new request, or more of one, checked and made ready for the scheduler: in any thread, before the core is asked.

Here: what a client sent against the model's vocabulary, length, embeddings, grammars and adapters. Not here: whether
there is room for it (the scheduler). Called by `EngineCore`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.lora.registry import Adapter, Adapters
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import (
    ROW,
    Embeddings,
    Extension,
    PlacedRows,
    RequestRows,
)
from stage_runtime.engines.autoregressive.text.reasoning import Matcher
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.errors import ContextLengthExceeded
from stage_runtime.rules.autoregressive.requests import Request, TokenLimits


class EndTokens(NamedTuple):
    """The tokens that end something; none of them is text."""

    of_answers: frozenset[int] = frozenset()
    of_grammars: frozenset[int] = frozenset()  #: More tokens than those of answers.


NO_ENDS: Final = EndTokens()


class ModelFacts(NamedTuple):
    """The facts of its model that an engine core needs."""

    vocab_size: int
    ends: EndTokens = NO_ENDS
    #: Compiles a grammar, in any thread; raises ValueError. None: answers follow none.
    grammars: Callable[[Grammar], Matcher] | None = None
    embeddings: Embeddings | None = None  #: Embeddings of prompts with rows; None: the model takes none.
    feeds_itself: bool = False  #: See `Request`.
    adapters: Adapters | None = None  #: Adapters that requests may name; None: it takes none.


class Preprocessor:
    """Checks requests. Nothing of it changes after its making."""

    def __init__(self, model: ModelFacts, *, longest: int, block_size: int) -> None:
        """longest: tokens that one request may have."""
        self._longest = longest
        self._block_size = block_size
        self._vocab_size = model.vocab_size
        self._end_ids = model.ends.of_answers
        self._grammars = model.grammars
        self._embeddings = model.embeddings
        self._feeds_itself = model.feeds_itself
        self._adapters = model.adapters

    def request(self, request: EngineCoreRequest) -> Request:
        """Check a request and hash its blocks. Any thread may call this.

        Raises: ValueError: it can never be computed. Its message is for the client.
        """
        params = request.params
        if type(request.priority) is not int:
            raise ValueError("priority must be a whole number")
        self._check_tokens(params.stop_token_ids)
        self._check_stops(params)
        self._check_tokens(params.logit_bias)
        count = len(request.prompt_token_ids)
        if count >= self._longest:
            raise ContextLengthExceeded(count, self._longest)
        placed = self._place(request)
        if (not placed.plain or request.open) and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: a prompt with embeddings, or that grows by a stream, has none")
        matcher = None
        if params.grammar is not None:
            if self._grammars is None:
                raise ValueError("this engine follows no grammars")
            matcher = self._grammars(params.grammar)
        limits = TokenLimits(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            end_ids=frozenset() if params.ignore_eos else self._end_ids,
            stop_ids=frozenset(params.stop_token_ids),
        )
        adapter = self._adapter_of(request)
        salt = request.cache_salt.encode() if adapter is None else adapter.salt(request.cache_salt)
        if params.prompt_logprobs is not None:  # all of the prompt must be computed
            salt = os.urandom(16)
        made = Request(
            request.request_id,
            placed.tokens,
            limits,
            priority=request.priority,
            salt=salt,
            open=request.open,
            feeds_itself=self._feeds_itself,
            fed=0 if self._feeds_itself and request.open else None,
        )
        made.private = params.prompt_logprobs is not None
        made.adapter = adapter
        made.matcher = matcher
        made.speculates = not self._feeds_itself and not params.hidden_rows
        if self._feeds_itself:
            made.rows = RequestRows()
        keep_rows(made, placed, 0)
        made.hash(self._block_size)
        return made

    def extension(self, more: Extension) -> PlacedRows:
        """Check a part of a prompt or of a stream. Any thread may call this. Raises: ValueError: it does not fit the
        model.
        """
        if len(more.prompt_token_ids) >= self._longest:
            raise ContextLengthExceeded(len(more.prompt_token_ids), self._longest)
        placed = self._place(more)
        if more.feed is None:
            return placed
        if self._embeddings is None:
            raise ValueError("this model takes token ids only, no rows of a stream")
        return placed._replace(feed=self._embeddings.fed(more.feed))

    def _place(self, part: EngineCoreRequest | Extension) -> PlacedRows:
        """Part of a prompt, checked. Raises: ValueError."""
        tokens = part.prompt_token_ids
        if part.prompt_embeds is None and part.prompt_positions is None and not part.added_rows:
            self._check_tokens(tokens)
            return PlacedRows(list(tokens), [])
        if self._embeddings is None:
            raise ValueError("this model takes token ids only, no embeddings")
        self._check_tokens(token for token in tokens if token != ROW)
        return self._embeddings.place(
            tokens, part.prompt_embeds, part.prompt_positions, part.position_delta, part.added_rows
        )

    def _adapter_of(self, request: EngineCoreRequest) -> Adapter | None:
        """Raises: RequestError: not_found; ValueError: this engine takes none."""
        if not request.adapter:
            return None
        if self._adapters is None:
            raise ValueError("adapter: this engine takes no adapters")
        return self._adapters.find(request.adapter, request.adapter_digest)

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ValueError(f"the vocabulary has {self._vocab_size} tokens, and no token {wrong}")

    def _check_stops(self, params: SamplingParams) -> None:
        """Raises: ValueError: each token would end the answer, and none may before ``min_tokens``."""
        if params.min_tokens and len(self._end_ids | set(params.stop_token_ids)) >= self._vocab_size:
            raise ValueError("stop_token_ids: no token is left for the min_tokens before the end")


def keep_rows(request: Request, part: PlacedRows, first: int) -> None:
    """first: the part's place in the prompt."""
    if part.plain:
        return
    if request.rows is None:
        request.rows = RequestRows()
    request.rows.keep(first, part)

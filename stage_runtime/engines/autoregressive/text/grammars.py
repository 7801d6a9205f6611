"""Answers that follow a grammar: JSON of a schema, or calls of tools. llguidance says which tokens may come next.

It is an optional dependency (extra ``engine``), imported when a stage is loaded.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.text.grammar_texts import WRITTEN, Grammar
from stage_runtime.errors import describe

log = logging.getLogger(__name__)

MOST: Final = 1 << 16  # characters of a grammar


class Matcher(Protocol):
    """One answer's place in its grammar."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens of the vocabulary may come next."""

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``. False: it must not."""

    @property
    def ended(self) -> bool:
        """Nothing may follow."""


class Grammars:
    """Compiles grammars for one vocabulary. In any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._known: Any = None  #: llguidance's tokenizer, once it is made.
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make llguidance's tokenizer, if it is installed: for seconds no other thread would run, nor any request."""
        try:
            self._vocabulary()
        except ImportError:
            log.info("llguidance is not installed: requests with a grammar will be refused")
        except Exception as error:
            log.warning("requests with a grammar will be refused: %s", describe(error))

    def compile(self, grammar: Grammar) -> Matcher:
        """Raises: ValueError: it is no grammar, or llguidance is not installed."""
        if len(grammar.text) > MOST:
            raise ValueError(f"a grammar of {len(grammar.text)} characters; at most {MOST}")
        try:
            import llguidance
        except ImportError:
            raise ValueError("this server follows no grammars: llguidance is not installed") from None
        try:
            if grammar.kind == "lark":
                text = llguidance.LLMatcher.grammar_from_lark(grammar.text)
            else:
                text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=WRITTEN)
            made = llguidance.LLMatcher(self._vocabulary(), text)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"no grammar: {error}") from error
        if made.is_error():
            raise ValueError(f"response_format: {made.get_error()}"[:400])
        return _Guided(made, self._vocab_size)

    def _vocabulary(self) -> Any:
        import llguidance.hf

        with self._lock:
            if self._known is None:
                own = self._tokenizer.eos_token_id
                end = self._end_ids[0] if self._end_ids and own not in self._end_ids else own
                self._known = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=end)
            return self._known


class _Guided:
    """`Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def take(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

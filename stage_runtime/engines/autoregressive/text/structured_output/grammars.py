"""Answers that follow a grammar: JSON of a schema, or calls of tools. llguidance says which tokens may come next.

It is an optional dependency (extra ``engine``), imported when a stage is loaded.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.text.reasoning import THINK, THOUGHT, AnswerMatcher, Matcher
from stage_runtime.engines.autoregressive.text.structured_output import bounded_numbers, schemas
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import (
    ANY_OBJECT,
    MOST,
    WRITTEN,
    Grammar,
    GrammarRefused,
    SchemaPart,
)
from stage_runtime.errors import describe

log = logging.getLogger(__name__)

#: A parser's bound. An object with n properties that need not be there takes 4 n; a mask of 8,000 takes 0.08 s.
ITEMS_IN_ROW: Final = 8_000
ITEMS_IN_STEP: Final = 400_000
FORBIDDEN: Final = "doesn't satisfy the grammar"  # llguidance's words for a token that is not allowed


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may call this."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        *,
        number_digits: int | None = bounded_numbers.MOST_DIGITS,
    ) -> None:
        """number_digits: as of `bounded_numbers.bounded`."""
        self._number_digits = number_digits
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
        """Raises: GrammarRefused: it cannot be followed, or llguidance is not installed; it names the place."""
        if grammar.size > MOST:
            raise GrammarRefused(grammar.place, f"expected at most {MOST} characters, got {grammar.size}")
        try:
            import llguidance
        except ImportError:
            raise GrammarRefused(
                grammar.place, "this server follows no grammars: llguidance is not installed"
            ) from None
        try:
            made = self._compile(_Compiler(llguidance, self._vocabulary()), grammar)
            return self._after_thinking(made, grammar)
        except GrammarRefused:
            raise
        except Exception as error:
            raise GrammarRefused(grammar.place, f"no grammar: {describe(error)}") from error

    def _compile(self, compiler: _Compiler, grammar: Grammar) -> Matcher:
        if grammar.kind == "lark":
            return _Guided(self._of_rules(compiler, grammar), self._vocab_size, grammar.place)
        if grammar.kind == "regex":
            return _Guided(compiler.regex(grammar.text, grammar.place), self._vocab_size, grammar.place)
        schema = prepared_schema(grammar.text, grammar.place, self._number_digits)
        made = compiler.schema(schema, grammar.place)
        return _Guided(made, self._vocab_size, grammar.place)

    def _after_thinking(self, answer: Matcher, grammar: Grammar) -> Matcher:
        """A matcher that follows the grammar after the thoughts.

        Returns: ``answer`` where the model does not think, or its tags are not tokens.
        """
        known = self._tokenizer.get_added_vocab() if grammar.thinking else {}
        think, thought = known.get(THINK), known.get(THOUGHT)
        if think is None or thought is None:
            return answer
        begun = grammar.thinking == "begun"
        return AnswerMatcher(
            answer, think=think, thought=thought, begun=begun, ends=self._end_ids, size=self._vocab_size
        )

    def _of_rules(self, compiler: _Compiler, grammar: Grammar) -> Any:
        """A part that cannot be followed is named, or replaced where it need not be."""
        found = {part.rule: _part(part, self._number_digits) for part in grammar.parts}
        mark = self._special(grammar.mark)
        try:
            return compiler.rules(grammar.lark(found, mark), grammar.place)
        except GrammarRefused:
            for part in grammar.parts:
                try:
                    compiler.rules(
                        Grammar("lark", f"start: {part.rule}").lark({part.rule: found[part.rule]}), part.place
                    )
                except GrammarRefused:
                    if part.needed:
                        raise
                    found[part.rule] = prepared_schema(ANY_OBJECT, part.place, self._number_digits)
            return compiler.rules(grammar.lark(found, mark), grammar.place)

    def _special(self, mark: str) -> str:
        """A special token as a rule has it; empty: this text is not one."""
        token = self._tokenizer.get_added_vocab().get(mark) if mark else None
        return "" if token is None else f"<[{token}]>"

    def _vocabulary(self) -> Any:
        import llguidance.hf

        with self._lock:
            if self._known is None:
                own = self._tokenizer.eos_token_id
                end = self._end_ids[0] if self._end_ids and own not in self._end_ids else own
                self._known = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=end)
            return self._known


def _part(part: SchemaPart, number_digits: int | None) -> dict[str, Any]:
    try:
        return prepared_schema(part.text, part.place, number_digits)
    except GrammarRefused:
        if part.needed:
            raise
        return prepared_schema(ANY_OBJECT, part.place, number_digits)


def prepared_schema(text: str, place: str, number_digits: int | None = bounded_numbers.MOST_DIGITS) -> dict[str, Any]:
    """A schema as the compiler takes it, with bounds of numbers. Raises: GrammarRefused: no finite value follows it."""
    try:
        return schemas.prepared(bounded_numbers.bounded(json.loads(text), number_digits))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(place, str(error)) from error


class _Compiler:
    """llguidance's, with bounds that a schema of `MOST` characters mostly keeps."""

    def __init__(self, library: Any, vocabulary: Any) -> None:
        self._library = library
        self._vocabulary = vocabulary

    def schema(self, schema: Mapping[str, Any], place: str) -> Any:
        text = json.dumps(schema)
        return self.matcher(self._library.LLMatcher.grammar_from_json_schema(text, overrides=WRITTEN), place)

    def rules(self, text: str, place: str) -> Any:
        return self.matcher(self._library.LLMatcher.grammar_from_lark(text), place)

    def regex(self, text: str, place: str) -> Any:
        return self.matcher(self._library.LLMatcher.grammar_from_regex(text), place)

    def matcher(self, grammar: str, place: str) -> Any:
        """Raises: GrammarRefused: it is not a grammar, or nothing follows it."""
        limits = self._library.LLParserLimits(
            max_items_in_row=ITEMS_IN_ROW, step_max_items=ITEMS_IN_STEP, verbose_errors=False
        )
        made = self._library.LLMatcher(self._vocabulary, grammar, limits=limits, log_level=0)
        _checked_mask(made, place)
        return made


def _checked_mask(matcher: Any, place: str) -> bytes:
    """The tokens that may come next, a bit each.

    Raises: GrammarRefused: it cannot be said, or none may although the answer is not whole.
    """
    bits = b"" if matcher.is_error() else bytes(matcher.compute_bitmask())
    if matcher.is_error():
        raise GrammarRefused(place, _problem(matcher))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarRefused(place, "it cannot be followed: no value follows it from here on")
    return bits


def _problem(matcher: Any) -> str:
    return f"it cannot be followed: {matcher.get_error().splitlines()[0]}"[:400]


def follower(schema: str) -> Callable[[str], bool]:
    """Whether a text follows a schema, which `Grammars.compile` has taken; in the form in which an answer does."""
    import llguidance

    compiler = _Compiler(llguidance, llguidance.LLTokenizer("byte"))

    def follows(text: str) -> bool:
        matcher = compiler.schema(prepared_schema(schema, "response_format", None), "response_format")
        tokens = list(text.encode())
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return follows


class _Guided:
    """`Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int, place: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._place = place

    def mask(self) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(_checked_mask(self._matcher, self._place), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def take(self, token: int) -> bool:
        """Raises: GrammarRefused: the library gives up at what must follow the token, which is allowed."""
        over = self._matcher.is_stopped()  # it allows nothing more, and calls the next token an error of its own
        taken = bool(self._matcher.consume_token(token))
        if not taken and not over and self._matcher.is_error() and FORBIDDEN not in self._matcher.get_error():
            raise GrammarRefused(self._place, _problem(self._matcher))
        return taken

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def copy(self) -> _Guided:
        return _Guided(self._matcher.deep_copy(), self._vocab_size, self._place)

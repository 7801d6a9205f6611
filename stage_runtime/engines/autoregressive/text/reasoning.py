"""A model's thinking, apart from its answer: ``<think>…</think>`` where an answer begins. Pure.

Models of Qwen's, DeepSeek's and GLM's kind write it; some chat templates open it in the prompt. The tags and the blanks
around the thinking are neither thinking nor answer. The text after it is answer, whatever stands in it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stage_runtime.engines.autoregressive.text.detokenizer import overlap

THINK: Final = "<think>"
THOUGHT: Final = "</think>"
FORMS: Final = ("auto", "think", "none")


def splits(wanted: str, tokenizer: Any) -> bool:
    """Whether answers are split. wanted: of `FORMS`; ``auto``: if there is a chat template, and it or the vocabulary
    has the tags."""
    if wanted != "auto":
        return wanted == "think"
    template = getattr(tokenizer, "chat_template", None)
    return template is not None and (THOUGHT in str(template) or THOUGHT in tokenizer.get_added_vocab())


class Split(NamedTuple):
    """thought: new text of the thinking. decided: so many characters of the whole text are not answer. answer: new text
    of it.
    """

    thought: str
    decided: int
    answer: str


class ThoughtSplitter:
    """One answer's text as it comes."""

    def __init__(self, *, begun: bool) -> None:
        """begun: the prompt has opened the thinking."""
        self._held = ""  #: Not decided upon.
        self._at = 0  #: The place in the whole text where it begins.
        self._inside = begun
        self._empty = True  #: No thinking was given so far.
        self.over = False  #: The answer has begun, or may begin with the next character that is not blank.
        self._answered = False

    def feed(self, text: str) -> Split:
        self._held += text
        thought = ""
        if not self.over and not self._inside:
            self._open()
        if self._inside:
            thought = self._think()
        return Split(thought, self._at, self._answer() if self.over else "")

    def flush(self) -> Split:
        """The text that was held until the answer's end."""
        if self.over:
            return Split("", self._at, "")
        rest, inside = self._held, self._inside
        self._inside, self.over = False, True
        if not inside:
            self._held, self._answered = "", True
            return Split("", self._at, rest)
        self._skip(len(rest))
        return Split(rest.strip() if self._empty else rest.rstrip(), self._at, "")

    def _open(self) -> None:
        rest = self._held.lstrip()
        if rest.startswith(THINK):
            self._skip(len(self._held) - len(rest) + len(THINK))
            self._inside = True
        elif not THINK.startswith(rest):
            self.over = self._answered = True  # blanks before it belong to the answer

    def _think(self) -> str:
        """Thinking that is decided upon. Blanks are held: its last ones are left out."""
        end = self._held.find(THOUGHT)
        self.over = end >= 0
        whole = end if self.over else len(self._held) - overlap(self._held, THOUGHT)
        thought = self._held[:whole].rstrip()
        if self.over:
            self._inside = False
            self._skip(end + len(THOUGHT))
        else:
            self._skip(len(thought))
        if self._empty:
            thought = thought.lstrip()
            self._empty = not thought
        return thought

    def _answer(self) -> str:
        if not self._answered:  # blanks between the thinking and the answer
            rest = self._held.lstrip()
            self._skip(len(self._held) - len(rest))
            self._answered = bool(rest)
        answer, self._held = self._held, ""
        return answer

    def _skip(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count


class Matcher(Protocol):
    """One answer's place in its grammar."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next. Raises: GrammarRefused: the grammar cannot be followed on."""

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``. False: it must not."""

    @property
    def ended(self) -> bool:
        """Nothing may follow."""

    def copy(self) -> Matcher:
        """The same place, from where an answer may be tried."""


class AnswerMatcher:
    """`Matcher` of an answer that follows its grammar once the model has thought.

    The thinking is free, and cannot end the request. The model may think or not where the prompt has not opened it.
    """

    def __init__(
        self, answer: Matcher, *, think: int, thought: int, begun: bool, ends: Collection[int], size: int
    ) -> None:
        """think, thought: the tags' tokens. ends: tokens that end a request. size: of the vocabulary."""
        self._answer = answer
        self._think, self._thought = think, thought
        self._inside, self._first = begun, not begun
        free = np.ones(size, dtype=np.bool_)
        free[sorted(ends)] = False
        self._free: npt.NDArray[np.bool_] = free

    def mask(self) -> npt.NDArray[np.bool_]:
        if self._inside:
            return self._free
        mask = self._answer.mask()
        if self._first:
            mask[self._think] = True
        return mask

    def take(self, token: int) -> bool:
        if self._inside:
            self._inside = token != self._thought
            return True
        self._inside = self._first and token == self._think
        self._first = False
        return self._inside or self._answer.take(token)

    @property
    def ended(self) -> bool:
        return not self._inside and self._answer.ended

    def copy(self) -> AnswerMatcher:
        made = copy.copy(self)
        made._answer = self._answer.copy()
        return made

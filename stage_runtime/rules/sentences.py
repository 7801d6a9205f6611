"""A stream of text cut into pieces that can be spoken. Called by `web.spoken` and by the voice example's `speak`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

#: The longest piece that is synthesised at once: about ten seconds of speech, so that sound never waits for an essay.
MAX_CHARS = 160
#: Characters of a whole text that are split at once: a splitter copies what is left for each sentence.
TAKEN = 1024

_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|e\.g|i\.e|No)|\b[A-Z])\.$")
_CLOSING = r"[\"'”’)\]」』）]*"  # noqa: RUF001
#: The ends that people and models write. Those of Chinese and Japanese need no space behind them.
_END = re.compile(rf"[.!?…]+{_CLOSING}(?=\s)|[。！？]+{_CLOSING}(?=[^。！？\"'”’)\]」』）])|\n+")  # noqa: RUF001
_CLAUSE = re.compile(rf"[,;:]{_CLOSING}(?=\s)|[，；：、](?=.)")  # noqa: RUF001


class Splitter:
    """Give it text as it comes; it gives back sentences as soon as they are whole.

    A sentence is whole when what follows its end has begun: ``3.`` may go on as ``3.5``.
    """

    def __init__(self, max_chars: int = MAX_CHARS, *, clauses: bool = False) -> None:
        """clauses: a piece ends at a comma, too."""
        self._max_chars = max_chars
        self._ends = (_END, _CLAUSE) if clauses else (_END,)
        #: Text that belongs to no whole sentence yet.
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """The sentences that ``text`` completes, stripped, never empty."""
        self._rest += text
        found: list[str] = []
        while (end := self._end_of_first()) is not None:
            found.append(self._rest[:end].strip())
            self._rest = self._rest[end:].lstrip()
        return [sentence for sentence in found if speakable(sentence)]

    def flush(self) -> list[str]:
        """The text that is left once no more comes; the splitter is empty afterwards."""
        last, self._rest = self._rest.strip(), ""
        return [last] if speakable(last) else []

    @property
    def waiting(self) -> int:
        """Characters that belong to no whole sentence yet."""
        return len(self._rest)

    def _end_of_first(self) -> int | None:
        window = self._rest[: self._max_chars + 2]  # an end that lies behind counts no more: the piece is cut before
        found = [match for ends in self._ends for match in ends.finditer(window)]
        for match in sorted(found, key=lambda one: one.end()):
            if not _ABBREVIATION.search(window[: match.end()].rstrip("\n")) or "\n" in match.group():
                return match.end() if match.end() <= self._max_chars else self._clause_end()
        return self._clause_end() if len(self._rest) > self._max_chars else None

    def _clause_end(self) -> int:
        """The place at which to cut a sentence that is too long: at its last comma, else at its last space, else
        anywhere.
        """
        window = self._rest[: self._max_chars]
        for marks in (",;:", " "):
            cut = max(window.rfind(mark) for mark in marks)
            if cut > 0:
                return cut + 1
        return self._max_chars


def split(text: str) -> Iterator[str]:
    """All sentences of a whole text, one after the other."""
    splitter = Splitter()
    for at in range(0, len(text), TAKEN):
        yield from splitter.feed(text[at : at + TAKEN])
    yield from splitter.flush()


def speakable(text: str) -> bool:
    """Whether there is anything to pronounce: a lone ``-`` is not, an emoji or the sign of a currency has a name."""
    return any(character.isalnum() or unicodedata.category(character) in ("So", "Sc") for character in text)

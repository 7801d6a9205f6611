"""Tokens to text as they come: whole characters only, and nothing of a stop string. Pure, but for the tokenizer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

MOST_SILENT: Final = 32  # feeds in turn that give no text: a character has far fewer bytes
MOST_SPELT: Final = 1 << 16  # tokens of which the bytes are kept: to find them takes some decodings
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_BLANK: Final = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's letter for a space
_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")  # sentencepiece's name of a token that is one byte


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes. Source: GPT-2's ``bytes_to_unicode``."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LETTERS: Final = _byte_letters()


class Spelling:
    """The text of single tokens, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._spelt = functools.lru_cache(MOST_SPELT)(self._spell)

    def text_of(self, token: int) -> str:
        return self.text_of_all([token])

    def text_of_all(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def bytes_of(self, token: int, *, first: bool = False) -> bytes:
        """Those of its text; of a token that is a part of a character, those that it stands for.

        first: it begins a text, where tokenizers of words leave out the blank before one.
        """
        return self._spelt(token, first)

    def _spell(self, token: int, first: bool) -> bytes:
        text = self.text_of(token) if first else self._following(token)
        entry = self._tokenizer.convert_ids_to_tokens(token) if _BROKEN in text else None
        if not isinstance(entry, str):
            return text.encode(errors="replace")
        if one := _BYTE.fullmatch(entry):
            return bytes([int(one[1], 16)])
        if all(letter in _BYTE_LETTERS for letter in entry):
            return bytes(_BYTE_LETTERS[letter] for letter in entry)
        return entry.replace(_BLANK, " ").encode(errors="replace")

    def _following(self, token: int) -> str:
        """Its text behind another one."""
        if self._before is None:
            return self.text_of(token)
        known, text = self.text_of(self._before), self.text_of_all([self._before, token])
        return text[len(known) :] if text.startswith(known) else self.text_of(token)

    @functools.cached_property
    def _before(self) -> int | None:
        """A token whose text is the same in any place."""
        for token in self._tokenizer("a", add_special_tokens=False)["input_ids"][-1:]:
            if self.text_of_all([token, token]).startswith(self.text_of(token)) and self.text_of(token).strip():
                return int(token)
        return None


class Detokenizer:
    """One answer's text. Each token costs the decoding of a few, not of the whole answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        #: The place where decoding begins: before text that was given out, for tokenizers look at neighbours.
        self._prefix = 0
        self._read = 0  #: Tokens whose text was given out.
        self._silent = 0  #: Feeds since then.

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete."""
        self._tokens += tokens
        return self._next(final=False)

    def flush(self) -> str:
        """The bytes that were held back, read as well as they can be."""
        return self._next(final=True)

    def _next(self, *, final: bool) -> str:
        known = self._decode(self._tokens[self._prefix : self._read])
        text = self._decode(self._tokens[self._prefix :])
        if not final and (text.endswith(_BROKEN) or len(text) <= len(known)):
            self._silent += 1
            if self._silent < MOST_SILENT:
                return ""
            if len(text) <= len(known):  # such as special tokens; those before stay as what the next ones follow
                del self._tokens[self._read :]
                self._silent = 0
                return ""
        self._silent = 0
        self._prefix, self._read = self._read, len(self._tokens)
        return text[len(known) :]


class StopStrings:
    """Ends a text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """shown: the stop string that was reached is a part of the text."""
        self._shown = shown
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._after = ""

    def rest(self) -> str:
        """The text after the stop string that was reached last."""
        return self._after

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to give out, and the stop string that was reached."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            end = at + len(stop)
            given, self._after, self._held = self._held[: end if self._shown else at], self._held[end:], ""
            return given, stop
        return self._safe(), None

    def pass_over(self, text: str) -> str:
        """The text that is safe to give out. A stop string that is complete in ``text`` ends nothing; one that only
        begins there may be completed later.
        """
        self._held += text
        return self._safe()

    def _safe(self) -> str:
        """All but what may be the beginning of a stop string."""
        cut = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def flush(self) -> str:
        """The text that was held back: no stop string after all."""
        given, self._held = self._held, ""
        return given


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` begin ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)

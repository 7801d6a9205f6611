"""One answer's tokens as what the client gets: text without calls and stop strings, calls, and which token gave what.

Pure, but for the tokenizer. Used by `output_processor`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stage_runtime.engines.autoregressive.sampling.model_output import TokenLogprobs
from stage_runtime.engines.autoregressive.text.detokenizer import Detokenizer, Spelling, StopStrings
from stage_runtime.engines.autoregressive.text.reasoning import ThoughtSplitter
from stage_runtime.engines.autoregressive.text.tool_calls.call_parsers import Found, Parser
from stage_runtime.engines.autoregressive.text.tool_calls.calls import Call


class ShownToken(NamedTuple):
    """A token of which the client gets text. text: as bytes, which joined are those of the answer.

    first: nothing but it and tokens without text stand before, so that its spelling has no blank.
    """

    token: int
    text: bytes
    logprobs: TokenLogprobs
    first: bool


class Piece(NamedTuple):
    """The output of some tokens. ends: the text ends the answer, by the stop string ``stopped`` or by its calls.

    reasoning: of the model's thinking, which is not in ``text``.
    """

    text: str
    calls: tuple[Call, ...] = ()
    shown: tuple[ShownToken, ...] = ()
    stopped: str | None = None
    ends: bool = False
    reasoning: str = ""

    def joined(self, later: Piece) -> Piece:
        """This and what came after it as one."""
        return later._replace(
            text=self.text + later.text,
            calls=self.calls + later.calls,
            shown=self.shown + later.shown,
            reasoning=self.reasoning + later.reasoning,
        )


class AnswerText:
    """Stop strings are looked for in the text that the client gets, calls in all of it but the model's thinking."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        shows_stop: bool = False,
        min_tokens: int = 0,
        parser: Parser | None = None,
        spelling: Spelling | None = None,
        splitter: ThoughtSplitter | None = None,
    ) -> None:
        """shows_stop: the stop string is a part of the text.

        min_tokens: stop strings that are complete before more are there end nothing. parser: None: no calls.

        spelling: for `Piece.shown`; None: it is not asked for. splitter: None: thinking is text.
        """
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops, shown=shows_stop)
        self._min_tokens = min_tokens
        self._parser = parser
        self._splitter = splitter
        self._thought = ""  #: The part of the thinking that is not given so far.
        self.reasoning_tokens = 0  #: So far, of thinking and its tags.
        self._ledger = None if spelling is None else _Ledger(decode, spelling)
        self._count = 0  #: Tokens so far.
        self._text = ""  #: All that the parser has not decided upon.
        self._at = 0  #: The place in the whole text where it begins.
        self._begin = 0  #: The place in the whole text where the answer begins, which is the parser's text.

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), *, silent: int = 0) -> Piece:
        """silent: so many of the last tokens are not text, such as the end token."""
        texts: list[str] = []
        calls: list[Call] = []
        for index, token in enumerate(tokens):
            self._count += 1
            if index >= len(tokens) - silent:
                break
            if self._ledger is not None and index < len(logprobs):
                self._ledger.add(token, logprobs[index])
            text, found, stopped = self._read(self._detokenizer.feed([token]))
            texts.append(text)
            calls += found
            if stopped is not None or self._is_full:
                texts.append("" if stopped is not None else self._given(self._stops.flush()))
                return self._piece(texts, calls, stopped, ends=True)
        return self._piece(texts, calls)

    def flush(self, *, cut: bool) -> Piece:
        """Text and calls that were held until the answer's end. cut: a bound of tokens has ended the answer."""
        text, calls, stopped = self._read(self._detokenizer.flush(), final=True)
        if stopped is None and not self._is_full and self._parser is not None:
            rest, late, stopped = self._take(self._parser.flush(cut=cut))
            text, calls = text + rest, calls + late
        full = self._is_full
        if stopped is None:
            text += self._given(self._stops.flush())
        made = self._piece([text], calls, stopped, ends=True)
        return made._replace(ends=full or stopped is not None)

    @property
    def _is_full(self) -> bool:
        return self._parser is not None and self._parser.full

    def _piece(self, texts: list[str], calls: list[Call], stopped: str | None = None, *, ends: bool = False) -> Piece:
        """ends: no text follows."""
        shown = () if self._ledger is None else tuple(self._ledger.shown(final=ends))
        thought, self._thought = self._thought, ""
        return Piece("".join(texts), tuple(calls), shown, stopped, ends, thought)

    def _read(self, text: str, *, final: bool = False) -> tuple[str, list[Call], str | None]:
        """The client's part of new text, the calls in it, and the stop string that ends the answer."""
        if self._ledger is not None and text:
            self._ledger.spell(text)
        self._text += text
        if self._splitter is not None:
            text = self._split(self._splitter, text, final=final)
        if not text:
            return "", [], None
        if self._parser is None:
            return self._take(Found([(self._at - self._begin, self._at - self._begin + len(self._text))], []))
        return self._take(self._parser.feed(text))

    def _split(self, splitter: ThoughtSplitter, text: str, *, final: bool) -> str:
        """Put the thinking aside. Returns: what is answer of the new text."""
        if splitter.over and not self._begin:  # it has not thought
            return text
        if not splitter.over:
            self.reasoning_tokens = self._count
        found = splitter.feed(text)
        if final:
            rest = splitter.flush()
            found = rest._replace(thought=found.thought + rest.thought, answer=found.answer + rest.answer)
        self._thought += found.thought
        self._drop(found.decided)
        if splitter.over:
            self._begin = found.decided
            self.reasoning_tokens *= bool(self._begin)
        return found.answer

    def _take(self, found: Found) -> tuple[str, list[Call], str | None]:
        passed = ""
        for begin, end in found.spans:
            self._drop(self._begin + begin)
            passed += self._text[: end - begin]
            self._move(self._begin + end, kept=True)
        if self._count <= self._min_tokens:
            given, stopped = self._stops.pass_over(passed), None
        else:
            given, stopped = self._stops.feed(passed)
        return self._given(given), found.calls, stopped

    def _drop(self, end: int) -> None:
        if end > self._at:
            self._move(end, kept=False)

    def _move(self, end: int, *, kept: bool) -> None:
        """The text up to there is decided upon."""
        part, self._text = self._text[: end - self._at], self._text[end - self._at :]
        self._at = end
        if self._ledger is not None:
            self._ledger.decide(part, kept=kept)

    def _given(self, text: str) -> str:
        if self._ledger is not None:
            self._ledger.give(text)
        return text


class _Entry:
    """One token. left: bytes of its text that are not given or dropped."""

    def __init__(self, token: int, logprobs: TokenLogprobs) -> None:
        self.token = token
        self.logprobs = logprobs
        self.text = b""
        self.left = 0
        self.first = False


class _Ledger:
    """The bytes that each token gave, and what became of them: all in the order of the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], spelling: Spelling) -> None:
        self._decode = decode
        self._spelling = spelling
        self._silent: list[_Entry] = []  #: Tokens whose text has not come.
        self._spelled: deque[tuple[_Entry, bytes]] = deque()  #: Not decided upon.
        self._decided: deque[tuple[_Entry, bytes, bool]] = deque()  #: Not given; the last: whether it will be.
        self._entries: deque[_Entry] = deque()  #: Entries with text, in order; not shown.
        self._begun = False

    def add(self, token: int, logprobs: TokenLogprobs) -> None:
        self._silent.append(_Entry(token, logprobs))

    def spell(self, text: str) -> None:
        """The tokens since the last text have given this one."""
        entries, self._silent = self._silent, []
        for entry, part in zip(entries, self._parts(entries, text.encode(errors="replace")), strict=True):
            if part:
                entry.left, entry.first, self._begun = len(part), not self._begun, True
                self._spelled.append((entry, part))
                self._entries.append(entry)

    def _parts(self, entries: Sequence[_Entry], text: bytes) -> list[bytes]:
        """The bytes of each, from the last one on; the first one of those that fit no spelling takes what is left."""
        parts: list[bytes] = []
        for index in range(len(entries) - 1, -1, -1):
            token = entries[index].token
            own = self._spelling.bytes_of(token)
            if index and not (own and text.endswith(own)):
                own = b"" if not self._decode([token]) else text
            elif not index:
                own = text
            parts.append(own)
            text = text[: len(text) - len(own)]
        return parts[::-1]

    def decide(self, text: str, *, kept: bool) -> None:
        """The next text will be given (kept), or is not for the client."""
        for entry, part in _taken(self._spelled, len(text.encode(errors="replace"))):
            self._decided.append((entry, part, kept))

    def give(self, text: str) -> None:
        """The client gets this text."""
        count = len(text.encode(errors="replace"))
        while self._decided and (count or not self._decided[0][2]):
            entry, part, kept = self._decided.popleft()
            now = part[:count] if kept else part
            if kept:
                entry.text += now
                count -= len(now)
            entry.left -= len(now)
            if len(now) < len(part):
                self._decided.appendleft((entry, part[len(now) :], kept))

    def shown(self, *, final: bool) -> list[ShownToken]:
        """The tokens whose text is given, as far as it will be. final: no more will."""
        found = []
        while self._entries and (final or not self._entries[0].left):
            entry = self._entries.popleft()
            if entry.text:
                found.append(ShownToken(entry.token, entry.text, entry.logprobs, entry.first))
        return found


def _taken(queue: deque[tuple[_Entry, bytes]], count: int) -> list[tuple[_Entry, bytes]]:
    """The first ``count`` bytes of a queue."""
    taken = []
    while count and queue:
        entry, part = queue.popleft()
        taken.append((entry, part[:count]))
        if len(part) > count:
            queue.appendleft((entry, part[count:]))
        count -= min(len(part), count)
    return taken

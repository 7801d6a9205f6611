"""The order of what is spoken: the pieces of a client's text as sentences, in turn, within a bound. Pure.

An utterance is the text up to an ``input.done``. Its sentences are spoken one after the other, the first as soon as it
is whole.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.rules import sentences
from stage_runtime.rules.sentences import Splitter
from stage_runtime.web.sound import formats
from stage_runtime.web.spoken.spoken_messages import ClientMessage, InputDone, InputText, SessionClose, SpeechConfig

MAX_CHARS: Final = 64 << 10  # that wait to be spoken: an hour of speech
MAX_UTTERANCES: Final = 256  # that wait


class Sentence(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of text to speak. utterance, index: its place among all, and in its utterance."""

    utterance: int
    index: int
    text: str
    config: SpeechConfig


class UtteranceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """All of an utterance was spoken: so many sentences."""

    utterance: int
    sentences: int


class Script:
    """One client's text."""

    def __init__(self) -> None:
        self._config: SpeechConfig | None = None
        self._waiting: deque[Sentence | UtteranceEnd] = deque()
        self._text: _Text | None = None  #: The text of the utterance that has begun and not ended.
        self._utterances = 0  #: That have ended.
        self._chars = 0  #: Characters of the sentences that wait.
        self.closing = False  #: The client sends nothing more.

    @property
    def waiting_chars(self) -> int:
        return self._chars + (0 if self._text is None else self._text.waiting)

    @property
    def has_next(self) -> bool:
        """A sentence or the end of an utterance waits."""
        return bool(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits, and no utterance has begun."""
        return not self._waiting and self._text is None

    def take(self, message: ClientMessage) -> None:
        """A message of the client.

        Raises: RequestError: invalid_request, too_large: nothing of it is taken.
        """
        if self.closing:
            raise InvalidRequest("type: nothing follows session.close", param="type")
        match message:
            case SpeechConfig():
                self._configure(message)
            case InputText(text=text):
                self._add(text)
            case InputDone():
                self._end()
            case SessionClose():
                if self._text is not None:
                    self._end()
                self.closing = True

    def next(self) -> Sentence | UtteranceEnd | None:
        """The text that is to be spoken now; None: more text is needed."""
        if not self._waiting:
            return None
        found = self._waiting.popleft()
        if isinstance(found, Sentence):
            self._chars -= len(found.text)
        return found

    def _configure(self, config: SpeechConfig) -> None:
        if self._text is not None:
            problem = "an utterance has begun: send it before its first input.text, or after input.done"
            raise InvalidRequest(f"session.config: {problem}", param="type")
        formats.check(config.format, param="response_format")
        self._config = config

    def _add(self, text: str) -> None:
        config = self._configured()
        if self.waiting_chars + len(text) > MAX_CHARS:
            problem = f"{self.waiting_chars} characters wait to be spoken, and {len(text)} more are over {MAX_CHARS}"
            raise RequestError("too_large", f"text: {problem}", param="text")
        if self._text is None:
            self._text = _Text(config)
        self._queue(self._text.feed(text), self._text)

    def _end(self) -> None:
        config = self._configured()
        if sum(isinstance(one, UtteranceEnd) for one in self._waiting) >= MAX_UTTERANCES:
            raise RequestError("too_large", f"{MAX_UTTERANCES} utterances wait to be spoken")
        text, self._text = self._text or _Text(config), None
        self._queue(text.flush(), text)
        self._waiting.append(UtteranceEnd(utterance=self._utterances, sentences=text.count))
        self._utterances += 1

    def _configured(self) -> SpeechConfig:
        if self._config is None:
            raise InvalidRequest("type: expected a session.config first", param="type")
        return self._config

    def _queue(self, found: list[str], text: _Text) -> None:
        for sentence in found:
            self._waiting.append(
                Sentence(utterance=self._utterances, index=text.count, text=sentence, config=text.config)
            )
            text.count += 1
            self._chars += len(sentence)


class _Text:
    """The text of one utterance."""

    def __init__(self, config: SpeechConfig) -> None:
        self.config = config
        self.count = 0  #: The count of its sentences so far.
        granularity = config.split_granularity
        self._splitter = None if granularity == "none" else Splitter(clauses=granularity == "clause")
        self._whole = ""  #: The text so far, where nothing splits it.

    @property
    def waiting(self) -> int:
        """Characters that are in no sentence yet."""
        return len(self._whole) if self._splitter is None else self._splitter.waiting

    def feed(self, text: str) -> list[str]:
        if self._splitter is not None:
            return self._splitter.feed(text)
        self._whole += text
        return []

    def flush(self) -> list[str]:
        if self._splitter is not None:
            return self._splitter.flush()
        text = self._whole.strip()
        return [text] if sentences.speakable(text) else []

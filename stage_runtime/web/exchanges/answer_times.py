"""The service metrics of one answer: first token, first audio, gaps, underruns.

Pure: time is an argument. `serving` shows it each event of an answer as it is read, `metrics` counts it when the answer
has ended. Times to the first output and gaps are those of streamed answers: any other is handed over as a whole. Text
and audio that the client does not get are not counted: the whole behind the pieces, and what it did not ask for.
"""

from __future__ import annotations

from typing import Any, Final

from stage_runtime.coordinator.answering.token_counts import TokenCounts
from stage_runtime.coordinator.events import AnswerEvent
from stage_runtime.web.translating.answer_outputs import StreamedKinds
from stage_runtime.wire.values import Audio, OmniRequest, Text, Usage

_KINDS: Final[dict[str, type[Any]]] = {"text": Text, "audio": Audio}


class AnswerTimes:
    """The times of one answer, in seconds; ``begun_at`` and every ``now`` are on one clock."""

    def __init__(self, begun_at: float, request: OmniRequest) -> None:
        self.streamed = request.stream
        self.first_token_s: float | None = None
        self.first_audio_s: float | None = None
        #: Seconds between chunks with text; a token each, where a stage streams tokens.
        self.token_gaps_s: list[float] = []
        self.tokens = TokenCounts()
        self.audio_s = 0.0  #: Length of the sound that was given.
        self.underruns = 0  #: A client that plays what it gets has had to stop so often.
        #: A pipeline's own route shows all, whatever ``modalities`` mean to its stages.
        shows_all = request.kind == "pipeline"
        self._shown = {kind for name, kind in _KINDS.items() if shows_all or name in request.modalities}
        self._streamed_kinds = StreamedKinds()
        self._begun_at = begun_at
        self._last_text_at: float | None = None
        self._last_audio_at = begun_at
        self._played_until = 0.0  #: When that client has played all that it has.

    @property
    def real_time_factor(self) -> float | None:
        """Time until the last sound came, by the sound's length. A value below 1: made faster than it is played."""
        return (self._last_audio_at - self._begun_at) / self.audio_s if self.audio_s > 0 else None

    def note(self, event: AnswerEvent, now: float) -> None:
        """A chunk or a result: its data is one output or a list of them."""
        data = event.data
        self.tokens.note(event)
        for value in data if type(data) is list else (data,):
            kind = type(value)
            if kind is Usage:
                self.tokens.add(event.stage, value)
            elif kind not in self._shown or self._streamed_kinds.repeats(event, kind):
                continue
            elif kind is Text:
                self._text(now)
            else:
                self._audio(_seconds(value), now)

    def _text(self, now: float) -> None:
        if self._last_text_at is None:
            self.first_token_s = now - self._begun_at
        else:
            self.token_gaps_s.append(now - self._last_text_at)
        self._last_text_at = now

    def _audio(self, seconds: float, now: float) -> None:
        if self.first_audio_s is None:
            self.first_audio_s = now - self._begun_at
            self._played_until = now
        elif now > self._played_until:
            self.underruns += 1
            self._played_until = now
        self._played_until += seconds
        self._last_audio_at = now
        self.audio_s += seconds


def _seconds(audio: Audio) -> float:
    shape = getattr(audio.samples, "shape", None)
    return shape[0] / audio.sample_rate if shape and audio.sample_rate else 0.0

"""The service metrics of one answer: first token, first audio, gaps, underruns.

Pure: time is an argument. `serving` shows it each event of an answer as it is read, `metrics` counts it when the answer
has ended. Times to the first output and gaps are those of streamed answers: any other is handed over as a whole.
"""

from __future__ import annotations

from typing import Any

from stage_runtime.wire.values import Audio, Text, Usage


class AnswerTimes:
    """Of one answer. Seconds; ``begun_at`` and every ``now`` are on one clock."""

    def __init__(self, begun_at: float, *, streamed: bool) -> None:
        self.streamed = streamed
        self.first_token_s: float | None = None
        self.first_audio_s: float | None = None
        self.token_gaps_s: list[float] = []  #: Between chunks with text; a token each, where a stage streams tokens.
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.audio_s = 0.0  #: Length of the sound that was given.
        self.underruns = 0  #: A client that plays what it gets has had to stop so often.
        self._begun_at = begun_at
        self._last_text_at: float | None = None
        self._last_audio_at = begun_at
        self._played_until = 0.0  #: When that client has played all that it has.

    @property
    def real_time_factor(self) -> float | None:
        """Time until the last sound came, by the sound's length. Below 1: made faster than it is played."""
        return (self._last_audio_at - self._begun_at) / self.audio_s if self.audio_s > 0 else None

    def note(self, data: Any, now: float) -> None:
        """A chunk's or result's data: one output or a list of them."""
        for value in data if type(data) is list else (data,):
            kind = type(value)
            if kind is Text:
                self._text(now)
            elif kind is Audio:
                self._audio(_seconds(value), now)
            elif kind is Usage:
                self.prompt_tokens += value.prompt_tokens
                self.completion_tokens += value.completion_tokens

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

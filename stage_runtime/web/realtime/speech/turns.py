"""The begin and the end of a turn of speech: a rule over the scores of a voice detector, one score at a time. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

WINDOW_MS: Final = 32  # what a score covers
MIN_SPEECH_MS: Final = 128  # a blip of 60 ms raises the scores of up to three windows
HYSTERESIS: Final = 0.15  # a turn ends below the threshold by so much: it does not flicker


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    threshold: float
    silence_ms: int


class SpeechStarted(msgspec.Struct, frozen=True):
    """at_ms: where the speech began, which is before the window that decided it."""

    at_ms: int


class SpeechStopped(msgspec.Struct, frozen=True):
    """at_ms: the end of the silence that ended the turn."""

    at_ms: int


class TurnState(msgspec.Struct):
    """The turns of one buffer. Times are milliseconds of all sound that was appended."""

    now_ms: int = 0  #: Up to here it was scored.
    speaking: bool = False
    loud_ms: int = 0  #: Milliseconds of speech without a pause, up to now.
    quiet_ms: int = 0  #: Milliseconds of silence inside of a turn, up to now.

    def take(self, score: float, rule: Rule) -> SpeechStarted | SpeechStopped | None:
        """The edge that the next window brings, if any."""
        self.now_ms += WINDOW_MS
        if self.speaking:
            return self._in_speech(score, rule)
        if score >= rule.threshold:
            self.loud_ms += WINDOW_MS
        elif score < max(0.01, rule.threshold - HYSTERESIS):
            self.loud_ms = 0
        if self.loud_ms < MIN_SPEECH_MS:
            return None
        self.speaking, self.quiet_ms = True, 0
        return SpeechStarted(self.now_ms - self.loud_ms)

    def _in_speech(self, score: float, rule: Rule) -> SpeechStopped | None:
        if score >= rule.threshold:
            self.quiet_ms = 0
        elif self.quiet_ms or score < max(0.01, rule.threshold - HYSTERESIS):
            self.quiet_ms += WINDOW_MS
        if self.quiet_ms + WINDOW_MS <= rule.silence_ms:
            return None
        self.speaking, self.loud_ms = False, 0
        return SpeechStopped(self.now_ms)

    def restart(self, at_ms: int) -> None:
        """Nothing before is part of a turn."""
        self.now_ms, self.speaking, self.loud_ms, self.quiet_ms = at_ms, False, 0, 0

"""The counts of live sessions, from the events that they are sent. Times are passed in; `room` has the clock."""

from __future__ import annotations

from typing import Any

from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Counter, Histogram, Samples, merged


class SessionCounts:
    """The counts of all sessions of a coordinator."""

    def __init__(self) -> None:
        self.open = 0  #: Sessions.
        self._opened = False  #: There was one: a coordinator without live speech serves none of this.
        self._turns = Counter(catalog.REALTIME_TURNS)
        self._barge_ins = Counter(catalog.REALTIME_BARGE_INS)
        self._first_sound = Histogram(catalog.REALTIME_FIRST_SOUND)
        for counter in (self._turns, self._barge_ins):
            counter.add(amount=0)

    def begin(self) -> SessionCount:
        """A session is open. `SessionCount.close` must follow."""
        self.open += 1
        self._opened = True
        return SessionCount(self)

    def turn(self) -> None:
        self._turns.add()

    def barge_in(self) -> None:
        self._barge_ins.add()

    def first_sound(self, seconds: float) -> None:
        self._first_sound.observe(seconds)

    def samples(self) -> Samples:
        if not self._opened:
            return {}
        counted = (each.samples() for each in (self._turns, self._barge_ins, self._first_sound))
        return merged([{catalog.REALTIME_SESSIONS: {(): self.open}}, *counted])


class SessionCount:
    """The counts of one session."""

    def __init__(self, counts: SessionCounts) -> None:
        self._counts = counts
        self._turn_ended_at: float | None = None  #: The end of the last turn, while no sound has answered it.

    def sent(self, event: dict[str, Any], now: float) -> None:
        """An event of the session, by GA's names. now: seconds of any clock that only goes forward."""
        match event["type"]:
            case "input_audio_buffer.committed":
                self._counts.turn()
                self._turn_ended_at = now
            case "response.output_audio.delta" if self._turn_ended_at is not None:
                self._counts.first_sound(now - self._turn_ended_at)
                self._turn_ended_at = None
            case "response.done":
                details = event["response"].get("status_details") or {}
                if details.get("reason") == "turn_detected":
                    self._counts.barge_in()

    def close(self) -> None:
        self._counts.open -= 1

"""The knowledge of the coordinator of an instance's engines: counts of each, and the wave. Events in, instructions out.
Pure.

A wave is the time in which engines that step in lockstep all run: it begins when one of them has work, and they end it
together when none has (`data_parallel.dp_engine`). Here the others are woken. Engines without lockstep have no waves.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

PUBLISH_EVERY_S: Final = 0.1  # counts; a balancer expects by itself what it sends in between


class WaveBegun(msgspec.Struct, frozen=True):
    """An engine has work while all rest, and steps."""

    wave: int
    engine: int


class Counts(msgspec.Struct, frozen=True):
    """An engine's requests after a step."""

    engine: int
    step: int
    waiting: int
    running: int


class EnginesScaled(msgspec.Struct, frozen=True):
    engines: int


class EngineReplaced(msgspec.Struct, frozen=True):
    """An engine has ended, and another one has its rank: its steps are counted from the start again."""

    engine: int


class Subscribed(msgspec.Struct, frozen=True):
    """A client has come that knows nothing yet."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


WaveEvent: TypeAlias = WaveBegun | Counts | EnginesScaled | EngineReplaced | Subscribed | Tick


class PublishState(msgspec.Struct, frozen=True):
    """An order: publish this to all clients. counts: waiting and running requests by rank."""

    counts: tuple[tuple[int, int], ...]


class SendStartWave(msgspec.Struct, frozen=True):
    """An order: start this wave in all engines. exclude: the rank of the one that has begun it."""

    wave: int
    exclude: int


Instruction: TypeAlias = PublishState | SendStartWave


class _Engine:
    def __init__(self) -> None:
        self.counts = (0, 0)
        self.newest = -1  #: The step of its newest counts; older ones are stale.


class Waves:
    """The coordinator's state. It changes in `on` alone."""

    def __init__(self, engines: int) -> None:
        self._engines = [_Engine() for _ in range(engines)]
        self.begun = -1  #: The newest wave that was started. Never falls.
        self.stale = 0  #: Counts that were refused.
        self._changed = False  #: Counts that are not published.
        self._published_at = float("-inf")

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        return tuple(engine.counts for engine in self._engines)

    def due_in(self, now: float) -> float | None:
        """Seconds until a `Tick` is wanted; None: not before the next event."""
        return max(self._published_at + PUBLISH_EVERY_S - now, 0.0) if self._changed else None

    def on(self, event: WaveEvent, now: float) -> list[Instruction]:
        """Take an event. Those of engines that do not exist, or of the past, change nothing."""
        match event:
            case WaveBegun(wave, engine):
                if wave <= self.begun or not 0 <= engine < len(self._engines):
                    return []
                self.begun = wave
                return [SendStartWave(wave, engine)]
            case Counts():
                return self._count(event, now)
            case EnginesScaled(engines):
                return self._scale(engines, now)
            case EngineReplaced(engine):
                return self._replace(engine, now)
            case Subscribed():
                return [self._publish(now)]
            case Tick():
                return self._publish_due(now)

    def _count(self, event: Counts, now: float) -> list[Instruction]:
        if not 0 <= event.engine < len(self._engines):
            return []
        engine = self._engines[event.engine]
        if event.step <= engine.newest:
            self.stale += 1
            return []
        engine.newest = event.step
        counts = (event.waiting, event.running)
        if counts == engine.counts:
            return []
        engine.counts = counts
        self._changed = True
        return self._publish_due(now)

    def _scale(self, engines: int, now: float) -> list[Instruction]:
        if engines < 1:
            return []
        self._engines = (self._engines + [_Engine() for _ in range(engines - len(self._engines))])[:engines]
        return [self._publish(now)]

    def _replace(self, engine: int, now: float) -> list[Instruction]:
        if not 0 <= engine < len(self._engines):
            return []
        self._engines[engine] = _Engine()
        return [self._publish(now)]

    def _publish_due(self, now: float) -> list[Instruction]:
        if not self._changed or now < self._published_at + PUBLISH_EVERY_S:
            return []
        return [self._publish(now)]

    def _publish(self, now: float) -> PublishState:
        self._changed, self._published_at = False, now
        return PublishState(self.counts)

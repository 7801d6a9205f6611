"""``python -m stage_runtime.engines.autoregressive.data_parallel FRONT OUTPUT BACK GREETING ENGINES PARENT``.

The coordinator of the engines of one instance.

Three sockets: FRONT publishes counts to clients and takes their messages, OUTPUT takes those of engines, BACK
publishes the start of waves to engines. A message that cannot be understood is dropped.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from stage_runtime.engines.autoregressive.process import parents
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    READY,
    EngineCoreRequestType,
    Replaced,
    ScaleEngines,
    SchedulerStats,
    StartWave,
)
from stage_runtime.errors import UNDECODABLE, describe
from stage_runtime.rules.autoregressive import waves
from stage_runtime.sockets import multipart

log = logging.getLogger(__name__)

SUBSCRIBED: Final = b"\x01"
UNSUBSCRIBED: Final = b"\x00"
_FromClient: TypeAlias = Replaced | ScaleEngines


class _FromEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an `EngineCoreOutputs` that matter here."""

    engine_index: int = 0
    scheduler_stats: SchedulerStats | None = None
    start_wave: int | None = None


class DPCoordinatorProc:
    def __init__(self, context: multipart.SocketContext, front: str, output: str, back: str, engines: int) -> None:
        self._publish_front = context.bind("XPUB", front)
        self._output_back = context.bind("PULL", output)
        self._publish_back = context.bind("XPUB", back)
        self._state = waves.Waves(engines)
        self._greeted: set[bytes] = set()
        self._from_client = msgspec.msgpack.Decoder(_FromClient)
        self._from_engine = msgspec.msgpack.Decoder(_FromEngine)

    def run(self) -> None:
        """Passes messages between clients and engines until the process is killed."""
        poller = multipart.Poller(self._publish_front, self._output_back, self._publish_back)
        sources = (
            (self._publish_front, self._on_client),
            (self._output_back, self._on_engine),
            (self._publish_back, self._on_subscription),
        )
        while True:
            if not poller.wait(self._state.due_in(time.monotonic())):
                self._on(waves.Tick())
            for socket, take in sources:
                while (frames := socket.receive()) is not None:
                    try:
                        take(frames)
                    except UNDECODABLE as error:
                        log.warning("dropped a message: %s", describe(error))
                    self._on(waves.Tick())  # a busy socket must not keep counts back

    def _on_client(self, frames: Sequence[memoryview]) -> None:
        received = bytes(frames[0])
        if received == UNSUBSCRIBED:
            return
        if received == SUBSCRIBED:
            self._on(waves.Subscribed())
            return
        match self._from_client.decode(received):
            case Replaced(engine):
                self._on(waves.EngineReplaced(engine))
            case ScaleEngines(engines):
                self._on(waves.EnginesScaled(engines))

    def _on_engine(self, frames: Sequence[memoryview]) -> None:
        if bytes(frames[0]) == READY:
            self._greeted.add(bytes(frames[-1]))
            self._publish_back.send([READY, bytes(frames[-1])])
            return
        received = self._from_engine.decode(frames[0])
        if (stats := received.scheduler_stats) is not None:
            self._on(waves.Counts(received.engine_index, stats.step_counter, stats.waiting, stats.running))
        if received.start_wave is not None:
            self._on(waves.WaveBegun(received.start_wave, received.engine_index))

    def _on_subscription(self, frames: Sequence[memoryview]) -> None:
        """An engine listens. It is not known which one: all that have greeted are answered again."""
        if bytes(frames[0]) == SUBSCRIBED:
            for name in self._greeted:
                self._publish_back.send([READY, name])

    def _on(self, event: waves.WaveEvent) -> None:
        for instruction in self._state.on(event, time.monotonic()):
            match instruction:
                case waves.PublishState():
                    self._publish_front.send([msgspec.msgpack.encode(instruction)])
                case waves.SendStartWave(wave, exclude):
                    order = msgspec.msgpack.encode(StartWave(wave, exclude))
                    self._publish_back.send([EngineCoreRequestType.START_DP_WAVE.value, order])


def main() -> None:
    front, output, back, greeting = sys.argv[1:5]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parents.end_with(int(sys.argv[6]))
    logging.basicConfig(level=logging.WARNING, format="coordinator of engines: %(levelname)s %(message)s")
    context = multipart.SocketContext()
    coordinator = DPCoordinatorProc(context, front, output, back, int(sys.argv[5]))
    greeter = context.connect("PUSH", greeting)
    greeter.send([READY], block=True)
    greeter.close(linger_ms=multipart.LAST_WORDS_MS)
    coordinator.run()


if __name__ == "__main__":
    main()

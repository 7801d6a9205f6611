"""Interruptions of live speech: the voice example behind /v1/realtime, spoken to as fast as a microphone would.

    python -m benchmarks.live [--rounds 8] [--url URL] [--json]

Each round asks a question aloud and hears the whole answer; begins a long answer, speaks over it, and hears the answer
to that; and begins a long answer again with a blip of 60 ms on the microphone. Printed are the time from the end of a
turn (``speech_stopped``) to the first sound of its answer, undisturbed and after an interruption, and their ratio; the
time from the detector's edge (``speech_started``) to the end of the response that it interrupts; pieces of sound that
came after that end; and how many blips interrupted something. Times are those of this client. The load of the machine
stands beside them: on a busy one all of them grow.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import websockets

from examples.voice.talk import PIECE_S, RATE, microphone
from stage_runtime import whole_pipelines

EXAMPLE: Final = Path(__file__).parents[1] / "examples/voice"
LONG: Final = "Tell me a long story about a sailor and the sea."
WITHIN_S: Final = 180.0
BLIP_S: Final = 0.06
SESSION: Final[dict[str, Any]] = {
    "type": "realtime",
    "audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 500}}},
}


class Heard(msgspec.Struct):
    """An event of the server, and when it came."""

    at: float
    event: dict[str, Any]


class Live:
    """A connection, and all that has come over it."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self._connection = connection
        self.heard: list[Heard] = []
        self._came = asyncio.Event()

    async def read(self) -> None:
        async for message in self._connection:
            self.heard.append(Heard(time.monotonic(), msgspec.json.decode(message)))
            if self.heard[-1].event["type"] == "error":
                print("error:", self.heard[-1].event["error"]["message"])
            self._came.set()

    async def send(self, type: str, **fields: Any) -> None:
        await self._connection.send(msgspec.json.encode({"type": type, **fields}).decode())

    async def speak(self, samples: np.ndarray) -> None:
        """Sends samples as fast as they are spoken."""
        step, begun = int(RATE * PIECE_S), time.monotonic()
        for index, at in enumerate(range(0, len(samples), step)):
            piece = base64.b64encode(samples[at : at + step].tobytes()).decode()
            await self.send("input_audio_buffer.append", audio=piece)
            await asyncio.sleep(max(0.0, begun + (index + 1) * PIECE_S - time.monotonic()))

    async def after(self, place: int, type: str, response: str | None = None) -> tuple[int, Heard]:
        """The first event of a type from ``place`` on, and the place behind it."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for index in range(place, len(self.heard)):
                    event = self.heard[index].event
                    if event["type"] == type and response in (None, response_of(event)):
                        return index + 1, self.heard[index]
                place = len(self.heard)
                self._came.clear()
                await self._came.wait()


def response_of(event: dict[str, Any]) -> str | None:
    found: str | None = event.get("response_id") or event.get("response", {}).get("id")
    return found


async def long_answer(live: Live) -> tuple[int, str]:
    """Begin one, up to its first sound. Its place and id."""
    place = len(live.heard)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}
    await live.send("conversation.item.create", item=item)
    await live.send("response.create")
    place, created = await live.after(place, "response.created")
    response = response_of(created.event)
    assert response is not None
    place, _sound = await live.after(place, "response.output_audio.delta", response)
    return place, response


async def first_sound_s(live: Live, place: int) -> float:
    """Seconds from the end of a turn to the first sound of its answer; the answer is heard to its end."""
    place, stopped = await live.after(place, "input_audio_buffer.speech_stopped")
    place, created = await live.after(place, "response.created")
    response = response_of(created.event)
    place, sound = await live.after(place, "response.output_audio.delta", response)
    await live.after(place, "response.done", response)
    return sound.at - stopped.at


async def interrupted(live: Live, question: np.ndarray) -> dict[str, float] | None:
    """One long answer that is spoken over; None: it was over before somebody spoke."""
    place, response = await long_answer(live)
    speaking = asyncio.create_task(live.speak(question))
    at, edge = await live.after(place, "input_audio_buffer.speech_started")
    _, done = await live.after(place, "response.done", response)
    next_s = await first_sound_s(live, at)
    await speaking
    if done.event["response"]["status"] != "cancelled":
        return None
    end = live.heard.index(done)
    late = [one for one in live.heard[end + 1 :] if response_of(one.event) == response]
    return {"cancel_s": done.at - edge.at, "next_s": next_s, "late": float(len(late))}


async def blipped(live: Live, question: np.ndarray) -> bool:
    """Whether 60 ms of a voice interrupt a long answer."""
    place, response = await long_answer(live)
    loud = int(np.argmax(np.abs(question)))
    blip = question[loud : loud + int(RATE * BLIP_S)]
    silence = np.zeros(int(RATE * 0.5), np.int16)
    await live.speak(np.concatenate([silence, blip, silence]))
    _, done = await live.after(place, "response.done", response)
    began = [one for one in live.heard[place:] if one.event["type"] == "input_audio_buffer.speech_started"]
    return bool(began) or done.event["response"]["status"] == "cancelled"


async def measure(url: str, rounds: int) -> dict[str, Any]:
    question = microphone(EXAMPLE / "question.wav")
    undisturbed: list[float] = []
    cut: list[dict[str, float]] = []
    missed = blips = 0
    load: list[float] = []
    for number in range(rounds + 1):  # the first one warms up
        address = f"{url.replace('http', 'ws')}/v1/realtime?model=voice"
        async with websockets.connect(address, max_size=None) as connection:
            live = Live(connection)
            reading = asyncio.create_task(live.read())
            await live.send("session.update", session=SESSION)
            place = len(live.heard)
            await live.speak(question)
            alone_s = await first_sound_s(live, place)
            over = await interrupted(live, question)
            blip = await blipped(live, question)
            reading.cancel()
        if number:
            undisturbed.append(alone_s)
            load.append(os.getloadavg()[0])
            missed += over is None
            blips += blip
            if over is not None:
                cut.append(over)
    ratio = statistics.median(one["next_s"] for one in cut) / statistics.median(undisturbed) if cut else None
    return {
        "rounds": rounds,
        "load": [round(min(load), 1), round(max(load), 1)],
        "first_sound_s": spread(undisturbed),
        "first_sound_after_interruption_s": spread([one["next_s"] for one in cut]),
        "ratio_of_medians": None if ratio is None else round(ratio, 2),
        "cancel_ms": spread([one["cancel_s"] * 1e3 for one in cut]),
        "late_events": int(sum(one["late"] for one in cut)),
        "ended_before_the_interruption": missed,
        "blips_that_interrupted": blips,
    }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "least": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "most": round(max(values), 3),
    }


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with whole_pipelines.run_pipeline(EXAMPLE / "pipeline.yaml") as running:
        yield running.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--url", help="of a pipeline that runs; without it the example is started")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with served(given.url) as url:
        found = asyncio.run(measure(url, given.rounds))
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name.replace('_', ' '):36} {value}")


if __name__ == "__main__":
    main()

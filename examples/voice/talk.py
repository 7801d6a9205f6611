"""Talk to the voice pipeline live, by the official client: a recording is sent as fast as a microphone would.

    omni up -f examples/voice/pipeline.yaml
    python examples/voice/talk.py [QUESTION.wav] [--url URL] [--out answer.wav]

The server finds where the question ends, and answers. Needs `openai`, and `soundfile` to read the recording.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import wave
from pathlib import Path

import numpy as np
import soundfile
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

RATE = 24_000  # of the interface's PCM
PIECE_S = 0.1
SILENCE_S = 1.0  # behind the recording: the end of a question is a pause


def microphone(file: Path) -> np.ndarray:
    """A recording as 16 bit samples at `RATE`, with a pause behind it."""
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    places = np.arange(int(len(mono) * RATE / rate)) * rate / RATE
    sound = np.interp(places, np.arange(len(mono)), mono)
    return (np.append(sound, np.zeros(int(RATE * SILENCE_S))) * 32767).astype("<i2")


async def speak(session: AsyncRealtimeConnection, samples: np.ndarray, *, piece_s: float = PIECE_S) -> None:
    step = int(RATE * PIECE_S)
    for at in range(0, len(samples), step):
        piece = base64.b64encode(samples[at : at + step].tobytes()).decode()
        await session.input_audio_buffer.append(audio=piece)
        await asyncio.sleep(piece_s)


async def listen(session: AsyncRealtimeConnection) -> bytes:
    """Print what is said, and return the answer's sound."""
    sound = bytearray()
    async for event in session:
        match event.type:
            case "conversation.item.input_audio_transcription.completed":
                print(f"heard    {event.transcript.strip()}")
            case "response.output_audio_transcript.done":
                print(f"answer   {event.transcript.strip()}")
            case "response.output_audio.delta":
                sound += base64.b64decode(event.delta)
            case "response.done":
                print(f"status   {event.response.status}")
                return bytes(sound)
            case "error":
                raise SystemExit(event.error.message)
    return bytes(sound)


async def talk(url: str, question: Path, out: Path, *, piece_s: float = PIECE_S) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    async with client, client.realtime.connect(model="voice") as session:
        await session.session.update(session={"type": "realtime", "audio": {"input": {"transcription": {}}}})
        speaking = asyncio.create_task(speak(session, microphone(question), piece_s=piece_s))
        sound = await listen(session)
        await speaking
    with wave.open(str(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", type=Path, default=Path(__file__).with_name("question.wav"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    given = parser.parse_args()
    asyncio.run(talk(given.url, given.question, given.out))

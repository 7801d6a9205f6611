"""`make demo`: start the voice pipeline, ask it a recorded question, show and keep what it answers.

    python examples/voice/demo.py [QUESTION.wav] [--url URL] [--out answer.wav] [--once]

It runs `omni up` itself without ``--url``, and leaves it running for more questions until ^C. It is also the smallest
whole client of a spoken chat: one POST, server-sent events, raw 24 kHz sound (`ask`).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PCM_RATE = 24_000  # OpenAI's pcm16 is 24 kHz mono by definition
USUAL_URL = "http://127.0.0.1:8000"
TELLING = (" converting ", " waiting ", " ready", "up in ")  # of all lines about starting, those that say something new
ANSWERS_AT = " answers at "


class Failed(Exception):
    """The demo cannot go on; the message is for whoever runs it."""


class Reply:
    """One streamed answer: what came, and how many seconds after asking."""

    def __init__(self) -> None:
        self.id = ""
        self.text = ""
        self.transcript: str | None = None
        self.facts: list[dict[str, Any]] = []
        self.sound = b""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.first_sound_s: float | None = None
        self.finish: str | None = None
        self.total_s = 0.0


def ask(url: str, question: bytes | str, *, show: Callable[[str], None] = lambda text: None, **params: Any) -> Reply:
    """Ask a sound file's bytes, or a text; answered in text and sound. ``show`` gets the words as they come.

    Raises: Failed: the server refused, or the answer broke off.
    """
    part: dict[str, Any] = {"type": "text", "text": question}
    if isinstance(question, bytes):
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(question).decode(), "format": "wav"}}
    body = {
        "model": "voice",
        "messages": [{"role": "user", "content": [part]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "joe", "format": "pcm16"},
        "stream": True,
        **params,
    }
    reply, began = Reply(), time.monotonic()
    for event in _events(f"{url}/v1/chat/completions", body):
        _take(reply, event, time.monotonic() - began, show)
    reply.total_s = time.monotonic() - began
    return reply


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
        if response.status_code != 200:
            raise Failed(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Failed(str(event["error"]))
                yield event
    raise Failed("the answer broke off")


def _take(reply: Reply, event: dict[str, Any], at: float, show: Callable[[str], None]) -> None:
    reply.id = event["id"]
    for note in event.get("notes", ()):
        if note["name"] == "transcript":
            reply.transcript = note["value"]
        elif note["name"] == "facts":
            reply.facts = note["value"]
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            reply.first_token_s = at if reply.first_token_s is None else reply.first_token_s
            reply.last_token_s = at
            if not reply.text:
                show(_heard(reply))
            reply.text += text
            show(text)
        if data := choice["delta"].get("audio", {}).get("data"):
            reply.first_sound_s = at if reply.first_sound_s is None else reply.first_sound_s
            reply.sound += base64.b64decode(data)
        reply.finish = choice["finish_reason"] or reply.finish


def _heard(reply: Reply) -> str:
    facts = "".join(f"\n  fact     {fact['text']}  ({fact['score']:.2f})" for fact in reply.facts)
    return f"  heard    {reply.transcript}{facts}\n  answer   "


def stage_times(url: str, request_id: str) -> list[tuple[str, float, float]]:
    """(stage, ms it waited, ms it ran) of a finished request, in the order in which the stages are declared."""
    record = httpx.get(f"{url}/v1/requests/{request_id}", timeout=10, trust_env=False).raise_for_status().json()
    return [(name, timing["queue_ms"], timing["run_ms"]) for name, timing in record["stages"].items()]


def save(reply: Reply, path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(PCM_RATE)
        file.writeframes(reply.sound)


def demonstrate(url: str, question: Path, out: Path) -> None:
    """Ask, tell, keep."""
    print(f"\nasking {question.name} ({question.stat().st_size // 1024} KiB)\n")
    reply = ask(url, question.read_bytes(), show=lambda text: print(text, end="", flush=True))
    save(reply, out)
    print(f"\n\n  first word after {reply.first_token_s:.2f} s", end="")
    print(f", first sound after {reply.first_sound_s:.2f} s" if reply.first_sound_s else ", no sound", end="")
    print(f", all after {reply.total_s:.2f} s\n\n  stage        waited      ran")
    for name, queue_ms, run_ms in stage_times(url, reply.id):
        print(f"  {name:<10} {queue_ms:6.0f} ms {run_ms:5.0f} ms")
    print(f"\n  {out}: {len(reply.sound) / 2 / PCM_RATE:.1f} s of speech\n")


def how_to_go_on(url: str) -> str:
    return f"""Go on by yourself:

  make demo WAV=path/to/your.wav                        a question of your own (wav, mp3, flac, ogg, m4a, webm)
  $EDITOR examples/voice/facts.txt                      what it knows: one fact a line, read again when it changes

  curl {url}/v1/audio/transcriptions -F model=voice -F file=@examples/voice/question.wav
  curl {url}/v1/audio/speech -H 'content-type: application/json' -o hello.wav \\
       -d '{{"model": "voice", "voice": "joe", "response_format": "wav", "input": "Hello. How are you?"}}'
  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
       -d '{{"model": "voice", "stream": true, "messages": [{{"role": "user", "content": "What is for lunch?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.audio.transcriptions.create(model="voice", file=open("examples/voice/question.wav", "rb")).text)
"""


@contextlib.contextmanager
def pipeline(log: Path) -> Iterator[str]:
    """`omni up` for as long as the block lasts; gives its URL. All that it says goes to ``log``.

    Raises: Failed: it did not come up.
    """
    command = [sys.executable, "-m", "stage_runtime", "up", "-f", str(HERE / "pipeline.yaml"), "--no-tty"]
    with log.open("w") as file:
        running = subprocess.Popen(
            command,
            cwd=ROOT,  # the facts file is named from there
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ^C is this program's to hear: it stops the pipeline, once, in its own time
        )
    try:
        yield _url_of(running, log)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait()


def _url_of(running: subprocess.Popen[bytes], log: Path) -> str:
    """Follow the log until it names the URL, showing how loading goes."""
    with log.open() as file:
        while True:
            line = file.readline()
            if not line and running.poll() is not None:
                raise Failed(f"the pipeline did not start; {log} ends with:\n" + log.read_text()[-2000:])
            if not line:
                time.sleep(0.1)
            elif ANSWERS_AT in line:
                return line.partition(ANSWERS_AT)[2].strip()
            elif " | " not in line and any(word in line for word in TELLING):
                print(f"  {line.rstrip()}", flush=True)


def is_up(url: str) -> bool:
    """Whether a voice pipeline answers at ``url`` already."""
    try:
        return any(
            model["id"] == "voice" for model in httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()["data"]
        )
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the voice pipeline a recorded question.")
    parser.add_argument("question", nargs="?", type=Path, default=HERE / "question.wav", help="a sound file")
    parser.add_argument(
        "--url", help=f"a pipeline that runs already (default: {USUAL_URL} if one answers there; else one is started)"
    )
    parser.add_argument("--out", type=Path, default=Path("answer.wav"), help="where the answer is written")
    parser.add_argument("--once", action="store_true", help="stop when the answer is there")
    options = parser.parse_args()
    try:
        options.question.open("rb").close()
    except OSError as error:
        parser.error(str(error))
    url = (options.url or USUAL_URL).rstrip("/")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by whatever means, it stops what it started
    try:
        if options.url or is_up(url):
            demonstrate(url, options.question, options.out)
            print(how_to_go_on(url))
            return 0
        print("starting the pipeline (the first time takes half a minute longer: weights are converted)\n")
        with pipeline(Path("voice.log")) as url:
            demonstrate(url, options.question, options.out)
            if not options.once and sys.stdin.isatty():  # without a terminal nobody could ask on, or say ^C
                print(how_to_go_on(url))
                print(f"{url} goes on answering; ^C stops it (log: voice.log)")
                signal.pause()
        return 0
    except (Failed, httpx.HTTPError, OSError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())

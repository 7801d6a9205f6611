"""The `curl` line that `omni up` prints: a request that this pipeline answers, ready to paste into a POSIX shell.

Here: its words for each kind of pipeline. Not here: showing it (`screens`). Called by `up`.
"""

from __future__ import annotations

import math
import shlex
import struct
import wave
from pathlib import Path

import msgspec

from omnipipeline_spec.types.plan import CoordinatorPlan

SOUND_FILE = "hello.wav"
RATE = 16_000  # what most models for speech take


def line(plan: CoordinatorPlan, url: str, *, folder: Path, key_file: Path | None) -> str:
    """A request to ``url``.

    folder:   of the run; a sound goes there when the pipeline wants one. key_file: what clients must send, in a file.
    """
    key = f' -H "authorization: Bearer $(head -n 1 {shlex.quote(str(key_file))})"' if key_file is not None else ""
    if "chat" in plan.serves:
        message = {"role": "user", "content": "hello there"}
        return _post(f"{url}/v1/chat/completions", key, {"model": plan.model, "messages": [message]})
    if "speech" in plan.serves:
        body = {"model": plan.model, "voice": "default", "input": "hello there", "response_format": "wav"}
        # Without -f an error would be saved as sound.
        return _post(f"{url}/v1/audio/speech", key, body) + " -f -o answer.wav"
    if "transcription" in plan.serves:
        sound = shlex.quote(f'file=@"{write_sound(folder)}"')  # in quotes: a comma or semicolon would end the name
        model = shlex.quote(f"model={plan.model}")
        return f"curl {shlex.quote(f'{url}/v1/audio/transcriptions')}{key} --form-string {model} -F {sound}"
    return _post(f"{url}/v1/pipeline", key, {"inputs": "hello there"})


def write_sound(folder: Path) -> Path:
    """Half a second of a low tone, for who has no recording at hand."""
    path = folder / SOUND_FILE
    samples = (int(3000 * math.sin(2 * math.pi * 220 * at / RATE)) for at in range(RATE // 2))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, RATE // 2, "NONE", ""))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return path


def _post(url: str, key: str, body: object) -> str:
    text = msgspec.json.encode(body).decode()
    return f"curl {shlex.quote(url)}{key} -H 'content-type: application/json' -d {shlex.quote(text)}"

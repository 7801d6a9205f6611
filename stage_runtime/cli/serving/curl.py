"""The `curl` line that `omni up` prints: a request that this pipeline answers, ready to paste into a POSIX shell.

Here: how an example of the table of routes is written. Not here: the examples; showing the line (`screens`). Called
by `up`.
"""

from __future__ import annotations

import math
import shlex
import struct
import wave
from pathlib import Path

import msgspec

from omnipipeline_spec.types.plan import CoordinatorPlan
from omnipipeline_spec.types.routes import ROUTES, OpenAIRoute

SOUND_FILE = "hello.wav"
RATE = 16_000  # what most models for speech take


def line(plan: CoordinatorPlan, url: str, *, folder: Path, key_file: Path | None) -> str:
    """A request to ``url``.

    folder:   of the run; a sound goes there when the pipeline wants one. key_file: what clients must send, in a file.
    """
    key = f' -H "authorization: Bearer $(head -n 1 {shlex.quote(str(key_file))})"' if key_file is not None else ""
    served = next((one for one in ROUTES if one.serves in plan.serves), None)
    if served is None:
        return _post(f"{url}/v1/pipeline", key, {"inputs": "hello there"})
    return _example(served, f"{url}{served.path}", key, plan.model, folder)


def _example(route: OpenAIRoute, url: str, key: str, model: str, folder: Path) -> str:
    shown = route.example
    if shown.file:
        sound = shlex.quote(f'file=@"{write_sound(folder)}"')  # in quotes: a comma or semicolon would end the name
        return f"{_curl(url)}{key} --form-string {shlex.quote(f'model={model}')} -F {sound}"
    line = _post(url, key, {"model": model, **shown.body})
    # An error would be saved as sound without -f.
    return f"{line} -f -o {shown.saved_as}" if shown.saved_as else line


def write_sound(folder: Path) -> Path:
    """Half a second of a low tone, for users without a recording."""
    path = folder / SOUND_FILE
    samples = (int(3000 * math.sin(2 * math.pi * 220 * at / RATE)) for at in range(RATE // 2))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, RATE // 2, "NONE", ""))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return path


def _post(url: str, key: str, body: object) -> str:
    text = msgspec.json.encode(body).decode()
    return f"{_curl(url)}{key} -H 'content-type: application/json' -d {shlex.quote(text)}"


def _curl(url: str) -> str:
    """The certificate of a local run has the public name, not the address that is asked."""
    return f"curl {'--insecure ' if url.startswith('https:') else ''}{shlex.quote(url)}"

"""The formats of a session's sound: 16 bit samples at 24 kHz, or G.711 at 8 kHz. Pure."""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from stage_runtime.web.sound.codecs import g711
from stage_runtime.web.sound.codecs.samples import Samples


class SoundFormat(msgspec.Struct, frozen=True):
    """A format that a client may choose, in either direction."""

    name: str  #: The name in the GA interface.
    beta: str  #: The name in the beta.
    encoding: str  #: The format into which the codec process encodes answers.
    rate: int
    width: int  #: Bytes of a sample.

    @property
    def bytes_per_ms(self) -> int:
        return self.rate * self.width // 1000


PCM: Final = SoundFormat("audio/pcm", "pcm16", "pcm", 24_000, 2)
PCMU: Final = SoundFormat("audio/pcmu", "g711_ulaw", "pcmu", 8_000, 1)
PCMA: Final = SoundFormat("audio/pcma", "g711_alaw", "pcma", 8_000, 1)
FORMATS: Final = {one.name: one for one in (PCM, PCMU, PCMA)}


def linear(data: bytes, format: SoundFormat) -> Samples:
    """The samples as float32 in -1..1, ``[n]``, at the format's rate."""
    return _pcm16(data, format).astype(np.float32) / np.float32(1 << 15)


def wav(data: bytes, format: SoundFormat) -> bytes:
    """A file of 16 bit samples, at the format's rate."""
    body = _pcm16(data, format).astype("<i2").tobytes()
    fmt = struct.pack("<HHIIHH", 1, 1, format.rate, format.rate * 2, 2, 16)
    head = struct.pack("<4sI4s4sI", b"RIFF", len(body) + 36, b"WAVE", b"fmt ", 16)
    return head + fmt + struct.pack("<4sI", b"data", len(body)) + body


def _pcm16(data: bytes, format: SoundFormat) -> npt.NDArray[np.int16]:
    return np.frombuffer(data, "<i2") if format.width == 2 else g711.expanded(data, format.encoding)

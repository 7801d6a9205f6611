"""Sound in the formats that clients ask for, piece by piece or whole. Called by `translating` and the speech route.

Formats are libsndfile's (soundfile); it has no AAC. An encoder takes its rate and channels from the first piece.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgspec
import soundfile

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.sound import samples
from stage_runtime.web.sound.resampling import Resampler
from stage_runtime.web.sound.samples import Samples
from stage_runtime.wire.values import Audio

PCM_RATE: Final = 24_000  # OpenAI: "raw samples in 24kHz (16-bit signed, low-endian), without the header"
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
_UNKNOWN_SIZE = 0xFFFFFFFF  # what ffmpeg and OpenAI write where a wav's length is not known yet


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One format: its media type, and what libsndfile calls it."""

    mime: str
    container: str = ""
    subtype: str | None = None
    rates: tuple[int, ...] = ()  #: Those it can have; empty: all.
    max_channels: int = 2
    rewrites: bool = False  #: Its header is only right at the end: nothing is given before `Encoder.close`.


FORMATS: Final[dict[str, Format]] = {
    "mp3": Format(mime="audio/mpeg", container="MP3", rates=_MPEG_RATES),
    "opus": Format(mime="audio/ogg", container="OGG", subtype="OPUS", rates=_OPUS_RATES),
    "flac": Format(mime="audio/flac", container="FLAC", subtype="PCM_16", max_channels=8, rewrites=True),
    "wav": Format(mime="audio/wav", max_channels=8),
    "pcm": Format(mime="audio/pcm", rates=(PCM_RATE,), max_channels=1),
}


class Encoder(Protocol):
    """Bytes of a file, as they become known."""

    def write(self, audio: Audio, *, stage: str | None = None) -> bytes: ...

    def close(self) -> bytes: ...


def check(name: str, *, param: str) -> str:
    """A format's name as `FORMATS` has it (``pcm16`` is ``pcm``).

    Raises: InvalidRequest: there is no such format here; says which there are.
    """
    name = "pcm" if name == "pcm16" else name
    if name not in FORMATS:
        raise InvalidRequest(f"{param}: {name!r} is not available; there are {', '.join(FORMATS)}", param=param)
    return name


def encoder(name: str) -> Encoder:
    """An encoder whose bytes may be sent while it goes on."""
    if name == "pcm":
        return _Plain(FORMATS[name], header=False)
    return _Plain(FORMATS[name], header=True) if name == "wav" else _Library(FORMATS[name])


def encode(name: str, pieces: Iterable[Audio], *, stage: str | None = None) -> bytes:
    """All of it as one file with a complete header; no pieces: no bytes."""
    made = encoder(name)
    body = b"".join([*(made.write(piece, stage=stage) for piece in pieces), made.close()])
    if isinstance(made, _Library):
        return made.whole()
    if isinstance(made, _Plain) and name == "wav" and body:
        return _wav_header(*made.shape(), len(body) - _WAV_HEADER_BYTES) + body[_WAV_HEADER_BYTES:]
    return body


class _Fitting:
    """Pieces at any rate, made to fit the format's rate and channels."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self.rate = 0
        self.channels = 0
        self._resampler: Resampler | None = None
        self._source = 0

    def fit(self, audio: Audio, stage: str | None) -> Samples:
        read = samples.read(audio, stage=stage)
        if not self.rate:
            self.rate = _nearest(audio.sample_rate, self._format.rates)
            self.channels = min(read.shape[1], self._format.max_channels)
        read = samples.to_channels(read, self.channels)
        if audio.sample_rate == self._source:
            return self._resampler.take(read) if self._resampler else read
        rest = self.rest()  # the rate changed between two pieces
        self._source = audio.sample_rate
        self._resampler = Resampler(self._source, self.rate, self.channels) if self._source != self.rate else None
        made = self._resampler.take(read) if self._resampler else read
        return samples.joined(rest, made)

    def rest(self) -> Samples | None:
        return self._resampler.flush() if self._resampler else None


class _Plain:
    """pcm and wav: 16 bit samples, with or without a header of unknown length."""

    def __init__(self, format: Format, *, header: bool) -> None:
        self._fitting = _Fitting(format)
        self._header = header

    def write(self, audio: Audio, *, stage: str | None = None) -> bytes:
        made = samples.to_pcm16(self._fitting.fit(audio, stage))
        if not self._header:
            return made
        self._header = False
        return _wav_header(*self.shape(), None) + made

    def close(self) -> bytes:
        rest = self._fitting.rest()
        return b"" if rest is None else samples.to_pcm16(rest)

    def shape(self) -> tuple[int, int]:
        return self._fitting.rate, self._fitting.channels


class _Library:
    """mp3, opus and flac by libsndfile, through a file in memory."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._fitting = _Fitting(format)
        self._sink = io.BytesIO()
        self._file: soundfile.SoundFile | None = None
        self._sent = 0

    def write(self, audio: Audio, *, stage: str | None = None) -> bytes:
        made = self._fitting.fit(audio, stage)
        if self._file is None:
            self._file = self._open()
        self._file.write(made)
        return b"" if self._format.rewrites else self._new()

    def close(self) -> bytes:
        if self._file is None:
            return b""
        rest = self._fitting.rest()
        if rest is not None and len(rest):
            self._file.write(rest)
        self._file.close()
        return self._new()

    def whole(self) -> bytes:
        """The finished file, its first frame corrected at the end (an mp3's exact length)."""
        return self._sink.getvalue()

    def _open(self) -> soundfile.SoundFile:
        options: dict[str, Any] = {"format": self._format.container, "subtype": self._format.subtype}
        if self._format.container == "MP3":
            # A constant bit rate: a player that is sent a variable one without its index guesses a wrong length.
            options |= {"bitrate_mode": "CONSTANT", "compression_level": 0.5}
        return soundfile.SoundFile(self._sink, "w", self._fitting.rate, self._fitting.channels, **options)

    def _new(self) -> bytes:
        fresh = bytes(self._sink.getbuffer()[self._sent :])
        self._sent += len(fresh)
        return fresh


def _nearest(rate: int, rates: tuple[int, ...]) -> int:
    """The lowest rate that loses nothing, else the highest there is."""
    return rate if not rates else min((known for known in rates if known >= rate), default=max(rates))


_WAV_HEADER_BYTES = 44


def _wav_header(rate: int, channels: int, nbytes: int | None) -> bytes:
    riff, data = (_UNKNOWN_SIZE, _UNKNOWN_SIZE) if nbytes is None else (nbytes + 36, nbytes)
    fmt = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    return struct.pack("<4sI4s4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16) + fmt + struct.pack("<4sI", b"data", data)

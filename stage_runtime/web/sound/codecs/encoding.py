"""Sound in the formats that clients ask for, piece by piece or whole. Runs in the codec process only (`codec_session`).

Formats are libsndfile's (soundfile); it has no AAC. An encoder takes its rate and channels from the first piece.
"""

from __future__ import annotations

import io
import struct
from typing import Any, Protocol

import soundfile

from stage_runtime.web.sound.codecs import g711, samples
from stage_runtime.web.sound.codecs.resampling import Resampler
from stage_runtime.web.sound.codecs.samples import Flat, Samples
from stage_runtime.web.sound.formats import FORMATS, TELEPHONE, Format

_UNKNOWN_SIZE = 0xFFFFFFFF  # what ffmpeg and OpenAI write where a wav's length is not known yet


class Encoder(Protocol):
    """Bytes of a file, as they become known."""

    def write(self, sound: Flat) -> bytes: ...

    def close(self) -> bytes: ...


def encoder(name: str) -> Encoder:
    """An encoder whose bytes may be sent while it goes on."""
    if name in TELEPHONE:
        return _Compressed(name)
    if name == "pcm":
        return _Plain(FORMATS[name], header=False)
    return _Plain(FORMATS[name], header=True) if name == "wav" else _Library(FORMATS[name])


class Whole:
    """One file with a complete header, all of it given by `close`."""

    def __init__(self, name: str) -> None:
        self._made = encoder(name)
        self._name = name
        self._pieces: list[bytes] = []

    def write(self, sound: Flat) -> bytes:
        piece = self._made.write(sound)
        if isinstance(self._made, _Plain):  # libsndfile's own file in memory has the rest
            self._pieces.append(piece)
        return b""

    def close(self) -> bytes:
        rest = self._made.close()
        if isinstance(self._made, _Library):
            return self._made.whole()
        body = b"".join([*self._pieces, rest])
        if isinstance(self._made, _Plain) and self._name == "wav" and body:
            return _wav_header(*self._made.shape(), len(body) - _WAV_HEADER_BYTES) + body[_WAV_HEADER_BYTES:]
        return body


class _Fitting:
    """Pieces at any rate, made to fit the format's rate and channels."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self.rate = 0
        self.channels = 0
        self._resampler: Resampler | None = None
        self._source = 0

    def fit(self, sound: Flat) -> Samples:
        read = samples.read(sound)
        if not self.rate:
            self.rate = _nearest(sound.sample_rate, self._format.rates)
            self.channels = min(read.shape[1], self._format.max_channels)
        read = samples.to_channels(read, self.channels)
        if sound.sample_rate == self._source:
            return samples.sane(self._resampler.take(read)) if self._resampler else read
        rest = self.rest()  # the rate changed between two pieces
        self._source = sound.sample_rate
        self._resampler = Resampler(self._source, self.rate, self.channels) if self._source != self.rate else None
        made = samples.sane(self._resampler.take(read)) if self._resampler else read  # a filter overshoots
        return samples.joined(rest, made)

    def rest(self) -> Samples | None:
        return samples.sane(self._resampler.flush()) if self._resampler else None


class _Plain:
    """pcm and wav: 16 bit samples, with or without a header of unknown length."""

    def __init__(self, format: Format, *, header: bool) -> None:
        self._fitting = _Fitting(format)
        self._header = header

    def write(self, sound: Flat) -> bytes:
        made = samples.to_pcm16(self._fitting.fit(sound))
        if not self._header:
            return made
        self._header = False
        return _wav_header(*self.shape(), None) + made

    def close(self) -> bytes:
        rest = self._fitting.rest()
        return b"" if rest is None else samples.to_pcm16(rest)

    def shape(self) -> tuple[int, int]:
        return self._fitting.rate, self._fitting.channels


class _Compressed:
    """G.711: 8 bits for each sample, without a header."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain = _Plain(TELEPHONE[name], header=False)

    def write(self, sound: Flat) -> bytes:
        return g711.compressed(self._plain.write(sound), self._name)

    def close(self) -> bytes:
        return g711.compressed(self._plain.close(), self._name)


class _Library:
    """mp3, opus and flac by libsndfile, through a file in memory."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._fitting = _Fitting(format)
        self._sink = io.BytesIO()
        self._file: soundfile.SoundFile | None = None
        self._sent = 0

    def write(self, sound: Flat) -> bytes:
        made = self._fitting.fit(sound)
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

"""Sound files to samples and back: decoding, resampling, limits. No models. Called by `listen` and the examples.

libsndfile reads wav, flac, ogg and mp3. Files that phones record (m4a, webm) go to ffmpeg's libraries, but only with
the container named by us: left to guess, ffmpeg also takes playlists, which make it open other files and addresses.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import stage_runtime as omni

Samples = npt.NDArray[np.float32]

SAMPLE_RATE = 16_000  # what Silero and Whisper were trained on
MAX_CHANNELS = 8
_BLOCK = 1 << 16  # frames that are read at once
_HEADERS = 4096  # bytes in which a wav's samples begin


def decode(data: bytes, *, max_seconds: float) -> Samples:
    """Any common sound file as mono f32 at `SAMPLE_RATE`.

    Raises: InvalidRequest: not a sound file, damaged, empty, or longer than ``max_seconds``; says which.
    """
    if not data:
        raise omni.InvalidRequest("the audio is empty: 0 bytes")
    container = _ffmpeg_container(data)
    return _by_ffmpeg(data, container, max_seconds) if container else _by_sndfile(data, max_seconds)


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """``samples`` (f32 ``[n]``) at another rate; the same array when the rates agree."""
    if rate == wanted:
        return samples
    import soxr

    resampled: Samples = np.ascontiguousarray(soxr.resample(samples, rate, wanted), dtype=np.float32)
    return resampled


def wav(samples: Samples, rate: int) -> bytes:
    """16-bit PCM wav."""
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.clip(samples, -1.0, 1.0), rate, format="WAV", subtype="PCM_16")
    return out.getvalue()


def _by_sndfile(data: bytes, max_seconds: float) -> Samples:
    """Read block by block: the samples of a file of 500 KB may take 2 GB at their own rate, in all channels."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            _check_format(sound.samplerate, sound.channels)
            resampled = _resampler(sound.samplerate)
            # A header may promise any number of frames: read what is allowed and one more, never what it says.
            left = int(max_seconds * sound.samplerate)
            pieces: list[Samples] = []
            while True:
                block: Samples = sound.read(_BLOCK, dtype="float32", always_2d=True)
                left -= len(block)
                if left < 0:
                    raise _too_long(max_seconds)
                if not pieces and not len(block):
                    raise _empty()
                last = len(block) < _BLOCK
                pieces.append(resampled(np.nan_to_num(block.mean(axis=1, dtype=np.float32)), last))
                if last:
                    return np.concatenate(pieces)
    except soundfile.LibsndfileError as error:
        problem = error.error_string.strip(". ")  # the error's own text names the Python object that was read
        raise omni.InvalidRequest(f"not audio that can be read (wav, flac, ogg, mp3, m4a, webm): {problem}") from error


def _resampler(rate: int) -> Callable[[Samples, bool], Samples]:
    """The next samples at `SAMPLE_RATE`, of the next ones at ``rate``, and whether these are the last: the same as of
    all samples at once.
    """
    if rate == SAMPLE_RATE:
        return lambda samples, last: samples
    import soxr

    stream = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    return lambda samples, last: stream.resample_chunk(samples, last=last)


def _ffmpeg_container(data: bytes) -> str | None:
    """The containers that libsndfile does not know, by their first bytes; and a wav that was written to a pipe, of
    which it would read nothing: the writer could not go back, and left 0 for the length of the samples.
    """
    if data[:4] == b"RIFF" and (at := data.find(b"data", 12, _HEADERS)) > 0 and data[at + 4 : at + 8] == bytes(4):
        return "wav"
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def _by_ffmpeg(data: bytes, container: str, max_seconds: float) -> Samples:
    import av

    limit = int(max_seconds * SAMPLE_RATE)
    pieces: list[Samples] = []
    seen = 0
    try:
        with av.open(io.BytesIO(data), mode="r", format=container) as sound:
            resampler = av.AudioResampler(format="fltp", layout="mono", rate=SAMPLE_RATE)
            for frame in _frames(sound, resampler):
                pieces.append(frame.to_ndarray()[0])
                seen += len(pieces[-1])
                if seen > limit:
                    raise _too_long(max_seconds)
    except (av.error.FFmpegError, IndexError) as error:  # IndexError: a file without a sound track
        raise omni.InvalidRequest(f"not audio that can be read ({container}): {error}") from error
    if not seen:
        raise _empty()
    return np.nan_to_num(np.concatenate(pieces))


def _frames(sound: Any, resampler: Any) -> Any:
    for frame in sound.decode(sound.streams.audio[0]):
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


def _check_format(rate: int, channels: int) -> None:
    if not 4_000 <= rate <= 192_000:
        raise omni.InvalidRequest(f"the audio's sample rate is {rate} Hz; 4,000 to 192,000 can be read")
    if channels > MAX_CHANNELS:
        raise omni.InvalidRequest(f"the audio has {channels} channels; up to {MAX_CHANNELS} can be read")


def _empty() -> omni.InvalidRequest:
    return omni.InvalidRequest("the audio is empty: the file holds no samples")


def _too_long(max_seconds: float) -> omni.InvalidRequest:
    return omni.InvalidRequest(f"the audio is longer than the {max_seconds:g} s that this pipeline takes")

"""The values in `Audio.samples` of a stage: taken apart for the codec process, and made valid there.

`flat` runs in the coordinator and looks at no sample. `read` runs in the codec process and is the one place where
samples become what every encoder takes: float32, finite, in -1..1, ``[n, channels]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Audio, RawTensor

Samples = npt.NDArray[np.float32]

MIN_RATE: Final = 1000
MAX_RATE: Final = 192_000  # what studio hardware records at; a resampler's table grows with the rate
MAX_CHANNELS: Final = 8
_INTEGERS = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}
_WIDTHS: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int32": 4, "uint8": 1}


class Flat(msgspec.Struct, frozen=True):
    """Sound as bytes: C-contiguous samples of ``dtype`` and how they lie."""

    dtype: str
    frames: int
    channels: int
    sample_rate: int
    data: memoryview

    def blocks(self, nbytes: int) -> Iterator[Flat]:
        """The same sound in pieces of at most ``nbytes`` (at least one frame each); none for an empty one."""
        width = _WIDTHS[self.dtype] * self.channels
        step = max(1, nbytes // width)
        for first in range(0, self.frames, step):
            frames = min(step, self.frames - first)
            piece = self.data[first * width : (first + frames) * width]
            yield Flat(self.dtype, frames, self.channels, self.sample_rate, piece)


def flat(audio: Audio, *, stage: str | None = None) -> Flat:
    """A stage's `Audio`, checked for everything but its samples.

    Raises: RequestError: stage_failed: dtype, shape or rate are those of no sound.
    """
    rate = audio.sample_rate
    if type(rate) not in (int, float) or not MIN_RATE <= rate <= MAX_RATE or rate != int(rate):
        raise _refused(stage, f"sample_rate {_shown(rate)} is not a whole number of {MIN_RATE}..{MAX_RATE}")
    raw = _raw(audio.samples, stage)
    if raw.dtype not in _WIDTHS:
        raise _refused(stage, f"dtype {raw.dtype[:80]}")
    shape = raw.shape if len(raw.shape) != 1 else (*raw.shape, 1)
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_CHANNELS:
        raise _refused(stage, f"shape {_shown(list(raw.shape))} is neither [n] nor [n, channels]")
    data = memoryview(raw.data).cast("B") if len(raw.data) else memoryview(b"")
    if len(data) != shape[0] * shape[1] * _WIDTHS[raw.dtype]:
        raise _refused(stage, f"{len(data)} bytes are not {raw.dtype} of shape {_shown(list(raw.shape))}")
    return Flat(raw.dtype, shape[0], shape[1], int(rate), data)


def read(sound: Flat) -> Samples:
    """float32 ``[n, channels]``, finite and in -1..1: NaN is silence, what is louder is clipped."""
    with np.errstate(over="ignore", invalid="ignore"):
        floats = _floats(sound).reshape(sound.frames, sound.channels)
        return sane(floats)


def sane(samples: Samples) -> Samples:
    """Finite and in -1..1. The mp3 encoder ends its process on anything else, 16 bit formats wrap around."""
    finite = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0)
    return np.clip(finite, -1.0, 1.0, out=finite)


def to_channels(samples: Samples, channels: int) -> Samples:
    """Mixed down to one channel, or one channel copied to all."""
    if samples.shape[1] == channels:
        return samples
    mono = samples.mean(axis=1, dtype=np.float32, keepdims=True)
    return mono if channels == 1 else np.repeat(mono, channels, axis=1)


def joined(first: Samples | None, second: Samples) -> Samples:
    return second if first is None else np.concatenate([first, second])


def to_pcm16(samples: Samples) -> bytes:
    """Signed 16 bit, little-endian, channels interleaved; ``samples`` are sane."""
    return bytes(np.rint(samples * 32767.0).astype("<i2").tobytes())


def no_sound(stage: str | None) -> RequestError:
    """The error of a request whose sound has no sample at all."""
    return _refused(stage, "no samples at all")


def _raw(value: Any, stage: str | None) -> RawTensor:
    if isinstance(value, RawTensor):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _refused(stage, f"{type(value).__name__}: {error}") from error
    if array.dtype.name not in _WIDTHS:  # before its bytes are looked at: those of objects are addresses
        raise _refused(stage, f"dtype {array.dtype.name}")
    return RawTensor(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes(), "numpy")


def _floats(sound: Flat) -> Samples:
    if sound.dtype == "bfloat16":  # numpy has none: the upper half of a float32
        halves = np.frombuffer(sound.data, dtype="<u2").astype(np.uint32) << 16
        return halves.view(np.float32)
    floats = np.frombuffer(sound.data, dtype=sound.dtype).astype(np.float32, copy=False)
    if sound.dtype not in _INTEGERS:
        return floats
    centre = np.float32(128 if sound.dtype == "uint8" else 0)
    return (floats - centre) / np.float32(_INTEGERS[sound.dtype])


def _shown(value: Any) -> str:
    """A value of the author's in a message: short, whatever it is."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "beyond 64 bits"  # Python refuses to print longer ones than 4,300 digits
    text = repr(value) if isinstance(value, (int, float, str, list)) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}…"


def _refused(stage: str | None, problem: str) -> RequestError:
    return RequestError(
        "stage_failed", f"omni.Audio: {problem}; samples are f32 in -1..1, [n] or [n, channels]", stage=stage
    )

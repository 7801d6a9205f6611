"""What a stage put into `Audio.samples`, as float32 ``[n, channels]``. Called by `encoding`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Audio, RawTensor

Samples = npt.NDArray[np.float32]

_INTEGERS = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}
_DTYPES = {"float32", "float64", "float16", "int16", "int32", "uint8"}


def read(audio: Audio, *, stage: str | None = None) -> Samples:
    """float32 ``[n, channels]``; the samples themselves where they are that already.

    Raises: RequestError: stage_failed: the samples are no sound (dtype, shape), or the rate is none.
    """
    if not 1000 <= audio.sample_rate <= 384_000:
        raise _refused(stage, f"sample_rate {audio.sample_rate} is none")
    samples = _floats(audio.samples, stage)
    if samples.ndim == 1:
        samples = samples.reshape(-1, 1)
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= 8:
        raise _refused(stage, f"shape {list(samples.shape)} is neither [n] nor [n, channels]")
    return samples


def to_channels(samples: Samples, channels: int) -> Samples:
    """Mixed down to one channel, or one channel said to all."""
    if samples.shape[1] == channels:
        return samples
    mono = samples.mean(axis=1, dtype=np.float32, keepdims=True)
    return mono if channels == 1 else np.repeat(mono, channels, axis=1)


def joined(first: Samples | None, second: Samples) -> Samples:
    return second if first is None else np.concatenate([first, second])


def to_pcm16(samples: Samples) -> bytes:
    """Signed 16 bit, little-endian, channels interleaved; what is out of -1..1 is clipped, NaN is silence."""
    finite = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0)
    return bytes(np.rint(np.clip(finite, -1.0, 1.0) * 32767.0).astype("<i2").tobytes())


def _floats(value: Any, stage: str | None) -> Samples:
    if isinstance(value, RawTensor):
        return _from_raw(value, stage)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(stage, f"{type(value).__name__}: {error}") from error
    return _scaled(array, array.dtype.name, stage)


def _from_raw(raw: RawTensor, stage: str | None) -> Samples:
    if raw.dtype == "bfloat16":  # numpy has none: the upper half of a float32
        halves = np.frombuffer(raw.data, dtype="<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(raw.shape)
    if raw.dtype not in _DTYPES:
        raise _refused(stage, f"dtype {raw.dtype}")
    return _scaled(np.frombuffer(raw.data, dtype=raw.dtype).reshape(raw.shape), raw.dtype, stage)


def _scaled(array: npt.NDArray[Any], dtype: str, stage: str | None) -> Samples:
    if dtype not in _DTYPES:
        raise _refused(stage, f"dtype {dtype}")
    floats = array.astype(np.float32, copy=False)
    if dtype not in _INTEGERS:
        return floats
    centre = np.float32(128 if dtype == "uint8" else 0)
    return (floats - centre) / np.float32(_INTEGERS[dtype])


def _refused(stage: str | None, problem: str) -> RequestError:
    return RequestError(
        "stage_failed", f"omni.Audio: {problem}; samples are f32 in -1..1, [n] or [n, channels]", stage=stage
    )

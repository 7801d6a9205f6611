"""Converts sound from one sample rate to another, piece by piece. Pure; called by `encoding`.

OpenAI's raw PCM is 24 kHz by definition, Opus knows five rates and MP3 nine, a voice may speak at any other.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from stage_runtime.web.sound.codecs.samples import Samples

ZERO_CROSSINGS = 16  # a side: about 80 dB of stop band with the Kaiser window below
BETA = 8.6
BLOCK = 1 << 15  # output samples at once: bounds the gathered windows to 4 MiB a channel


class Resampler:
    """A windowed-sinc polyphase filter with rational steps; keeps its place between pieces.

    Its output is not delayed: sample k of the output is at time ``k / target``. `flush` gives the end,
    so that all pieces together are ``ceil(n * target / source)`` samples.
    """

    def __init__(self, source: int, target: int, channels: int) -> None:
        divisor = math.gcd(source, target)
        self._up, self._down = target // divisor, source // divisor
        cutoff = min(1.0, self._up / self._down)
        self._half = math.ceil(ZERO_CROSSINGS / cutoff)
        self._taps = _phases(self._up, self._half, cutoff)
        #: Input from `_first` on; `_half` zeros stand before the first sample.
        self._held: Samples = np.zeros((self._half, channels), np.float32)
        self._first = -self._half
        self._taken = 0  #: Input samples seen.
        self._given = 0  #: Output samples made.

    def take(self, samples: Samples) -> Samples:
        """The output that follows from ``samples`` ([n, channels]) and those before."""
        self._held = np.concatenate([self._held, samples])
        self._taken += len(samples)
        known = self._taken - self._half  # a window needs `_half` samples behind its centre
        return self._make(max(self._given, -(-known * self._up // self._down)))

    def flush(self) -> Samples:
        """The rest, as if silence followed."""
        self._held = np.concatenate([self._held, np.zeros((self._half + 1, self._held.shape[1]), np.float32)])
        return self._make(-(-self._taken * self._up // self._down))

    def _make(self, end: int) -> Samples:
        blocks = [self._block(start, min(end, start + BLOCK)) for start in range(self._given, end, BLOCK)]
        self._given = max(self._given, end)
        self._forget()
        return np.concatenate(blocks) if blocks else np.zeros((0, self._held.shape[1]), np.float32)

    def _block(self, start: int, end: int) -> Samples:
        positions = np.arange(start, end, dtype=np.int64) * self._down
        centres, phases = positions // self._up, positions % self._up
        windows = np.lib.stride_tricks.sliding_window_view(self._held, 2 * self._half, axis=0)
        picked = windows[centres - self._half + 1 - self._first]  # [n, channels, taps]
        made: Samples = np.einsum("nct,nt->nc", picked, self._taps[phases], dtype=np.float32)
        return made

    def _forget(self) -> None:
        wanted = self._given * self._down // self._up - self._half + 1
        if wanted > self._first:
            self._held = self._held[wanted - self._first :].copy()  # a view would keep all that was taken
            self._first = wanted


@functools.lru_cache(maxsize=8)
def _phases(up: int, half: int, cutoff: float) -> Samples:
    """``[up, 2 * half]``: phase p's taps for an output p/up after its centre sample. Shared, for a pair of rates."""
    offsets = np.arange(-half + 1, half + 1)[None, :] - np.arange(up)[:, None] / up
    window = np.i0(BETA * np.sqrt(np.clip(1 - (offsets / half) ** 2, 0, 1))) / np.i0(BETA)
    taps = cutoff * np.sinc(cutoff * offsets) * window
    normal: Samples = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    normal.setflags(write=False)
    return normal

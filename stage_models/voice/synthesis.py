"""A sentence to sound: piper's VITS voices by onnxruntime. Called by the stage `speak` and the examples.

piper-tts is GPL-3.0: it is in the optional extra ``demo`` alone, runs in a process of its own, and nothing of the
runtime imports it.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from stage_models.voice.audio import Samples

MIN_SPEED, MAX_SPEED = 0.25, 4.0  # what OpenAI's speech route takes


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # espeak-ng ends at a NUL; half a surrogate is not UTF-8


class Voice:
    """One piper voice.

    variation: how much two readings differ, 0..1 (piper's noise); 0 gives the same sound for the same text.
    """

    def __init__(self, model: Path, *, threads: int = 1, variation: float = 0.0) -> None:
        import onnxruntime
        from piper import PiperVoice
        from piper.config import PiperConfig

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # piper's own `load` leaves onnxruntime one thread a core, which would tread on the language model.
        self._voice: Any = PiperVoice(
            session=onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"]),
            config=_read_config(model, PiperConfig),
        )
        self._variation = variation
        self._turn = threading.Lock()
        self.sample_rate = int(self._voice.config.sample_rate)

    def __call__(self, text: str, *, speed: float = 1.0) -> Samples:
        """f32 ``[n]`` at `sample_rate`; empty when the text has no sound. speed: `MIN_SPEED`..`MAX_SPEED`."""
        from piper.config import SynthesisConfig

        settings = SynthesisConfig(
            length_scale=1.0 / speed, noise_scale=0.667 * self._variation, noise_w_scale=0.8 * self._variation
        )
        # espeak-ng, which piper calls for phonemes, has global state.
        with self._turn:
            readable = _CONTROL.sub(" ", text)
            pieces = [piece.audio_float_array for piece in self._voice.synthesize(readable, syn_config=settings)]
        return np.concatenate(pieces).astype(np.float32) if pieces else np.zeros(0, np.float32)


def _read_config(model: Path, config_type: Any) -> Any:
    import json

    return config_type.from_dict(json.loads(Path(f"{model}.json").read_text(encoding="utf-8")))

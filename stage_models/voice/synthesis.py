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


class Stop:
    """Ends a synthesis that nobody waits for any more. `ask` may be called on any thread."""

    def __init__(self) -> None:
        import onnxruntime

        self.asked = False
        self.options: Any = onnxruntime.RunOptions()  #: Options of every run of the model for this synthesis.

    def ask(self) -> None:
        """The run that is under way ends at its next operator, by an exception, and no other one begins."""
        self.asked = True
        self.options.terminate = True


class _Model:
    """onnxruntime's session as piper calls it, with options for the run."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.options: Any = None  #: Options of the synthesis that has the voice now.

    def run(self, names: Any, given: Any) -> Any:
        return self._session.run(names, given, self.options)


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
        self._model = _Model(onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"]))
        self._voice: Any = PiperVoice(session=self._model, config=_read_config(model, PiperConfig))
        self._variation = variation
        self._turn = threading.Lock()
        self.sample_rate = int(self._voice.config.sample_rate)

    def __call__(self, text: str, *, speed: float = 1.0, stop: Stop | None = None) -> Samples:
        """f32 ``[n]`` at `sample_rate`; empty when the text has no sound, or when ``stop`` was asked.

        speed: `MIN_SPEED`..`MAX_SPEED`.
        """
        from piper.config import SynthesisConfig

        settings = SynthesisConfig(
            length_scale=1.0 / speed, noise_scale=0.667 * self._variation, noise_w_scale=0.8 * self._variation
        )
        # espeak-ng, which piper calls for phonemes, has global state.
        with self._turn:
            readable = _CONTROL.sub(" ", text)
            self._model.options = None if stop is None else stop.options
            pieces: list[Samples] = []
            try:
                if stop is None or not stop.asked:
                    made = self._voice.synthesize(readable, syn_config=settings)
                    pieces = [piece.audio_float_array for piece in made]
            except Exception:  # onnxruntime has no type of its own for a run that was ended
                if stop is None or not stop.asked:
                    raise
            finally:
                self._model.options = None
        return np.concatenate(pieces).astype(np.float32) if pieces else np.zeros(0, np.float32)


def _read_config(model: Path, config_type: Any) -> Any:
    import json

    return config_type.from_dict(json.loads(Path(f"{model}.json").read_text(encoding="utf-8")))

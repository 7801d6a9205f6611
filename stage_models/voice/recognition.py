"""Speech to English text: Whisper tiny.en by CTranslate2 in int8. Called by the stage `recognise`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from stage_models.voice.audio import Samples


class Recogniser:
    """One loaded model. Greedy and without fallback temperatures: the same sound gives the same words."""

    def __init__(self, model: Path, *, threads: int) -> None:
        from faster_whisper import WhisperModel

        logging.getLogger("faster_whisper").setLevel(logging.WARNING)  # it tells of every request it gets
        self._model: Any = WhisperModel(
            str(model), device="cpu", compute_type="int8", cpu_threads=threads, num_workers=1, local_files_only=True
        )

    def __call__(self, samples: Samples, *, hint: str | None = None) -> str:
        """The words in ``samples`` (f32 ``[n]``, 16 kHz); ``""`` when there are none.

        hint: words that are likely to come, such as names (Whisper's initial prompt).
        """
        if samples.size == 0:
            return ""
        segments, _ = self._model.transcribe(
            samples,
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=False,
            initial_prompt=hint or None,
        )
        return " ".join(segment.text.strip() for segment in segments).strip()

"""Speech to text: Whisper by CTranslate2, by default tiny.en in int8. Called by the stage `recognise`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import stage_runtime as omni
from stage_models.voice.audio import Samples


class Recogniser:
    """One loaded model. Greedy and without fallback temperatures: the same sound gives the same words."""

    def __init__(self, model: Path, *, threads: int, language: str = "en", compute_type: str = "int8") -> None:
        """language: of speech that names none; ``auto``: the model finds out, where it knows more than English.
        compute_type: of CTranslate2. The words of int8 differ a little between processors.

        Raises: InvalidRequest: the model does not know the language. ValueError: this processor does not compute so.
        """
        import ctranslate2
        from faster_whisper import WhisperModel

        known = sorted(ctranslate2.get_supported_compute_types("cpu"))
        if compute_type not in known:
            raise ValueError(f"compute_type: expected one of {', '.join(known)}, got {compute_type!r}")
        logging.getLogger("faster_whisper").setLevel(logging.WARNING)  # it tells of every request it gets
        self._model: Any = WhisperModel(
            str(model),
            device="cpu",
            compute_type=compute_type,
            cpu_threads=threads,
            num_workers=1,
            local_files_only=True,
        )
        self._known = frozenset(self._model.supported_languages)
        self._language = None if language == "auto" else language
        self.check(language=self._language, translates=False)

    def check(self, *, language: str | None, translates: bool) -> None:
        """Raises: InvalidRequest: the model does not know the language, or English alone and is to translate."""
        if language and _code(language) not in self._known:
            known = ", ".join(sorted(self._known))
            raise omni.InvalidRequest(f"this model understands {known}, not {language[:40]!r}", param="language")
        if translates and not self._model.model.is_multilingual:
            raise omni.InvalidRequest("this model knows English alone, so it cannot translate", param="model")

    def __call__(
        self, samples: Samples, *, hint: str | None = None, language: str | None = None, translates: bool = False
    ) -> str:
        """The words in ``samples`` (f32 ``[n]``, 16 kHz); ``""`` when it hears none.

        hint: words that are likely to come, such as names (Whisper's initial prompt). language: see `check`.
        translates: the words are English, whatever is spoken.
        """
        if samples.size == 0:
            return ""
        segments, _ = self._model.transcribe(
            samples,
            task="translate" if translates else "transcribe",
            language=_code(language) if language else None if translates else self._language,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=False,
            initial_prompt=hint or None,
        )
        return " ".join(segment.text.strip() for segment in segments).strip()


def _code(language: str) -> str:
    return "en" if language.lower() == "english" else language.lower()

"""What a file that a client sent says of itself. Called by the transcription route."""

from __future__ import annotations

import io

import soundfile


def duration_s(data: bytes) -> float | None:
    """Its length in seconds; None when libsndfile cannot read it (webm, m4a): the stages may still."""
    try:
        return float(soundfile.info(io.BytesIO(data)).duration)
    except soundfile.LibsndfileError:
        return None

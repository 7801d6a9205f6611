"""Reads the header of a file that a client sent. Runs in the codec process only (`session`)."""

from __future__ import annotations

import io
import math

import soundfile


def duration_s(data: bytes) -> float | None:
    """Its length in seconds; None when libsndfile cannot read it (webm, m4a): the stages may still."""
    try:
        seconds = float(soundfile.info(io.BytesIO(data)).duration)
    except (soundfile.LibsndfileError, ZeroDivisionError):
        return None
    return seconds if math.isfinite(seconds) else None

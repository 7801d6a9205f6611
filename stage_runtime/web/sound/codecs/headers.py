"""Reads the header of a file that a client sent. Runs in the codec process only (`codec_session`)."""

from __future__ import annotations

import io
import math

import soundfile

from stage_runtime.web.sound.codecs import containers

_FOLLOWING = (b"LIST", b"id3 ", b"ID3 ", b"fact", b"cue ", b"smpl", b"bext", b"PEAK")


def duration_s(data: bytes) -> float | None:
    """Its length in seconds; None when its header does not say it: the stages may still know."""
    seconds = containers.duration_s(data)
    if seconds is None:
        seconds = _by_sndfile(data)
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _by_sndfile(data: bytes) -> float | None:
    try:
        return float(soundfile.info(io.BytesIO(_with_length(data))).duration)
    except (soundfile.LibsndfileError, ZeroDivisionError):
        return None


def _with_length(data: bytes) -> bytes:
    """A wav whose writer could not go back, and left 0 for the length of its samples, with the sign for an unknown
    one: libsndfile then reads until the end. Anything else as it is.
    """
    at = 12
    while data[:4] == b"RIFF" and at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name != b"data":
            at += 8 + size + size % 2
        elif size or data[at + 8 : at + 12] in (b"", *_FOLLOWING):
            break
        else:
            return data[: at + 4] + b"\xff\xff\xff\xff" + data[at + 8 :]
    return data

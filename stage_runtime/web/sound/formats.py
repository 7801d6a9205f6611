"""The formats that clients may ask for. Imports no codec: routes read it, `encoding` makes them."""

from __future__ import annotations

from typing import Final

import msgspec

from stage_runtime.errors import InvalidRequest

PCM_RATE: Final = 24_000  # OpenAI: "raw samples in 24kHz (16-bit signed, low-endian), without the header"
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One format: its media type, and what libsndfile calls it."""

    mime: str
    container: str = ""
    subtype: str | None = None
    rates: tuple[int, ...] = ()  #: The sample rates that it can have; empty: any.
    max_channels: int = 2
    rewrites: bool = False  #: Its header is complete only at the end: `Encoder.close` gives the whole file.


FORMATS: Final[dict[str, Format]] = {
    "mp3": Format(mime="audio/mpeg", container="MP3", rates=_MPEG_RATES),
    "opus": Format(mime="audio/ogg", container="OGG", subtype="OPUS", rates=_OPUS_RATES),
    "flac": Format(mime="audio/flac", container="FLAC", subtype="PCM_16", max_channels=8, rewrites=True),
    "wav": Format(mime="audio/wav", max_channels=8),
    "pcm": Format(mime="audio/pcm", rates=(PCM_RATE,), max_channels=1),
}

#: Formats of telephones (G.711), for answers on `/v1/realtime` alone.
TELEPHONE: Final[dict[str, Format]] = {
    name: Format(mime=f"audio/{name}", rates=(8000,), max_channels=1) for name in ("pcmu", "pcma")
}


def check(name: str, *, param: str) -> str:
    """A format's name as `FORMATS` has it (``pcm16`` is ``pcm``).

    Raises: InvalidRequest: the format is not known; names those that are.
    """
    name = "pcm" if name == "pcm16" else name
    if name not in FORMATS:
        raise InvalidRequest(f"{param}: {name!r} is not available; there are {', '.join(FORMATS)}", param=param)
    return name

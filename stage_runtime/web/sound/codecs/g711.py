"""G.711: the codes of telephones (ITU-T G.711, tables 1a and 2a) as 16 bit samples, and back. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt


def _ulaw(code: int) -> int:
    code = ~code & 0xFF
    magnitude = ((((code & 0x0F) << 3) + 0x84) << (code >> 4 & 7)) - 0x84
    return -magnitude if code & 0x80 else magnitude


def _alaw(code: int) -> int:
    code ^= 0x55
    segment = code >> 4 & 7
    mantissa = ((code & 0x0F) << 4) + 8
    magnitude = mantissa if not segment else (mantissa + 0x100) << (segment - 1)
    return magnitude if code & 0x80 else -magnitude


def _nearest(values: npt.NDArray[np.int16]) -> npt.NDArray[np.uint8]:
    """The code whose value is nearest to each 16 bit sample, from the lowest sample on."""
    order = np.argsort(values, kind="stable")
    known = values[order].astype(np.int32)
    bounds = (known[:-1] + known[1:]) / 2
    return order[np.searchsorted(bounds, np.arange(-(1 << 15), 1 << 15))].astype(np.uint8)


_LINEAR: Final = {
    "pcmu": np.array([_ulaw(code) for code in range(256)], np.int16),
    "pcma": np.array([_alaw(code) for code in range(256)], np.int16),
}
_CODES: Final = {name: _nearest(values) for name, values in _LINEAR.items()}


def expanded(data: bytes, name: str) -> npt.NDArray[np.int16]:
    """Codes as 16 bit samples. name: ``pcmu`` or ``pcma``."""
    return _LINEAR[name][np.frombuffer(data, np.uint8)]


def compressed(pcm16: bytes, name: str) -> bytes:
    """16 bit samples as codes, each that of the nearest value."""
    codes: bytes = _CODES[name][np.frombuffer(pcm16, "<i2").astype(np.int32) + (1 << 15)].tobytes()
    return codes

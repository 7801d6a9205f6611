"""The sound that a client has appended and not committed yet. Pure.

Positions are milliseconds of all sound that the session was given: clients compare them with their own recording.
"""

from __future__ import annotations

from typing import Final

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.realtime.formats import SoundFormat
from stage_runtime.web.translating import media

MAX_NBYTES: Final = 15 << 20  # of one append, as OpenAI's; and of what waits for its commit
MIN_COMMIT_MS: Final = 100


class InputBuffer:
    """The sound from `begin_ms` on."""

    def __init__(self, format: SoundFormat) -> None:
        self.format = format
        self._held = bytearray()
        self._dropped_ms = 0.0  #: Milliseconds of sound before the first held byte.

    @property
    def begin_ms(self) -> float:
        return self._dropped_ms

    @property
    def end_ms(self) -> float:
        return self._dropped_ms + len(self._held) / self.format.bytes_per_ms

    @property
    def nbytes(self) -> int:
        return len(self._held)

    def append(self, audio: object) -> bytes:
        """Take a piece as base64, and give its bytes.

        Raises: RequestError: invalid_request: no base64, or half a sample; too_large. Nothing is taken.
        """
        if not isinstance(audio, str):
            raise InvalidRequest("audio: expected a string of base64", param="audio")
        data = media.from_base64(audio, "audio")
        if len(data) % self.format.width:
            problem = f"expected whole samples of {self.format.width} bytes, got {len(data)} bytes"
            raise InvalidRequest(f"audio: {problem}", param="audio")
        if len(self._held) + len(data) > MAX_NBYTES:
            problem = f"{len(self._held)} bytes wait for their commit, and {len(data)} more are over {MAX_NBYTES}"
            raise RequestError("too_large", f"audio: {problem}", param="audio")
        self._held += data
        return data

    def reformat(self, format: SoundFormat) -> None:
        """The sound that follows has another format; what is held of the earlier one is dropped."""
        self.keep_from(self.end_ms)
        self.format = format

    def keep_from(self, at_ms: float) -> None:
        """Drop what is before."""
        nbytes = min(len(self._held), max(0, self._offset(at_ms)))
        del self._held[:nbytes]
        self._dropped_ms += nbytes / self.format.bytes_per_ms

    def take(self, until_ms: float | None = None) -> bytes:
        """Take out what is before a position; None: all."""
        nbytes = len(self._held) if until_ms is None else min(len(self._held), max(0, self._offset(until_ms)))
        taken = bytes(self._held[:nbytes])
        self.keep_from(self._dropped_ms + nbytes / self.format.bytes_per_ms)
        return taken

    def check_commit(self) -> None:
        """Raises: InvalidRequest: there is too little to commit."""
        held_ms = self.end_ms - self.begin_ms
        if held_ms < MIN_COMMIT_MS:
            problem = f"buffer too small: expected at least {MIN_COMMIT_MS} ms of audio, got {held_ms:.2f} ms"
            raise RealtimeRefused("input_audio_buffer_commit_empty", f"Error committing input audio buffer: {problem}")

    def _offset(self, at_ms: float) -> int:
        """Bytes of whole samples before a position."""
        return round((at_ms - self._dropped_ms) * self.format.bytes_per_ms) // self.format.width * self.format.width


class RealtimeRefused(InvalidRequest):
    """An error with a code of OpenAI's realtime interface, which clients compare."""

    def __init__(self, realtime_code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.realtime_code = realtime_code

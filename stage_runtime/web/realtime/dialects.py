"""The names of the beta interface, which clients still send and read. Pure.

A session has one form for all it sends: the beta's where its client asks for it (``OpenAI-Beta: realtime=v1``). Events
of clients are taken by either name.
"""

from __future__ import annotations

from typing import Any, Final

#: GA's name of an event to the client -> the beta's; None: it has none.
_BETA: Final[dict[str, str | None]] = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
    "conversation.item.done": None,
}
#: The beta's event of a session that only writes down; it names no type.
TRANSCRIPTION_UPDATE: Final = "transcription_session.update"
#: The beta's name of a client's event -> GA's.
CLIENT: Final = {TRANSCRIPTION_UPDATE: "session.update"}
#: The ``object`` of such a session.
TRANSCRIPTION: Final = "realtime.transcription_session"


def beta(event: dict[str, Any]) -> dict[str, Any] | None:
    """An event as the beta has it; None: it does not send it."""
    name = _BETA.get(event["type"], event["type"])
    if event.get("session", {}).get("object") == TRANSCRIPTION:
        name = f"transcription_{name}"
    return None if name is None else {**event, "type": name}

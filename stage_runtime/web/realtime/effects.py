"""The effects that a session wants: orders to the room. Plain values."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from stage_runtime.web.realtime.formats import SoundFormat
from stage_runtime.wire.values import OmniRequest


class Send(msgspec.Struct, frozen=True):
    """An event to the client, by GA's names."""

    event: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """Run a request, and give what comes of it to the session under ``key``.

    encoding: what its sound is encoded into; None: none is wanted.
    """

    key: str
    request: OmniRequest
    encoding: str | None


class Cancel(msgspec.Struct, frozen=True):
    """End the request of ``key`` at every stage, now."""

    key: str
    reason: str


class Listen(msgspec.Struct, frozen=True):
    """Score this sound, and give the scores to `Session.heard`."""

    data: bytes
    format: SoundFormat


class StopListening(msgspec.Struct, frozen=True):
    """The scores so far have nothing to do with what follows."""


Effect: TypeAlias = Send | Answer | Cancel | Listen | StopListening

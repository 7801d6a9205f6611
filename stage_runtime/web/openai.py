"""The OpenAI routes together: those that `serves` names answer, the others say that they do not."""

from __future__ import annotations

from starlette.routing import Route

from stage_runtime.web import chat, models, speech, transcriptions
from stage_runtime.web.endpoints import Service


def routes(service: Service) -> list[Route]:
    rooms = (chat, speech, transcriptions, models)
    return [made for room in rooms for made in room.routes(service)]

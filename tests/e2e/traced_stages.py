"""Stages whose author adds spans of its own."""

from __future__ import annotations

from typing import Any

import stage_runtime as omni


def look() -> Any:
    def run(payload: omni.StagePayload) -> Any:
        with omni.span("scan", payload.request.id, pages=3), omni.span("page", payload.request.id):
            omni.emit("scan_seen", payload.request.id, pages=3)
        return payload.data

    return run


def say() -> Any:
    async def run(payload: omni.StagePayload) -> Any:
        with omni.span("voice", payload.request.id):
            if payload.data == "broken":
                raise ValueError("no voice")
        return payload.data

    return run

"""Speech goes from `listen` to `speak`, a chat by `language`; `speak` joins both, and says what it was given."""

from __future__ import annotations

from typing import Any

import stage_runtime as omni


def passing(name: str) -> Any:
    """Adds its name to the way."""

    def run(payload: omni.StagePayload) -> dict[str, Any]:
        return {**payload.data, "way": [*payload.data.get("way", []), name]}

    return run


def route_fn(request_id: str, output: dict[str, Any]) -> str:
    return str(output["to"])


def wait_for_fn(request_id: str, source: str, payload: omni.StagePayload) -> list[str]:
    return [source]


def merge_fn(inputs: dict[str, omni.StagePayload]) -> omni.StagePayload:
    (payload,) = inputs.values()
    return payload

"""The way of a request through the graph: the hooks of ``examples/qwen3_omni/pipeline.yaml``. Pure.

preprocess ─┬─> image_encoder ─┐
            ├─> audio_encoder ─┼─> thinker ─┬─> decode
            └──────────────────┘            └─> talker -> code2wav      where the answer is to be heard
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import stage_runtime as omni
from stage_models.qwen3_omni import values

Parts: TypeAlias = tuple[values.Prepared, values.Pictures | None, values.Sounds | None]


def terminals(request: omni.OmniRequest) -> list[str]:
    """The stages that end the request (``terminalStagesFn``)."""
    return ["decode", "code2wav"] if aloud(request) else ["decode"]


def aloud(request: omni.OmniRequest) -> bool:
    """Whether the answer is to be spoken: by the modalities asked for; a pipeline request that names none wants all."""
    return "audio" in request.modalities or (request.kind == "pipeline" and not request.modalities)


def after_preprocess(request_id: str, output: Parts) -> omni.Routed:
    """Each encoder gets its media, the thinker the prompt (``routeFn``)."""
    prepared, pictures, sounds = output
    media = {"image_encoder": pictures, "audio_encoder": sounds}
    return omni.Routed({"thinker": prepared, **{stage: one for stage, one in media.items() if one is not None}})


def after_thinker(request_id: str, output: values.Thought) -> list[str]:
    """The targets of the answer, as stream and as result: nobody speaks what is only to be read."""
    return ["decode", "talker"] if output.spoken else ["decode"]


def ready(request_id: str, from_stage: str, payload: omni.StagePayload) -> list[str] | None:
    """The stages that the thinker waits for (``waitForFn``): the prompt, and the encoders of its media."""
    if from_stage != "preprocess":
        return None
    prepared: values.Prepared = payload.data
    encoders = [("image_encoder", prepared.grids), ("audio_encoder", prepared.audio)]
    return ["preprocess", *(stage for stage, media in encoders if media)]


def understood(parts: Mapping[str, omni.StagePayload]) -> values.Understood:
    """The prompt with its rows (``mergeFn``)."""
    found = {stage: part.data for stage, part in parts.items()}
    return values.Understood(
        prepared=found["preprocess"], seen=found.get("image_encoder"), heard=found.get("audio_encoder")
    )

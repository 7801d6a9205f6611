"""The way of a request through the graph: the hooks of ``examples/voice/pipeline.yaml``. Pure.

typed question    listen ──────────────┬─> retrieve ─┬─> prompt -> chat ─┬─> write
spoken question   listen -> recognise ─┘ └───────────┘                   └─> speak
transcription     listen -> recognise -> write      (a translation, too)
speech            listen -> speak
"""

from __future__ import annotations

from collections.abc import Mapping

import stage_runtime as omni
from stage_models.voice import requests
from stage_models.voice.conversation import Answer, Facts, Grounded, Heard, Question, Script


def terminals(request: omni.OmniRequest) -> list[str]:
    """The stages that end the request (``terminalStagesFn``)."""
    if request.kind == "speech":
        return ["speak"]
    if request.kind in ("transcription", "translation"):
        return ["write"]
    return ["write", "speak"] if requests.aloud(request) else ["write"]


def after_listen(request_id: str, output: Heard | Question | Script) -> list[str]:
    match output:
        case Heard():
            return ["recognise"]
        case Question():
            return ["retrieve", "prompt"]
        case Script():
            return ["speak"]


def after_recognise(request_id: str, output: Question) -> list[str]:
    return ["retrieve", "prompt"] if output.task == "answer" else ["write"]


def after_chat(request_id: str, output: Answer) -> list[str]:
    """The targets of the answer, as stream and as result: nobody speaks what is only to be read."""
    return ["write", "speak"] if output.aloud else ["write"]


def question_and_facts(request_id: str, from_stage: str, payload: omni.StagePayload) -> list[str] | None:
    """The inputs that `prompt` waits for: the facts, and the question from whoever has it (``waitForFn``)."""
    return None if from_stage == "retrieve" else [from_stage, "retrieve"]


def ground(parts: Mapping[str, omni.StagePayload]) -> Grounded:
    """Join the question and the facts (``mergeFn``)."""
    found: Facts = parts["retrieve"].data
    (question,) = (part.data for stage, part in parts.items() if stage != "retrieve")
    return Grounded(question=question, facts=found.facts)

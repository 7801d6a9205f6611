"""Every route there is, one entry each: path, handler, types of body and answer, its text in OpenAPI.

Called by `app` and by `processes.coordinator`. A test compares the table in docs/http-api.md with it.
"""

from __future__ import annotations

from stage_runtime.coordinator.events import RequestManagerApi, RequestRecord
from stage_runtime.coordinator.profiling import PipelineProfiling, ProfileAnswer
from stage_runtime.web import profiling as profiles
from stage_runtime.web import schemas
from stage_runtime.web.chat import Chat
from stage_runtime.web.endpoints import Service
from stage_runtime.web.metrics import Metrics
from stage_runtime.web.models import Models
from stage_runtime.web.pipeline import PipelineEndpoint
from stage_runtime.web.probes import Health, Probes
from stage_runtime.web.profiling import Profiles
from stage_runtime.web.routing import FORM, JSON, Route
from stage_runtime.web.speech import Speech
from stage_runtime.web.transcriptions import Transcriptions


def public(service: Service) -> tuple[Route, ...]:
    """For clients of the pipeline."""
    chat, speech, transcriptions = Chat(service), Speech(service), Transcriptions(service)
    models, pipeline = Models(service), PipelineEndpoint(service)
    return (
        Route(
            "POST",
            "/v1/chat/completions",
            "OpenAI's chat completions",
            chat.complete,
            body=schemas.ChatBody,
            serves="chat",
            ids="chatcmpl",
        ),
        Route(
            "POST",
            "/v1/audio/speech",
            "OpenAI's speech",
            speech.speak,
            body=schemas.SpeechBody,
            serves="speech",
            ids="speech",
        ),
        Route(
            "POST",
            "/v1/audio/transcriptions",
            "OpenAI's transcriptions",
            transcriptions.transcribe,
            body=schemas.TranscriptionFields,
            media=(FORM,),
            file="file",
            serves="transcription",
            ids="transcription",
        ),
        Route("GET", "/v1/models", "The model", models.list_all),
        Route("GET", "/v1/models/{id:path}", "The model, by its id", models.one),  # an id may hold slashes
        Route(
            "POST",
            "/v1/pipeline",
            "Run the pipeline",
            pipeline.run,
            body=schemas.PipelineBody,
            media=(JSON, FORM),
            ids="pipeline",
        ),
        Route("GET", "/v1/requests/{id}", "What is known of a request", pipeline.show, answer=RequestRecord),
        Route("DELETE", "/v1/requests/{id}", "Cancel a request", pipeline.cancel),
    )


def health(manager: RequestManagerApi, *, more: str = "") -> tuple[Route, ...]:
    """For load balancers and kubelets. more: as of `Health`."""
    made = Health(manager, more=more)
    ready = "Whether there was a complete set of stages"
    return (
        Route("GET", "/livez", "Whether the process runs", made.live),
        Route("GET", "/readyz", ready, made.ready),
        Route("GET", "/health", ready, made.ready),  # the path that other servers of this API have
    )


def probes(manager: RequestManagerApi, metrics: Metrics) -> tuple[Route, ...]:
    """For kubelets, Prometheus and people; on a port of their own in pods."""
    made = Probes(manager, metrics)
    return (
        *health(manager, more="; see /status"),
        Route("GET", "/status", "Members and requests", made.status),
        Route("GET", "/metrics", "Prometheus' text", made.metrics),
    )


def admin(profiling: PipelineProfiling) -> tuple[Route, ...]:
    """The profiler's: on the admin port in pods; behind the API keys."""
    made = Profiles(profiling)
    return (
        Route(
            "POST",
            "/start_profile",
            "Record events and torch traces",
            made.start,
            body=profiles.StartBody,
            answer=ProfileAnswer,
        ),
        Route("POST", "/stop_profile", "Stop a run", made.stop, body=profiles.StopBody, answer=ProfileAnswer),
        Route(
            "POST",
            "/start_request_profile",
            "Record events",
            made.start_requests,
            body=profiles.StartRequestBody,
            answer=ProfileAnswer,
        ),
        Route("POST", "/stop_request_profile", "Stop a run", made.stop, body=profiles.StopBody, answer=ProfileAnswer),
        Route("GET", "/profiles", "Runs, newest first", made.list),
        Route("GET", "/profiles/{run_id}", "A run's files as a tar", made.archive),
        Route("GET", "/profiles/{run_id}/report", "A run's report", made.report),
    )

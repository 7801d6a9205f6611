"""The table of all routes: path, handler, types of body and answer, text in OpenAPI. OpenAI's: `openai_routes`.

Called by `app` and by `processes.coordinator_process`. A test compares the table in docs/http-api.md with it.
"""

from __future__ import annotations

from typing import Any, Final

from stage_runtime.coordinator.events import RequestManagerApi, RequestRecord
from stage_runtime.coordinator.questions.adapters import AdapterChanges
from stage_runtime.coordinator.questions.profile_runs import PipelineProfiling, ProfileAnswer
from stage_runtime.coordinator.questions.stage_operations import OperationResults, Operations
from stage_runtime.web import answers, openai_routes
from stage_runtime.web.answers import EVENTS, JSON, READY, TEXT, ResponseType
from stage_runtime.web.endpoints import HandlerContext
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.handlers import versions
from stage_runtime.web.handlers.administration import profiling as profiles
from stage_runtime.web.handlers.administration.adapters import LoadAdapterBody, LoadedAdapters, UnloadAdapterBody
from stage_runtime.web.handlers.administration.operations import OperationBody, OperationsEndpoint
from stage_runtime.web.handlers.administration.profiling import Profiles
from stage_runtime.web.handlers.openai.models import Models
from stage_runtime.web.handlers.pipeline import PipelineEndpoint
from stage_runtime.web.handlers.probes import Health, Probes, StagesHealth
from stage_runtime.web.handlers.versions import Version
from stage_runtime.web.page.feed import PageFeed, ShownRequest
from stage_runtime.web.reading import schemas
from stage_runtime.web.routing import FORM, Route
from stage_runtime.web.settings import WebSettings

_PROFILE: Final = (ResponseType((ProfileAnswer,)), ResponseType((ProfileAnswer,), status=503))
_REPORT: Final = (ResponseType((dict[str, Any],)), ResponseType(media="text/html"), ResponseType(media=TEXT))


def public(context: HandlerContext) -> tuple[Route, ...]:
    """Routes for clients of the pipeline."""
    models, pipeline = Models(context), PipelineEndpoint(context)
    return (
        *openai_routes.made(context),
        Route("GET", "/version", "The runtime's version", versions.show, answers=(ResponseType((Version,)),)),
        Route("GET", "/v1/models", "The model", models.list_all, answers=(ResponseType((answers.ModelList,)),)),
        Route(
            "GET",
            "/v1/models/{id:path}",  # an id may hold slashes
            "The model, by its id",
            models.one,
            answers=(ResponseType((answers.Model,)),),
        ),
        Route(
            "POST",
            "/v1/pipeline",
            "Run the pipeline",
            pipeline.run,
            body=schemas.PipelineBody,
            answers=(
                ResponseType((answers.PipelineAnswer,)),
                ResponseType((answers.PipelineChunk, answers.PipelineResult), EVENTS),
            ),
            media=(JSON, FORM),
            ids="pipeline",
        ),
        Route(
            "GET",
            "/v1/requests/{id}",
            "What is known of a request",
            pipeline.show,
            answers=(ResponseType((RequestRecord,)),),
        ),
        Route(
            "DELETE",
            "/v1/requests/{id}",
            "Cancel a request",
            pipeline.cancel,
            answers=(ResponseType((answers.CancelledRequest,)),),
        ),
    )


def health(
    manager: RequestManagerApi, *, more: str = "", kubelet: bool = False, keys: ApiKeys | None = None
) -> tuple[Route, ...]:
    """Routes for load balancers and kubelets. more, kubelet, keys: those of `Health`."""
    made = Health(manager, more=more, kubelet=kubelet, keys=keys)
    ready = "Whether requests can be served"
    return (
        Route("GET", "/livez", "Whether the process runs", made.live, answers=(ResponseType(media=TEXT),)),
        Route("GET", "/readyz", ready, made.ready, answers=READY),
        # the path that other servers of this API have
        Route(
            "GET",
            "/health",
            f"{ready}; with ?stages which stages all need",
            made.health,
            answers=(*READY, ResponseType((StagesHealth,)), ResponseType((StagesHealth,), status=503)),
        ),
    )


def probes(
    manager: RequestManagerApi, metrics: CoordinatorMetrics, *, kubelet: bool = False, keys: ApiKeys | None = None
) -> tuple[Route, ...]:
    """Routes for kubelets, Prometheus and people; in pods they have a port of their own."""
    made = Probes(manager, metrics)
    return (
        *health(manager, more="; see /status", kubelet=kubelet, keys=keys),
        Route("GET", "/status", "Members and requests", made.status, answers=(ResponseType((dict[str, Any],)),)),
        Route("GET", "/metrics", "Prometheus' text", made.metrics, answers=(ResponseType(media=TEXT),)),
    )


def page(manager: RequestManagerApi, settings: WebSettings, *, profiler: bool) -> tuple[Route, ...]:
    """The routes that the page for people asks beside those of clients. profiler: its routes are on the same port."""
    about = {
        "model": settings.model,
        "serves": settings.serves,
        "accepts": sorted(settings.accepts),
        "version": versions.OURS,
        "profiler": profiler,
    }
    made = PageFeed(manager, about=about)
    return (
        Route(
            "GET",
            "/page/events",
            "The page's view of the pipeline, then what changes",
            made.events,
            answers=(ResponseType((dict[str, Any],), EVENTS),),
        ),
        Route(
            "GET",
            "/page/requests/{id}",
            "A request and the lines of its waterfall",
            made.request,
            answers=(ResponseType((ShownRequest,)),),
        ),
    )


def admin(
    profiling: PipelineProfiling, operations: Operations, adapters: AdapterChanges, *, model: str
) -> tuple[Route, ...]:
    """Routes for people who operate the pipeline, ``model``: behind the API keys, and in pods on the admin port."""
    return (*profiler(profiling), *engines(operations, adapters, model=model))


def engines(operations: Operations, adapters: AdapterChanges, *, model: str) -> tuple[Route, ...]:
    """Routes of the operations that engines offer."""
    made, loaded = OperationsEndpoint(operations), LoadedAdapters(adapters, model=model)
    return (
        Route(
            "POST",
            "/v1/load_lora_adapter",
            "Load a LoRA adapter",
            loaded.load,
            body=LoadAdapterBody,
            answers=(ResponseType(media=TEXT),),
        ),
        Route(
            "POST",
            "/v1/unload_lora_adapter",
            "Drop a LoRA adapter",
            loaded.unload,
            body=UnloadAdapterBody,
            answers=(ResponseType(media=TEXT),),
        ),
        Route(
            "POST",
            "/operations",
            "Have stages' engines carry out an operation of their own",
            made.ask,
            body=OperationBody,
            answers=(ResponseType((OperationResults,)),),
        ),
    )


def profiler(profiling: PipelineProfiling) -> tuple[Route, ...]:
    """Routes of profiles."""
    made = Profiles(profiling)
    return (
        Route(
            "POST",
            "/start_profile",
            "Record events and torch traces",
            made.start,
            body=profiles.StartBody,
            answers=_PROFILE,
        ),
        Route("POST", "/stop_profile", "Stop a run", made.stop, body=profiles.StopBody, answers=_PROFILE),
        Route(
            "POST",
            "/start_request_profile",
            "Record events",
            made.start_requests,
            body=profiles.StartRequestBody,
            answers=_PROFILE,
        ),
        Route("POST", "/stop_request_profile", "Stop a run", made.stop, body=profiles.StopBody, answers=_PROFILE),
        Route("GET", "/profiles", "Runs, newest first", made.list, answers=(ResponseType((profiles.ProfilerRuns,)),)),
        Route(
            "GET",
            "/profiles/{run_id}",
            "A run's files as a tar",
            made.archive,
            answers=(ResponseType(media="application/x-tar"),),
        ),
        Route("GET", "/profiles/{run_id}/report", "A run's report", made.report, answers=_REPORT),
    )

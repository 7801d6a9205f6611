"""The HTTP applications of a coordinator: the pipeline's, the probes', the admin port's. Called by `processes`.

FastAPI holds the routes; the hot ones are plain ASGI under it, since
their bodies are read by msgspec, and validation by another library would cost more than the rest of the way. Requests
for them go past its router (`routing.Direct`). The routes are in `routes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics import catalog
from stage_runtime.web import openapi, routes
from stage_runtime.web.endpoints import AdapterNames, HandlerContext
from stage_runtime.web.exchanges.bare import bare_app
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.exchanges.middleware import OPEN, Middleware
from stage_runtime.web.exchanges.origins import Origins
from stage_runtime.web.idempotency import Repeats
from stage_runtime.web.page import files
from stage_runtime.web.reading.fetching import Fetcher
from stage_runtime.web.routing import Direct, Route, mounted, sockets
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool


def make_app(
    manager: RequestManagerApi,
    settings: WebSettings,
    *,
    codecs: CodecPool,
    metrics: CoordinatorMetrics | None = None,
    admin: Sequence[Route] = (),
    budget: MemoryBudget | None = None,
) -> FastAPI:
    """The application.

    codecs: the caller's, who closes it.
    metrics: given when another port shows them too (`make_probes`): both then count into the same.
    admin: the profiler's routes, where they have no port of their own; they are behind the API keys.
    budget: given when another port takes requests, too: both then share it.
    """
    metrics = metrics or CoordinatorMetrics(manager, of_members=settings.probes)
    context = HandlerContext(
        manager=manager,
        settings=settings,
        fetcher=Fetcher(settings),
        codecs=codecs,
        adapter_names=AdapterNames(manager),
        sessions=metrics.sessions,
    )
    public = routes.public(context)
    others = (*_others(manager, settings, metrics, profiler=bool(admin)), *admin)
    keyed = settings.api_keys.asked_for
    shown = (*files.documentation(keyed=keyed), *(files.page(keyed=keyed) if settings.probes else ()))
    served = [one for one in public if one.serves is None or one.serves in settings.serves]
    endpoints = mounted(public, serves=settings.serves, repeats=Repeats())
    budget = budget or MemoryBudget(settings.max_held_bytes, grace_s=settings.body_grace_s)
    metrics.read(catalog.HTTP_HELD_BYTES, lambda: budget.held_nbytes)
    origins = Origins(local=settings.local, hosts=settings.hosts)
    guards: dict[str, Any] = {
        "api_keys": settings.api_keys,
        "origins": origins,
        "budget": budget,
        "observe": metrics.observe,
        "without_key": OPEN | files.PATHS,
    }
    app = bare_app(title=settings.model)
    app.add_middleware(Middleware, **guards)
    app.around = lambda inner: Direct(inner, routes=endpoints, guarded=lambda one: Middleware(one, **guards))
    app.router.routes[:0] = [*endpoints, *sockets(public, serves=settings.serves)]
    app.router.routes.extend(mounted((*others, *shown)))
    app.openapi = lambda: openapi.document(  # type: ignore[method-assign]
        settings.model, (*served, *others), keyed=keyed, without_key=OPEN
    )
    return app


def make_probes(manager: RequestManagerApi, metrics: CoordinatorMetrics) -> FastAPI:
    """The probes as an application of their own, without API keys: give it the same ``metrics`` as `make_app`."""
    app = bare_app(title="probes")
    app.router.routes[:] = mounted(routes.probes(manager, metrics, kubelet=True))
    app.add_middleware(Middleware)
    return app


def make_admin(
    manager: RequestManagerApi,
    settings: WebSettings,
    *,
    codecs: CodecPool,
    metrics: CoordinatorMetrics,
    admin: Sequence[Route],
    budget: MemoryBudget,
) -> FastAPI:
    """The admin port's: all routes and the page, behind the same API keys. Only a port-forward reaches it."""
    own = msgspec.structs.replace(settings, probes=True, local=True)
    return make_app(manager, own, codecs=codecs, metrics=metrics, admin=admin, budget=budget)


def _others(
    manager: RequestManagerApi, settings: WebSettings, metrics: CoordinatorMetrics, *, profiler: bool
) -> tuple[Route, ...]:
    """Routes that are served beside those of the pipeline's clients."""
    if not settings.probes:
        return routes.health(manager, keys=settings.api_keys)
    probes = routes.probes(manager, metrics, keys=settings.api_keys)
    return (*probes, *routes.page(manager, settings, profiler=profiler))

"""`/livez`, `/readyz`, `/status`, `/metrics`: for kubelets, Prometheus and people, on a port of their own in pods."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.routing import Route

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics.exposition import CONTENT_TYPE
from stage_runtime.web import endpoints
from stage_runtime.web.bare import bare_app
from stage_runtime.web.exchange import Exchange
from stage_runtime.web.metrics import Metrics
from stage_runtime.web.middleware import Middleware


def routes(manager: RequestManagerApi, metrics: Metrics) -> list[Route]:
    made = _Probes(manager, metrics)
    return [
        endpoints.route("/livez", ["GET"], made.live),
        endpoints.route("/readyz", ["GET"], made.ready),
        endpoints.route("/status", ["GET"], made.status),
        endpoints.route("/metrics", ["GET"], made.metrics),
    ]


def make_probes(manager: RequestManagerApi, metrics: Metrics) -> FastAPI:
    """The probes as an application of their own, without API keys: give it the same ``metrics`` as `make_app`."""
    app = bare_app(title="probes")
    app.router.routes[:] = routes(manager, metrics)
    app.add_middleware(Middleware)
    return app


class _Probes:
    def __init__(self, manager: RequestManagerApi, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics

    async def live(self, exchange: Exchange) -> None:
        """This process answers. Never says anything of a model: restarting us would not cure one."""
        await exchange.reply(b"ok\n", content_type=b"text/plain")

    async def ready(self, exchange: Exchange) -> None:
        if self._manager.ready():
            await exchange.reply(b"ready\n", content_type=b"text/plain")
        else:
            await exchange.reply(
                b"no complete set of stages yet; see /status\n", status=503, content_type=b"text/plain"
            )

    async def status(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode(self._manager.status(), enc_hook=_as_text))

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.reply(self._metrics.render(), content_type=CONTENT_TYPE.encode())


def _as_text(value: Any) -> str:
    return str(value)

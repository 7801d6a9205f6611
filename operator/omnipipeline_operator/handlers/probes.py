"""`/livez`, `/readyz`, `/metrics` of the operator.

Here: the HTTP server and what the two probes mean. Called by `lifecycle`. Live: lists succeed, and no pipeline has
been due for too long. Ready: one list has been completed; a standby is ready too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

Health = Callable[[], str | None]  #: The reason of a failed probe; None: it succeeds.
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(port: int, *, live: Health, ready: Health, registry: CollectorRegistry) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port."""
    app = web.Application()
    app.router.add_get("/livez", _probe(live))
    app.router.add_get("/readyz", _probe(ready))
    app.router.add_get("/metrics", _metrics(registry))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, None, port)  # every address, of both families
    try:
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _probe(health: Health) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        wrong = health()
        return web.Response(text="ok\n") if wrong is None else web.Response(status=500, text=f"{wrong}\n")

    return answer


def _metrics(registry: CollectorRegistry) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    return answer

"""`/livez`, `/readyz`, `/health`: for kubelets and load balancers. `/status`, `/metrics`: for people and Prometheus.

In pods all of them are on a port of their own; the public one has the first three as well, because load balancers probe
the port that they send traffic to. They contain no data of the pipeline and need no key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics.exposition import CONTENT_TYPE
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics


class Health:
    """more: where to read on, on the same port. kubelet: the pod's kubelet asks, which can do nothing for a stage."""

    def __init__(self, manager: RequestManagerApi, *, more: str = "", kubelet: bool = False) -> None:
        self._manager = manager
        self._more = more
        self._kubelet = kubelet

    async def live(self, exchange: Exchange) -> None:
        """This process answers. The state of models does not count: restarting this process would not repair one."""
        await exchange.reply(b"ok\n", content_type=b"text/plain")

    async def ready(self, exchange: Exchange) -> None:
        if not self._manager.ready():
            await self._not_ready(exchange, "no complete set of stages yet")
        elif not self._kubelet and self._manager.problem() is not None:
            await self._not_ready(exchange, "no request can be served")  # no key was asked for: no names
        else:
            await exchange.reply(b"ready\n", content_type=b"text/plain")

    async def _not_ready(self, exchange: Exchange, problem: str) -> None:
        await exchange.reply(f"{problem}{self._more}\n".encode(), status=503, content_type=b"text/plain")


class Probes:
    def __init__(self, manager: RequestManagerApi, metrics: CoordinatorMetrics) -> None:
        self._manager = manager
        self._metrics = metrics

    async def status(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode(self._manager.status(), enc_hook=_as_text))

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.reply(self._metrics.render(), content_type=CONTENT_TYPE.encode())


def _as_text(value: Any) -> str:
    return str(value)

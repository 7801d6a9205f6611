"""`/livez`, `/readyz`, `/health`: for kubelets and load balancers. `/status`, `/metrics`: for people and Prometheus.

All of them are on a port of their own in pods; the public one has the first three as well, because load balancers probe
the port that they send traffic to. They contain no data of the pipeline and need no key, but for `/health?stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi, StageNeed
from stage_runtime.errors import InvalidRequest
from stage_runtime.metrics.exposition import CONTENT_TYPE
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.exchanges.middleware import authorise


class StagesHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/health?stages`."""

    ready: bool
    problem: str | None  #: Why no request can be served, now or soon.
    lacks: list[str]  #: Stages that every request needs and that have no instance now.
    stages: Sequence[StageNeed]


class Health:
    """more: where to read on, on the same port. kubelet: the pod's kubelet asks, which can do nothing for a stage.
    keys: open `/health?stages`, which names stages.
    """

    def __init__(
        self, manager: RequestManagerApi, *, more: str = "", kubelet: bool = False, keys: ApiKeys | None = None
    ) -> None:
        self._manager = manager
        self._more = more
        self._kubelet = kubelet
        self._keys = keys or ApiKeys()

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

    async def health(self, exchange: Exchange) -> None:
        """The same as `ready`; with the parameter ``stages`` also the stages that every request needs, and those of
        them that are away.

        Raises: RequestError: unauthorized: the parameter needs a key; invalid_request: another parameter.
        """
        asked = exchange.scope.get("query_string", b"").decode("latin-1")
        if not asked:
            await self.ready(exchange)
            return
        if asked not in ("stages", "stages="):
            raise InvalidRequest(f"{asked[:80]!r}: expected the parameter stages, or none", param="stages")
        authorise(exchange, self._keys)
        stages = self._manager.needs()
        ready, problem = self._manager.ready(), self._manager.problem()
        lacks = [one.stage for one in stages if one.needed and not one.instances]
        shown = StagesHealth(ready=ready, problem=problem, lacks=lacks, stages=stages)
        well = ready and problem is None and not lacks
        await exchange.reply(msgspec.json.encode(shown), status=200 if well else 503)

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

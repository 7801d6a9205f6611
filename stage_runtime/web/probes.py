"""`/livez`, `/readyz`, `/status`, `/metrics`: for kubelets, Prometheus and people, on a port of their own in pods."""

from __future__ import annotations

from typing import Any

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.metrics.exposition import CONTENT_TYPE
from stage_runtime.web.exchange import Exchange
from stage_runtime.web.metrics import Metrics


class Probes:
    def __init__(self, manager: RequestManagerApi, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics

    async def live(self, exchange: Exchange) -> None:
        """This process answers. The state of models does not count: a restart of this process would not cure one."""
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

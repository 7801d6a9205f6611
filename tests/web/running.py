"""A real server on a real socket, over a request manager in memory."""

from __future__ import annotations

import typing
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from omnipipeline_spec.types.routes import Served
from stage_runtime.web.app import make_app
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.listening import server
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool
from tests.patience import patience
from tests.web.scripted_manager import Script, ScriptedManager

PATIENCE_S = patience(60.0)  # far more than anything takes, also on a busy machine
ALL = WebSettings(model="org/hello", serves=typing.get_args(Served), created=1700000000)


class Running(msgspec.Struct, frozen=True):
    """A server and the request manager behind it."""

    manager: ScriptedManager
    server: server.Server
    codecs: CodecPool

    @property
    def url(self) -> str:
        return self.server.url


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@asynccontextmanager
async def start(
    script: Script,
    settings: WebSettings = ALL,
    *,
    cap: int = 8,
    limits: ConnectionLimits | None = None,
    budget: MemoryBudget | None = None,
) -> AsyncIterator[Running]:
    manager = ScriptedManager(script, cap=cap)
    async with CodecPool() as codecs:
        app = make_app(manager, settings, codecs=codecs, budget=budget)
        async with server.Server(app, port=0, drain_s=2.0, limits=limits) as running:
            yield Running(manager, running, codecs)

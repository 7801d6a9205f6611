"""What all routes share: the desk and the settings behind them, and how a handler becomes a route."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stage_runtime.coordinator.events import Desk
from stage_runtime.errors import RequestError
from stage_runtime.web.exchange import KEY, Exchange
from stage_runtime.web.fetching import Fetcher
from stage_runtime.web.settings import WebSettings

Handler = Callable[[Exchange], Awaitable[None]]


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers work with."""

    desk: Desk
    settings: WebSettings
    fetcher: Fetcher

    def check_served(self, name: str) -> None:
        """Raises: RequestError: unsupported_endpoint: the pipeline's ``serves`` has no ``name``."""
        if name not in self.settings.serves:
            served = ", ".join(self.settings.serves) or "no OpenAI route"
            raise RequestError(
                "unsupported_endpoint", f"this pipeline serves {served}, not {name}; /v1/pipeline always works"
            )


class Endpoint:
    """A handler as an ASGI application. Starlette gives it the scope untouched, and spends no time on it."""

    def __init__(self, handler: Handler, pattern: str) -> None:
        self._handler = handler
        self._pattern = pattern

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[KEY]
        exchange.route = self._pattern
        await self._handler(exchange)


def route(pattern: str, methods: Sequence[str], handler: Handler) -> Route:
    return Route(pattern, Endpoint(handler, pattern), methods=list(methods))


def new_id(prefix: str) -> Callable[[], str]:
    return lambda: f"{prefix}-{uuid.uuid4().hex}"

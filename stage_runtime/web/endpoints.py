"""What all routes share: the request manager and the settings behind them, and how a handler becomes a route."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.errors import RequestError
from stage_runtime.web import strictjson
from stage_runtime.web.errors import RequestRefused
from stage_runtime.web.exchange import KEY, Exchange
from stage_runtime.web.fetching import Fetcher
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

Read = TypeVar("Read")
Handler = Callable[[Exchange], Awaitable[None]]


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers work with."""

    manager: RequestManagerApi
    settings: WebSettings
    fetcher: Fetcher
    codecs: CodecPool

    def check_served(self, name: str) -> None:
        """Raises: RequestError: unsupported_endpoint: the pipeline's ``serves`` has no ``name``."""
        if name not in self.settings.serves:
            served = ", ".join(self.settings.serves) or "no OpenAI route"
            raise RequestError(
                "unsupported_endpoint", f"this pipeline serves {served}, not {name}; /v1/pipeline always works"
            )

    async def read(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """The request's body, decoded; its bytes are let go of.

        Raises: RequestError: there is no room for another request (before the body is read); as `Exchange.body`;
                and what ``decode`` raises.
        """
        self.manager.check_room()
        return await apart(exchange, decode, await exchange.body(self.settings.max_body_bytes))

    async def read_json(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """As `read`.

        Raises: RequestError: invalid_request (415): it does not say that it is JSON. What else browsers send, they
                send across sites without asking.
        """
        given = (exchange.only_header(b"content-type") or "").partition(";")[0].strip().lower()
        if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
            problem = f"content-type: application/json is needed, not {given or 'none'}"
            raise RequestRefused(415, "invalid_request", problem, param="content-type")
        return await self.read(exchange, decode)


async def apart(exchange: Exchange, function: Callable[..., Read], *arguments: Any) -> Read:
    """Call ``function`` with a request's data: on another thread where there is so much that others would wait."""
    if exchange.body_nbytes <= strictjson.SMALL:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


class Endpoint:
    """A handler as an ASGI application. Starlette gives it the scope untouched, and spends no time on it."""

    def __init__(self, handler: Handler, pattern: str) -> None:
        self._handler = handler
        self._pattern = pattern

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[KEY]
        exchange.route = self._pattern
        await self._handler(exchange)


class Direct:
    """Calls the endpoint of a request for one of ``routes`` at once, and gives what is left to FastAPI.

    A POST without parameters in its path needs nothing of what lies between: matching, exit stacks, error handlers.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[Route]) -> None:
        self._app = app
        self._endpoints: dict[str, ASGIApp] = {
            route.path: route.endpoint for route in routes if route.methods == {"POST"} and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        post = scope["type"] == "http" and scope["method"] == "POST"
        await (self._endpoints.get(scope["path"], self._app) if post else self._app)(scope, receive, send)


def route(pattern: str, methods: Sequence[str], handler: Handler) -> Route:
    return Route(pattern, Endpoint(handler, pattern), methods=list(methods))


def new_id(prefix: str) -> Callable[[], str]:
    return lambda: f"{prefix}-{uuid.uuid4().hex}"

"""The type of a route, and how a table of routes becomes an application. The table itself is in `routes`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette import routing
from starlette.types import ASGIApp, Receive, Scope, Send

from stage_runtime.errors import RequestError
from stage_runtime.web.answers import JSON, ResponseType
from stage_runtime.web.exchanges.exchange import KEY, Exchange
from stage_runtime.web.exchanges.web_sockets import WebSocket
from stage_runtime.web.idempotency import Repeats

RouteHandler = Callable[[Exchange], Awaitable[None]]
SocketHandler = Callable[[WebSocket], Awaitable[None]]
FORM = "multipart/form-data"


class Route(msgspec.Struct, frozen=True):
    """One route: who answers it, and what the OpenAPI document contains of it."""

    method: str
    path: str  #: A pattern of Starlette's: ``/v1/requests/{id}``.
    summary: str
    handler: RouteHandler
    body: Any = None  #: The type of the request's body; None: it has none.
    media: tuple[str, ...] = (JSON,)  #: Content types of the body.
    file: str | None = None  #: Name of the file that is part of a form.
    text_query: Any = None  #: The type of the query beside a body of plain text; None: such a body is not taken.
    answers: tuple[ResponseType, ...] = ()  #: Types of its answers, but for errors.
    serves: str | None = None  #: Refused where the pipeline's ``serves`` does not have this name.
    ids: str | None = None  #: Prefix of the ids of its requests; None: it takes no request of the pipeline.
    socket: SocketHandler | None = None  #: The handler where the path is a WebSocket, too.

    @property
    def parameters(self) -> list[str]:
        """Names in the path."""
        return re.findall(r"{(\w+)(?::\w+)?}", self.path)


def sockets(routes: Iterable[Route], *, serves: Sequence[str] = ()) -> list[routing.WebSocketRoute]:
    """The WebSockets of ``routes``, as Starlette takes them. serves: of the pipeline."""
    found = [one for one in routes if one.socket is not None]
    return [routing.WebSocketRoute(one.path, _RouteApplication(one, serves)) for one in found]


def mounted(
    routes: Iterable[Route], *, serves: Sequence[str] = (), repeats: Repeats | None = None
) -> list[routing.Route]:
    """The routes as Starlette takes them, one for each path: it names the methods of one route in ``Allow``.

    serves: that of the pipeline. repeats: for routes that take its requests.
    """
    paths: dict[str, dict[str, _RouteApplication]] = {}
    for one in routes:
        paths.setdefault(one.path, {})[one.method] = _RouteApplication(one, serves, repeats)
    return [
        routing.Route(path, _ByMethod(made) if len(made) > 1 else next(iter(made.values())), methods=list(made))
        for path, made in paths.items()
    ]


class Direct:
    """Calls the endpoint of a request for one of ``routes`` at once, and gives what is left to FastAPI.

    A POST without parameters in its path needs no matching, no exit stack and no error handler.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[routing.Route], guarded: Callable[[ASGIApp], ASGIApp]) -> None:
        """guarded: puts around an endpoint what every request passes."""
        self._app = app
        self._endpoints: dict[str, ASGIApp] = {
            route.path: guarded(route.endpoint)
            for route in routes
            if route.methods == {"POST"} and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        post = scope["type"] == "http" and scope["method"] == "POST"
        await (self._endpoints.get(scope["path"], self._app) if post else self._app)(scope, receive, send)


class _ByMethod:
    """Routes of one path as an ASGI application."""

    def __init__(self, applications: Mapping[str, ASGIApp]) -> None:
        self._applications = applications

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._applications[method](scope, receive, send)


class _RouteApplication:
    """A route as an ASGI application. Starlette gives it the scope untouched, and spends no time on it."""

    def __init__(self, route: Route, serves: Sequence[str], repeats: Repeats | None = None) -> None:
        self._route = route
        self._repeats = repeats if route.ids is not None else None
        self._served = route.serves is None or route.serves in serves
        self._all_served = ", ".join(serves) or "no OpenAI route"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, exchange = self._route, scope[KEY]
        exchange.route = route.path
        if route.ids is not None:
            exchange.name_request(lambda: f"{route.ids}-{secrets.token_hex(16)}")
        if not self._served:
            problem = f"this pipeline serves {self._all_served}, not {route.serves}; /v1/pipeline always works"
            raise RequestError("unsupported_endpoint", problem)
        if exchange.is_socket and route.socket is not None:
            await route.socket(WebSocket(exchange, receive, send))
        elif self._repeats is not None:
            await self._repeats.once(exchange, route.handler)
        else:
            await route.handler(exchange)

"""Starlette without routes, whose errors look like all of ours. Made into an application by `app`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import KEY, Exchange


class App(Starlette):
    """Starlette, and what is put around it. `add_middleware` would put it inside of a layer of Starlette's own."""

    around: Callable[[ASGIApp], ASGIApp] | None = None

    def build_middleware_stack(self) -> ASGIApp:
        stack = super().build_middleware_stack()
        return stack if self.around is None else self.around(stack)


def bare_app() -> App:
    """Starlette with our errors."""
    app = App(exception_handlers={HTTPException: _on_http_exception})
    app.router.redirect_slashes = False
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No route (404), or not with this method (405)."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # not ``request.url``, which uses the Host header
    if error.status_code == 404:
        problem = RequestError("unsupported_endpoint", f"there is no {request.method} {path} here")
    elif error.status_code == 405:
        problem = RequestError("unsupported_endpoint", f"{path} does not take {request.method}")
    else:
        problem = InvalidRequest(str(error.detail))
    return _as_response(request, problem, error.status_code, dict(error.headers or {}))


def _as_response(request: Request, error: RequestError, status: int, headers: dict[str, str]) -> Response:
    exchange: Exchange = request.scope[KEY]
    exchange.note_error(error)
    body = errors.encoded(error, exchange.answer_id())
    return Response(body, status_code=status, headers=headers, media_type="application/json")

"""An application without routes whose errors look like all of ours. Made into one by `app` and `probes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.exchanges import errors
from stage_runtime.web.exchanges.exchange import KEY, Exchange

#: Measurements of FastAPI's own, which look into the environment at every request. Ours are in `metrics`.
_NO_TELEMETRY: Final[Any] = {"tracing": False, "metrics": False, "logs": False}


class App(FastAPI):
    """FastAPI, and what is put around it. `add_middleware` would put it inside of three layers of FastAPI's own."""

    around: Callable[[ASGIApp], ASGIApp] | None = None

    def build_middleware_stack(self) -> ASGIApp:
        stack = super().build_middleware_stack()
        return stack if self.around is None else self.around(stack)


def bare_app(*, title: str) -> App:
    """FastAPI with our errors, and without its pages, which load scripts from elsewhere."""
    app = App(title=title, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TELEMETRY)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No route (404), not with this method (405), or an error of an admin router."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # not ``request.url``, which uses the Host header
    if error.status_code == 404:
        problem = RequestError("unsupported_endpoint", f"{request.method} {path} is not a route of this server")
    elif error.status_code == 405:
        problem = RequestError("unsupported_endpoint", f"{path} does not take {request.method}")
    else:
        problem = InvalidRequest(str(error.detail))
    return _as_response(request, problem, error.status_code, dict(error.headers or {}))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"] if step != "body")
    return _as_response(request, InvalidRequest(f"{where}: {first['msg']}", param=where), 400, {})


def _as_response(request: Request, error: RequestError, status: int, headers: dict[str, str]) -> Response:
    exchange: Exchange = request.scope[KEY]
    exchange.note_error(error)
    body = errors.encoded(error, exchange.answer_id())
    return Response(body, status_code=status, headers=headers, media_type="application/json")

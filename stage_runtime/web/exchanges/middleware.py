"""The first and last steps of every HTTP request: key, id, errors, the log line. ASGI middleware of all our apps."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from stage_runtime.errors import RequestError
from stage_runtime.web.exchanges import errors, web_sockets
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.exchange import KEY, Exchange
from stage_runtime.web.exchanges.memory_budget import MemoryBudget, MemoryReservation
from stage_runtime.web.exchanges.origins import Origins

_log = logging.getLogger("stage_runtime.web.requests")
_faults = logging.getLogger(__name__)

#: No key is required, nothing is logged: kubelets and load balancers call them every second.
OPEN: Final = frozenset({"/livez", "/readyz", "/health"})
SWITCHED: Final = 101  #: The status of a WebSocket that was accepted. Its time is a person's: no metric has it.
_QUIET: Final = OPEN | {"/metrics", "/status"}


class Middleware:
    """The outermost loop: whatever a route raises ends here, as an answer and a line in the log."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: ApiKeys | None = None,
        origins: Origins | None = None,
        budget: MemoryBudget | None = None,
        observe: Callable[[Exchange, float], None] | None = None,
        without_key: Collection[str] = OPEN,
    ) -> None:
        """without_key: paths that need none."""
        self._app = app
        self._keys = api_keys or ApiKeys()
        self._origins = origins
        self._budget = budget or MemoryBudget(0)
        self._observe = observe
        self._without_key = without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope["method"], send = "GET", web_sockets.refusing(send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, MemoryReservation(self._budget))
        scope[KEY] = exchange
        try:
            await self._answer(exchange, receive)
        finally:
            exchange.reservation.release()
            del scope[KEY]  # otherwise the two refer to each other, and only the garbage collector frees them
            ended_at = time.perf_counter()
            if exchange.path not in _QUIET:
                _log_line(exchange, ended_at)
            if self._observe is not None and exchange.status != SWITCHED:
                self._observe(exchange, ended_at)

    async def _answer(self, exchange: Exchange, receive: Receive) -> None:
        try:
            if self._origins is not None:
                exchange.common_headers = self._origins.cors(exchange)
                if not self._keys.asked_for:
                    self._origins.check(exchange)
                if (allowed := self._origins.preflight(exchange)) is not None:  # browsers send no key with it
                    await exchange.reply_empty(allowed)
                    return
            if exchange.path not in self._without_key:
                authorise(exchange, self._keys)
            await self._app(exchange.scope, receive, exchange.send)
        except RequestError as error:
            await fail(exchange, error)
        except asyncio.CancelledError:  # by `server.Server.cut` alone: this is the outermost call of its task
            await fail(exchange, RequestError("unavailable", "the server is stopping"))
        except Exception:
            _faults.exception("request %s: %s %s failed", exchange.request_id, exchange.method, exchange.route)
            await fail(exchange, errors.internal(exchange.request_id))
            if exchange.is_socket and exchange.started:
                await exchange.close_socket(web_sockets.INTERNAL_ERROR, "internal error")


def authorise(exchange: Exchange, keys: ApiKeys) -> None:
    """Raises: RequestError: unauthorized: keys are asked for, and the request has none of them."""
    if not keys.asked_for:
        return
    scheme, _, given = (exchange.only_header(b"authorization") or "").partition(" ")
    if not scheme and exchange.is_socket and (key := web_sockets.key_of(exchange)) is not None:
        scheme, given = "bearer", key
    token = given.strip().encode()
    if not keys.allow(token) or scheme.lower() != "bearer":
        raise RequestError("unauthorized", "an API key is needed: Authorization: Bearer KEY")


async def fail(exchange: Exchange, error: RequestError) -> None:
    """Answer with an error. An answer that has begun is left incomplete, which the client notices."""
    exchange.note_error(error)
    if exchange.started:
        return
    body = errors.encoded(error, exchange.answer_id())
    await exchange.reply(body, status=error.status, headers=errors.headers(error))


def _log_line(exchange: Exchange, ended_at: float) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    first = exchange.first_byte_at
    facts = {
        "request_id": exchange.request_id,
        "route": f"{exchange.method} {exchange.route}",
        "status": exchange.status,
        "outcome": exchange.outcome,
        "ms": round((ended_at - exchange.begun_at) * 1e3, 2),
        "first_byte_ms": None if first is None else round((first - exchange.begun_at) * 1e3, 2),
        "bytes": exchange.sent_bytes,
    }
    if exchange.answer_times is not None and (tokens := exchange.answer_times.tokens.shown()) is not None:
        facts |= {"prompt_tokens": tokens.prompt_tokens, "completion_tokens": tokens.completion_tokens}
    refused = exchange.problem
    words = [f"{name}={value}" for name, value in facts.items()]
    words += [f"{name}={json.dumps(value)}" for name, value in refused.items()]  # a client's text stays one word
    _log.info(" ".join(words), extra={"facts": facts | refused})

"""The common part of all routes: the request manager and the settings, and how a handler becomes a route."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.errors import RequestError
from stage_runtime.metrics import planes
from stage_runtime.web.exchanges import threads
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import strictjson
from stage_runtime.web.reading.fetching import Fetcher
from stage_runtime.web.realtime.counting import SessionCounts
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

Read = TypeVar("Read")
ADAPTERS_KEPT_S: Final = 1.0  # a beat is as old


class AdapterNames:
    """The LoRA adapters of the pipeline: looked for in the beats of all instances, and not for every request."""

    def __init__(self, manager: RequestManagerApi, *, kept_s: float = ADAPTERS_KEPT_S) -> None:
        self._manager = manager
        self._kept_s = kept_s
        self._until = -math.inf
        self._names: frozenset[str] | None = None

    def known(self) -> frozenset[str] | None:
        """None: no stage takes any."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + self._kept_s
            self._names = planes.adapters(self._manager.member_gauges().values())
        return self._names


class HandlerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that handlers work with."""

    manager: RequestManagerApi
    settings: WebSettings
    fetcher: Fetcher
    codecs: CodecPool
    adapter_names: AdapterNames
    sessions: SessionCounts = msgspec.field(default_factory=SessionCounts)

    def chosen(self, model: str | None) -> str:
        """The ``model`` of a body, as stages are given it; empty: the pipeline itself."""
        return "" if model is None or model == self.settings.model else model

    def shown(self, model: str | None) -> str:
        """The ``model`` of an answer to it. A pipeline without adapters takes any name for its own."""
        chosen = self.chosen(model)
        return chosen if chosen and self.adapter_names.known() is not None else self.settings.model

    async def read(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """The request's body, decoded; its bytes are let go of.

        Raises: RequestError: another request finds no room (before the body is read); as `Exchange.body`;
                and what ``decode`` raises.
        """
        self.manager.check_room()
        return await apart(exchange, decode, await exchange.body(self.settings.max_body_bytes))

    def hold_copies(self, exchange: Exchange, nbytes: int, param: str) -> None:
        """Count ``nbytes`` of a body that stages are sent once more: ``param`` stands for several of its values.

        Raises: RequestError: too_large: with them the body is larger than any may be; rate_limited: as `Exchange.body`.
        """
        most = self.settings.max_body_bytes
        if exchange.body_nbytes + nbytes > most:
            problem = f"{param}: it is sent again for each value that goes with it, which is more than {most} bytes"
            raise RequestError("too_large", problem, param=param)
        exchange.reservation.add(nbytes)

    async def read_json(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """The same as `read`, for a body of JSON.

        Raises: RequestError: invalid_request (415): its content type is not JSON's. Browsers send other content types
                across sites without a preflight.
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
    return await threads.call(function, *arguments)

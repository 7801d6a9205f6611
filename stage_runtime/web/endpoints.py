"""The common part of all routes: the request manager and the settings, and how a handler becomes a route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi
from stage_runtime.web.exchanges.errors import RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import strictjson
from stage_runtime.web.reading.fetching import Fetcher
from stage_runtime.web.realtime.counting import SessionCounts
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

Read = TypeVar("Read")


class HandlerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that handlers work with."""

    manager: RequestManagerApi
    settings: WebSettings
    fetcher: Fetcher
    codecs: CodecPool
    sessions: SessionCounts = msgspec.field(default_factory=SessionCounts)

    async def read(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """The request's body, decoded; its bytes are let go of.

        Raises: RequestError: there is no room for another request (before the body is read); as `Exchange.body`;
                and what ``decode`` raises.
        """
        self.manager.check_room()
        return await apart(exchange, decode, await exchange.body(self.settings.max_body_bytes))

    async def read_json(self, exchange: Exchange, decode: Callable[[bytes], Read]) -> Read:
        """As `read`.

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
    return await asyncio.to_thread(function, *arguments)

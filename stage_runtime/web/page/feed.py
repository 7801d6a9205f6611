"""The events of the page: a coordinator's snapshot, then each second what has changed. Nothing is computed while nobody
looks, and once for all who do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import msgspec

from stage_runtime.coordinator.events import RequestManagerApi, RequestRecord
from stage_runtime.errors import RequestError
from stage_runtime.profiler import lines
from stage_runtime.web import serving
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.page import snapshots
from stage_runtime.web.page.snapshots import Snapshot

EVERY_S: Final = 1.0
FRESH_S: Final = 0.9 * EVERY_S  # a snapshot serves all pages of one second
REQUESTS: Final = 40  # in flight, and ended, that a page shows
PAGES: Final = 16  # that may be open at once
OPEN_S: Final = 900.0  # then the page asks again: a key that was taken away shows nothing for longer


class ShownLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a request's waterfall; times are milliseconds after its admission."""

    label: str
    stage: str
    start: float
    end: float
    parts: Sequence[tuple[str, float]]


class ShownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /page/requests/{id}`."""

    record: RequestRecord
    lines: list[ShownLine]


class PageFeed:
    """about: what the page shows beside the coordinator's own state."""

    def __init__(self, manager: RequestManagerApi, *, about: Mapping[str, Any]) -> None:
        self._manager = manager
        self._about = about
        self._pages = 0
        self._taken_at = -EVERY_S
        self._last: Snapshot | None = None

    async def events(self, exchange: Exchange) -> None:
        """GET /page/events."""
        if self._pages >= PAGES:
            raise RequestError("rate_limited", f"{PAGES} pages are open", retry_after_s=10.0)
        self._pages += 1
        gone = asyncio.Event()
        exchange.watch(gone.set)
        try:
            await serving.send_frames(exchange, self._frames(gone), _failed, heartbeat_s=OPEN_S)
        finally:
            exchange.unwatch()
            self._pages -= 1

    async def request(self, exchange: Exchange) -> None:
        """GET /page/requests/{id}."""
        request_id = exchange.scope["path_params"]["id"]
        record = self._manager.record(request_id)
        if record is None:
            raise RequestError("not_found", f"request {request_id!r} is not known (any more)")
        await exchange.reply(msgspec.json.encode(ShownRequest(record=record, lines=lines_of(record))))

    async def _frames(self, gone: asyncio.Event) -> AsyncGenerator[bytes, None]:
        ends_at, before = time.monotonic() + OPEN_S, None
        while not gone.is_set() and time.monotonic() < ends_at:
            now = self._snapshot()
            yield b"".join(serving.named_frame(name, data) for name, data in snapshots.changes(before, now))
            if now.draining:  # a page must not keep a coordinator from its end
                return
            before = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), EVERY_S)

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        if self._last is None or now - self._taken_at >= FRESH_S:
            self._taken_at = now
            manager = self._manager
            self._last = snapshots.take(
                manager.status(), manager.metrics(), manager.latest(REQUESTS), now=time.time(), about=self._about
            )
        return self._last


def lines_of(record: RequestRecord) -> list[ShownLine]:
    """The lines of a request that `omni trace` draws, too."""
    found = lines.of_record(msgspec.to_builtins(record.stages), msgspec.to_builtins(record.hops))
    return [
        ShownLine(label=one.label, stage=one.stage, start=one.start_ms, end=one.end_ms, parts=one.parts)
        for one in found
    ]


def _failed(error: RequestError) -> bytes:
    return serving.named_frame("error", {"code": error.code, "message": error.message})

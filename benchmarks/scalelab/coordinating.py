"""A process with one real coordinator, without HTTP, and a client in it. Started and ordered by `fleet`."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.scalelab import children
from benchmarks.scalelab.fakes import PIPELINE, NoRelays, revision_of
from omnipipeline_spec.types.plan import CoordinatorPlan
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.coordinator.reporting import member_reports
from stage_runtime.errors import RequestError
from stage_runtime.processes import collecting
from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.connections.dismissals import DEFAULT_BOUNDS, DismissalBounds
from stage_runtime.wire.messages import Message
from stage_runtime.wire.values import OmniRequest

PLAN = CoordinatorPlan(pipeline=PIPELINE, model=PIPELINE, max_in_flight=1_000_000, request_timeout_s=120.0)


class Coordinating:
    """The orders of such a process."""

    def __init__(
        self, folder: str, name: str, dead_after_s: float, *, dismissals: DismissalBounds = DEFAULT_BOUNDS
    ) -> None:
        loop = asyncio.get_running_loop()
        incarnation = secrets.token_hex(8)
        self._coordinator = Coordinator(PLAN, incarnation=incarnation, loop=loop)
        self._heard: Counter[type[Message]] = Counter()
        received = self._coordinator.received

        def counted(sender: str, message: Message) -> None:
            self._heard[type(message)] += 1
            received(sender, message)

        self._coordinator.received = counted  # type: ignore[method-assign]
        channels = Channels(
            self._coordinator,
            incarnation=incarnation,
            loop=loop,
            times=LinkTimes(dead_after_s),
            dismissals=dismissals,
        )
        self._channels = channels
        relays: Any = NoRelays()
        publisher = channels.bind_publisher(f"ipc://{folder}/{name}.publish")
        self._coordinator.wire(
            channels,
            relays,
            endpoint=channels.bind(f"ipc://{folder}/{name}"),
            publisher=publisher,
            revisions=[revision_of("one"), revision_of("two")],
        )
        self._ids = itertools.count()
        self._name = name
        self._stop = False
        self._loading: asyncio.Task[dict[str, Any]] | None = None

    def close(self) -> None:
        """Closes a coordinator that runs in its caller's process."""
        self._channels.close()

    async def usage(self) -> dict[str, Any]:
        return {
            **children.own_usage(),
            "ready": self._ready(),
            "heard": {kind.__name__: count for kind, count in self._heard.items()},
            "retried": self._coordinator.manager.live.retried,
        }

    async def until_ready(self, instances: int) -> dict[str, Any]:
        """Waits until exactly so many instances may be bound."""
        while self._ready() != instances:
            await asyncio.sleep(0.02)
        return {}

    async def until_served(self) -> dict[str, Any]:
        """Waits until a request is answered."""
        while True:
            failed: Counter[str] = Counter()
            await self._client(range(1), [], failed)
            if not failed:
                return {}

    async def load(self, requests: int, per_second: float) -> dict[str, Any]:
        """So many requests at even distances, whatever is in flight."""
        latencies: list[float] = []
        failed: Counter[str] = Counter()
        loop = asyncio.get_running_loop()
        begun, begun_processor = loop.time(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                await asyncio.sleep(max(0.0, begun + number / per_second - loop.time()))
                group.create_task(self._client(range(1), latencies, failed))
        latencies.sort()
        return {
            "processor_s": time.process_time() - begun_processor,
            "wall_s": loop.time() - begun,
            "requests": requests,
            "failed": failed,
            "p50_s": latencies[len(latencies) // 2],
            "p99_s": latencies[len(latencies) * 99 // 100],
        }

    async def begin_load(self, at_once: int) -> dict[str, Any]:
        """Requests until `end_load`."""
        self._stop = False
        self._loading = asyncio.create_task(self._endless(at_once))
        return {}

    async def end_load(self) -> dict[str, Any]:
        assert self._loading is not None
        self._stop = True
        return await self._loading

    async def _endless(self, at_once: int) -> dict[str, Any]:
        latencies: list[float] = []
        failed: Counter[str] = Counter()
        numbers = itertools.takewhile(lambda _: not self._stop, itertools.count())
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._client(numbers, latencies, failed))
        return {"requests": len(latencies), "failed": failed}

    async def _client(self, numbers: Iterable[int], latencies: list[float], failed: Counter[str]) -> None:
        for _ in numbers:
            begun = time.perf_counter()
            try:
                request = OmniRequest(id=f"{self._name}-{next(self._ids)}", inputs="x" * 64)
                async for _ in self._coordinator.manager.admit(request).events():
                    pass
            except RequestError as error:
                failed[f"{error.code}: {error.message}"[:120]] += 1
                await asyncio.sleep(0.01)
            latencies.append(time.perf_counter() - begun)

    def _ready(self) -> int:
        return sum(member_reports.ready_count(self._coordinator.membership).values())


def main() -> None:
    folder, name, dead_after_s = sys.argv[1:]

    def make() -> dict[str, Any]:
        made = Coordinating(folder, name, float(dead_after_s))
        collecting.settle()  # as a coordinator's process does
        return {
            "usage": made.usage,
            "until_ready": made.until_ready,
            "until_served": made.until_served,
            "load": made.load,
            "begin_load": made.begin_load,
            "end_load": made.end_load,
        }

    children.serve(make)


if __name__ == "__main__":
    main()

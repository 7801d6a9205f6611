"""One fault at one member of a running pipeline under load: what became of the requests, and what was left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from benchmarks.faultlab import graph, looking, network
from benchmarks.faultlab.ledger import Ledger
from omnipipeline_spec.pipeline import EndpointsConfig
from stage_runtime.processes.local import LocalOptions, LocalPipeline

FROZEN_S = 6.0  # beyond the four seconds within which a freeze is known
CUT_S = 3.0
SERVES_WITHIN_S = 5.0


class Hurtable(Protocol):
    """A running pipeline."""

    @property
    def url(self) -> str: ...
    def pids(self) -> dict[str, int]: ...
    async def ready(self) -> None: ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    fault: str
    target: str
    replicas: int
    requests: int
    retried: int
    failed: dict[str, int]  #: Code -> how many requests.
    unstreamed_failed: int
    lost: int
    seconds_to_healthy: float
    faults: list[str]  #: What may never happen.
    left: list[str]  #: What was there before or after only.


@contextlib.asynccontextmanager
async def local(replicas: int, base: Path) -> AsyncIterator[LocalPipeline]:
    """As `omni up` runs it: Unix sockets and shared memory."""
    spec = graph.spec(replicas=replicas)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    fields["endpoints"] = EndpointsConfig(base_path=str(base))
    with (base / "log").open("a") as log:
        pipeline = LocalPipeline(
            type(spec)(**fields),
            options=LocalOptions(port=0),
            on_line=lambda name, line: print(f"{name}: {line}", file=log, flush=True),
        )
        async with pipeline:
            yield pipeline


@contextlib.asynccontextmanager
async def networked(replicas: int, base: Path) -> AsyncIterator[network.NetPipeline]:
    """As pods would run it: network namespaces, TCP, CURVE."""
    async with network.NetPipeline(graph.spec(replicas=replicas, relay="tcp"), log=base / "log") as pipeline:
        yield pipeline


async def warm(pipeline: Hurtable) -> None:
    """A first load: threads and connections are made when they are needed for the first time."""
    ledger = Ledger(pipeline.url)
    await ledger.load(rate=40.0, count=60)
    assert not ledger.failed(), ledger.failed()


async def kill(pipeline: Hurtable, member: str) -> None:
    os.kill(pipeline.pids()[member], signal.SIGKILL)


async def freeze(pipeline: Hurtable, member: str) -> None:
    pid = pipeline.pids()[member]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(FROZEN_S)
    finally:
        os.kill(pid, signal.SIGCONT)


async def cut(pipeline: Hurtable, member: str) -> None:
    assert isinstance(pipeline, network.NetPipeline)
    pipeline.network.cut(member)
    try:
        await asyncio.sleep(CUT_S)
    finally:
        pipeline.network.mend(member)


FAULTS: Mapping[str, Callable[[Hurtable, str], object]] = {"SIGKILL": kill, "SIGSTOP": freeze, "cut": cut}


async def hurt(
    pipeline: Hurtable,
    fault: str,
    member: str,
    *,
    replicas: int,
    rate: float = 20.0,
    before_s: float = 1.0,
    after_s: float = 7.0,
    streams: float = 0.5,
) -> Outcome:
    """Apply ``fault`` to ``member`` under load. ``streams``: the share of requests that stream."""
    async with httpx.AsyncClient(base_url=pipeline.url, timeout=10) as http:
        await _rest(http)
        before = _held(pipeline)
        retried = (await looking.metrics(http))["omnipipeline_retried_total"]
        ledger = Ledger(pipeline.url)
        load = asyncio.create_task(ledger.load(rate=rate, streams=streams))
        await asyncio.sleep(before_s)
        await FAULTS[fault](pipeline, member)  # type: ignore[misc]
        over_at = time.monotonic()
        await asyncio.sleep(after_s)
        ledger.stop()
        await load
        await pipeline.ready()
        left = await _left(http, pipeline, before)
        retried = (await looking.metrics(http))["omnipipeline_retried_total"] - retried
    failed = ledger.failed()
    return Outcome(
        fault=fault,
        target=member,
        replicas=replicas,
        requests=len(ledger.entries),
        retried=int(retried),
        failed=dict(failed),
        unstreamed_failed=sum(entry.outcome != "completed" for entry in ledger.unstreamed()),
        lost=failed["lost"],
        seconds_to_healthy=round(ledger.healthy_after(over_at), 2),
        faults=ledger.faults(),
        left=left,
    )


async def resize(pipeline: LocalPipeline, member: str, *, count: int, rate: float) -> tuple[Ledger, Counter[str]]:
    """Scale ``member`` 1→3→1 while ``count`` requests are sent. Returns the ledger and what each instance served."""
    ledger = Ledger(pipeline.url)
    served: Counter[str] = Counter()

    async def note() -> None:
        async with httpx.AsyncClient(base_url=pipeline.url) as http:
            for one in (await looking.status(http))["instances"]:
                if one["group"] == member:
                    served[one["incarnation"]] = one["served"]

    load = asyncio.create_task(ledger.load(rate=rate, count=count))
    await asyncio.sleep(count / rate / 5)
    await pipeline.scale(member, 3)
    await asyncio.sleep(count / rate / 5)
    await note()
    await pipeline.scale(member, 1)
    await load
    return ledger, served


async def _rest(http: httpx.AsyncClient, within_s: float = 15.0) -> dict[str, float]:
    """Wait until nothing is under way; what still is, when it takes too long."""
    end = time.monotonic() + within_s
    await asyncio.sleep(2 * graph.HEARTBEAT_S)  # what beats said before says nothing
    while left := await looking.under_way(http):
        if time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)
    return {}


def _held(pipeline: Hurtable) -> dict[str, looking.Held]:
    return looking.held(pipeline.pids())


async def _left(
    http: httpx.AsyncClient, pipeline: Hurtable, before: Mapping[str, looking.Held], within_s: float = 10.0
) -> list[str]:
    """What is not as before."""
    left = [f"{name}: {value:g}" for name, value in (await _rest(http)).items()]
    end = time.monotonic() + within_s
    while (now := _held(pipeline)) != before and time.monotonic() < end:
        await asyncio.sleep(0.2)
    return left + [
        f"{name}: {before.get(name)} before, {now.get(name)} now" for name in now if now[name] != before.get(name)
    ]

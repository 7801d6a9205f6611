"""One fault at one member of a running pipeline under load: what became of the requests, and what was left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from benchmarks.faultlab import graph, looking, network
from benchmarks.faultlab.ledger import Ledger
from omnipipeline_spec.pipeline import EndpointsConfig
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

FROZEN_S = 6.0  # beyond the four seconds within which a freeze is known
CUT_S = 3.0
PARTED_S = 5.0  # beyond the four seconds within which a link is known to be dead
SERVES_WITHIN_S = 5.0
RATE = 20.0  # requests a second while something is hurt
LINKED_MOST = 1.5  # times the sockets before a fault: requests may have met other pairs of instances since
AT_ONCE = 24  # requests in flight while a group is scaled: as many as it can take
#: The codes with which a request may fail when a process that it needs has gone. Any other code blames the request.
TOLD = frozenset(["unavailable", "transport_failed"])


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
    lost: int  #: Requests without an end within their deadline.
    wrong: int  #: Answers with another's content, torn, or with more or fewer than one end.
    seconds_to_healthy: float
    faults: list[str]  #: Each of the lost and wrong.
    left: list[str]  #: Holdings that were there only before or only after.
    served: list[int] = []  #: Answers by each instance of a group that was scaled.

    def broken(self, *, healthy_within_s: float | None = SERVES_WITHIN_S) -> list[str]:
        """The promises that did not hold. healthy_within_s: None where a machine is too busy to be timed."""
        found = [*self.faults, *self.left]
        if healthy_within_s is not None and self.seconds_to_healthy > healthy_within_s:
            found.append(f"served again only after {self.seconds_to_healthy:.1f} s")
        if self.fault in PLANNED and self.failed:
            found.append(f"a planned change failed requests: {self.failed}")
        elif self.replicas > 1 and self.unstreamed_failed:
            found.append(f"{self.unstreamed_failed} unstreamed requests failed though another replica was there")
        if strange := set(self.failed) - TOLD:
            found.append(f"ended by another code: {sorted(strange)}")
        if self.fault == "scale" and (len(self.served) < SCALED or not all(self.served)):
            found.append(f"not every replica served: {self.served}")
        return found


@contextlib.asynccontextmanager
async def local(replicas: int, base: Path) -> AsyncIterator[LocalPipeline]:
    """The pipeline as `omni up` runs it: Unix sockets and shared memory."""
    spec = graph.spec(replicas=replicas)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    fields["endpoints"] = EndpointsConfig(base_path=str(base))
    with (base / "log").open("a") as log:
        pipeline = LocalPipeline(
            type(spec)(**fields),
            options=LocalOptions(port=0),
            on_line=lambda name, line: print(f"{time.monotonic():.2f} {name}: {line}", file=log, flush=True),
        )
        async with pipeline:
            yield pipeline


@contextlib.asynccontextmanager
async def networked(replicas: int, base: Path) -> AsyncIterator[network.NetPipeline]:
    """The pipeline as pods would run it: network namespaces, TCP, CURVE."""
    async with network.NetPipeline(graph.spec(replicas=replicas, relay="tcp"), log=base / "log") as pipeline:
        yield pipeline


async def warm(pipeline: Hurtable) -> None:
    """A first load: threads and connections are made when they are needed for the first time."""
    ledger = Ledger(pipeline.url)
    await ledger.load(rate=40.0, count=60)
    assert not ledger.failed(), ledger.failed()


# --- what is done to a member -----------------------------------------------------------------------------------------


async def kill(pipeline: Hurtable, member: str) -> None:
    os.kill(_pid(pipeline, member), signal.SIGKILL)


async def freeze(pipeline: Hurtable, member: str) -> None:
    pid = _pid(pipeline, member)
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


async def part(pipeline: Hurtable, member: str) -> None:
    """A member and its neighbour lose each other, and the coordinator neither."""
    assert isinstance(pipeline, network.NetPipeline)
    place = graph.MEMBERS.index(member)
    neighbour = graph.MEMBERS[place + 1 if place + 1 < len(graph.MEMBERS) else place - 1]
    pipeline.network.part(member, neighbour)
    try:
        await asyncio.sleep(PARTED_S)
    finally:
        pipeline.network.unite(member, neighbour)


async def drain(pipeline: Hurtable, member: str) -> None:
    """SIGTERM to one process; its supervisor starts another when it has ended."""
    pid = _pid(pipeline, member)
    os.kill(pid, signal.SIGTERM)
    while pid in pipeline.pids().values():
        await asyncio.sleep(0.05)
    await pipeline.ready()


async def restart(pipeline: Hurtable, member: str) -> None:
    """Does what `omni restart` does: another instance is ready before this one drains."""
    assert isinstance(pipeline, LocalPipeline)
    await pipeline.restart(member)


Hurt = Callable[[Hurtable, str], Awaitable[None]]
FAULTS: Mapping[str, Hurt] = {
    "SIGKILL": kill,
    "SIGSTOP": freeze,
    "cut": cut,
    "parted": part,
    "drain": drain,
    "restart": restart,
}
NETWORKED = frozenset(["cut", "parted"])
#: Changes that people make on purpose: no request may notice.
PLANNED = frozenset(["drain", "restart", "scale"])
SCALED = 3


async def hurt(
    pipeline: Hurtable,
    fault: str,
    member: str,
    *,
    replicas: int,
    rate: float = RATE,
    before_s: float = 1.0,
    after_s: float = 6.0,
    streams: float = 0.5,
) -> Outcome:
    """Apply ``fault`` to ``member`` under load. ``streams``: the share of requests that stream."""

    async def during(ledger: Ledger) -> float:
        await asyncio.sleep(before_s)
        await FAULTS[fault](pipeline, member)
        over_at = time.monotonic()
        await asyncio.sleep(after_s)
        return over_at

    return await _observe(pipeline, fault, member, during, replicas=replicas, rate=rate, streams=streams)


async def resize(pipeline: LocalPipeline, member: str, *, count: int) -> Outcome:
    """Scale ``member`` 1→3→1 while ``count`` requests (or some more, on a slow machine) are sent."""
    served: Counter[str] = Counter()

    async def note(http: httpx.AsyncClient) -> None:
        for one in (await looking.status(http))["instances"]:
            if one["group"] == member:
                served[one["incarnation"]] = one["bound_total"]

    async def during(ledger: Ledger) -> float:
        async with httpx.AsyncClient(base_url=pipeline.url, timeout=30) as http:
            await ledger.sent(count // 4)
            await pipeline.scale(member, SCALED)
            await ledger.sent(len(ledger.entries) + count // 4)
            await note(http)
            await pipeline.scale(member, 1)
            over_at = time.monotonic()
            await ledger.sent(count)
        return over_at

    outcome = await _observe(pipeline, "scale", member, during, replicas=1, at_once=AT_ONCE)
    return msgspec.structs.replace(outcome, served=sorted(served.values()))


async def _observe(
    pipeline: Hurtable,
    fault: str,
    member: str,
    during: Callable[[Ledger], Awaitable[float]],
    *,
    replicas: int,
    rate: float | None = None,
    at_once: int | None = None,
    streams: float = 0.5,
) -> Outcome:
    """Load the pipeline while ``during`` runs, which says when its fault was over; then look at what is left."""
    async with httpx.AsyncClient(base_url=pipeline.url, timeout=30) as http:
        await _rest(http)
        before, linked = _held(pipeline), looking.linked(pipeline.pids())
        retried = (await looking.metrics(http))["omnipipeline_requests_retried_total"]
        ledger = Ledger(pipeline.url)
        load = asyncio.create_task(ledger.load(rate=rate, at_once=at_once, streams=streams))
        try:
            over_at = await during(ledger)
        finally:
            ledger.stop()
            await load
        await pipeline.ready()
        left = await _left(http, pipeline, before)
        if (now := looking.linked(pipeline.pids())) > LINKED_MOST * linked:
            left.append(f"sockets and arenas: {linked} before, {now} now")
        retried = (await looking.metrics(http))["omnipipeline_requests_retried_total"] - retried
    failed = ledger.failed()
    faults = ledger.faults()
    return Outcome(
        fault=fault,
        target=member,
        replicas=replicas,
        requests=len(ledger.entries),
        retried=int(retried),
        failed=dict(failed),
        unstreamed_failed=sum(entry.outcome != "completed" for entry in ledger.unstreamed()),
        lost=failed["lost"],
        wrong=len(faults) - failed["lost"],
        seconds_to_healthy=round(ledger.healthy_after(over_at), 2),
        faults=faults,
        left=left,
    )


def _pid(pipeline: Hurtable, member: str) -> int:
    """The pid of one of its processes: the first, whatever its number."""
    return next(pid for name, pid in pipeline.pids().items() if _group(name) == member)


def _group(process: str) -> str:
    return process.partition(".")[0]


async def _rest(http: httpx.AsyncClient, within_s: float = 15.0) -> dict[str, float]:
    """Wait until nothing is under way; what still is, when it takes too long."""
    end = time.monotonic() + within_s
    await asyncio.sleep(2 * graph.HEARTBEAT_S)  # what beats said before says nothing
    while left := await looking.under_way(http):
        if time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)
    return {}


def _held(pipeline: Hurtable) -> Counter[tuple[str, looking.Held]]:
    """The holdings of every process, by its group, because a restarted process may have another number."""
    return Counter((_group(name), held) for name, held in looking.held(pipeline.pids()).items())


async def _left(
    http: httpx.AsyncClient,
    pipeline: Hurtable,
    before: Counter[tuple[str, looking.Held]],
    within_s: float = 15.0,
) -> list[str]:
    """The holdings that are not as before."""
    left = [f"{name}: {value:g}" for name, value in (await _rest(http)).items()]
    end = time.monotonic() + within_s
    while (now := _held(pipeline)) != before and time.monotonic() < end:
        await asyncio.sleep(0.2)
    gone, new = before - now, now - before
    return left + [f"{group}: {held} before" for group, held in gone] + [f"{group}: {held} now" for group, held in new]

"""The Lease of its holder: one write per renewal, and an end when another process has taken it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.lease import Lease, LeaseLost
from omnipipeline_operator.settings import LeaseSettings

SETTINGS = LeaseSettings(namespace="space", name="lease", identity="me", retry_s=0.01, renew_deadline_s=60.0)


class OneLease:
    """One Lease in an API server; implements the part of `Client` that `Lease` uses."""

    def __init__(self) -> None:
        self.live: dict[str, Any] | None = None
        self.version = 0
        self.calls: list[str] = []

    async def get(self, kind: Any, namespace: str, name: str) -> dict[str, Any]:
        self.calls.append("get")
        if self.live is None:
            raise errors.NotFound("get", 404, "not found")
        return self.live

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("create")
        return self.write(manifest)

    async def replace(self, manifest: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.calls.append("replace")
        if self.live is None:
            raise errors.NotFound("replace", 404, "not found")
        if manifest["metadata"]["resourceVersion"] != self.live["metadata"]["resourceVersion"]:
            raise errors.Conflict("replace", 409, "the object has been modified")
        return self.write(manifest)

    def write(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.live = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.version)}}
        return self.live

    async def renewed(self, times: int) -> None:
        async with asyncio.timeout(30):
            until = self.version + times
            while self.version < until:
                await asyncio.sleep(0.005)


async def held() -> tuple[OneLease, Lease, asyncio.Task[None]]:
    server = OneLease()
    lease = Lease(server, SETTINGS)  # type: ignore[arg-type]
    await lease.acquire()
    server.calls.clear()
    return server, lease, asyncio.create_task(lease.keep())


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_renewal_is_one_write_and_no_read() -> None:
    server, lease, keeping = await held()
    await server.renewed(5)
    await ended(keeping)
    assert set(server.calls) == {"replace"} and lease.held


async def test_a_lease_that_was_annotated_or_deleted_is_still_held() -> None:
    server, lease, keeping = await held()
    assert server.live is not None
    server.write({**server.live, "metadata": {**server.live["metadata"], "labels": {"theirs": "1"}}})
    await server.renewed(2)
    server.live = None
    await server.renewed(2)
    assert not keeping.done() and lease.held
    await ended(keeping)


async def test_a_holder_ends_when_another_process_has_taken_the_lease() -> None:
    server, lease, keeping = await held()
    assert server.live is not None
    server.write({**server.live, "spec": {**server.live["spec"], "holderIdentity": "somebody else"}})
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 30)
    assert not lease.held
    assert server.live["spec"]["holderIdentity"] == "somebody else"

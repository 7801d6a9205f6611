"""One writer at a time: a Lease, renewed by the holder, taken over when it has not changed for its duration.

Here: acquiring, renewing, releasing. Not here: what the holder does. Called by `handlers.lifecycle`.

Only this process's monotonic clock is trusted: another holder's Lease has expired when we saw no change of it for its
duration, whatever its timestamps say. Any exception is a failed renewal. The deadline for renewing is shorter than the
duration, and each request's timeout shorter than the deadline: a holder that cannot reach the API server has stopped to
write before anybody else may begin. (The client's own leader election dies silently, and then there are two leaders.)
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import UTC, datetime
from typing import Any

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.kinds import LEASE
from omnipipeline_operator.settings import LeaseSettings

log = logging.getLogger(__name__)

Manifest = dict[str, Any]


class LeaseLost(errors.OperatorError):
    """Somebody else may write now; this process must end."""


class Lease:
    """This process's part in the election."""

    def __init__(self, client: Client, settings: LeaseSettings) -> None:
        self._client = client
        self._settings = settings
        self._last_observed: tuple[Any, ...] | None = None  #: What the Lease said when it last changed…
        self._last_observed_at = 0.0  #: …and when that was, by our own clock.
        self._held: Manifest | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    async def acquire(self) -> None:
        """Return when this process is the one that writes."""
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_deadline_s / 2):
                    taken = await self._try()
            except (errors.ClusterError, TimeoutError) as error:
                taken = False
                log.warning("lease: %s", str(error) or "no answer")
            if taken:
                log.info(
                    "holding lease %s/%s as %s", self._settings.namespace, self._settings.name, self._settings.identity
                )
                return
            await asyncio.sleep(self._settings.retry_s * random.uniform(0.8, 1.2))

    async def keep(self) -> None:
        """Renew for ever.

        Raises: LeaseLost: it could not be renewed in time, or somebody else has it.
        """
        renewed_at = _now()
        while True:
            deadline = renewed_at + self._settings.renew_deadline_s
            await asyncio.sleep(max(0.0, min(self._settings.retry_s, deadline - _now())))
            if _now() >= deadline:
                self._held = None  # not ours to release any more
                raise LeaseLost(f"lease not renewed within {self._settings.renew_deadline_s:g} s")
            began = _now()
            try:
                async with asyncio.timeout_at(deadline):
                    if not await self._renew():
                        self._held = None
                        raise LeaseLost("the lease is somebody else's")
                renewed_at = began
            except (errors.ClusterError, TimeoutError) as error:
                log.warning(
                    "lease not renewed, %.1f s left: %s", max(0.0, deadline - _now()), str(error) or "no answer"
                )

    async def release(self) -> None:
        """Let the next one in at once."""
        if self._held is None:
            return
        held, self._held = self._held, None
        free = {**held, "spec": {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self._client.replace(free, timeout_s=self._settings.retry_s)
        except errors.ClusterError as error:
            log.warning("lease not released: %s", error)

    async def _renew(self) -> bool:
        """One write, without reading first: it succeeds if nobody has written since we did."""
        if self._held is None:
            return await self._try()
        try:
            renewed = self._manifest(self._held)
            self._held = await self._client.replace(renewed, timeout_s=self._settings.renew_deadline_s / 2)
        except (errors.Conflict, errors.NotFound):
            return await self._try()
        return True

    async def _try(self) -> bool:
        """One round: make it, take it or renew it; False: it is somebody else's."""
        settings = self._settings
        timeout_s = settings.renew_deadline_s / 2
        try:
            live = await self._client.get(LEASE, settings.namespace, settings.name)
        except errors.NotFound:
            self._held = await self._client.create(self._manifest(None))
            return True
        spec = live.get("spec", {})
        mine = spec.get("holderIdentity") == settings.identity
        if self._held is not None and not mine:
            return False
        if not mine and not self._expired(live):
            return False
        try:
            self._held = await self._client.replace(self._manifest(live), timeout_s=timeout_s)
        except errors.Conflict:
            return False if self._held is None else await self._try()
        return True

    def _expired(self, live: Manifest) -> bool:
        spec = live.get("spec", {})
        if not spec.get("holderIdentity"):
            return True
        observed = (spec.get("holderIdentity"), spec.get("renewTime"), live["metadata"].get("resourceVersion"))
        if observed != self._last_observed:
            self._last_observed, self._last_observed_at = observed, _now()
        return _now() - self._last_observed_at > float(spec.get("leaseDurationSeconds") or self._settings.duration_s)

    def _manifest(self, live: Manifest | None) -> Manifest:
        settings, now = self._settings, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (live or {}).get("spec", {})
        mine = before.get("holderIdentity") == settings.identity
        # What others wrote on it stays: it may be part of a helm release.
        metadata: Manifest = (
            {"name": settings.name, "namespace": settings.namespace} if live is None else live["metadata"]
        )
        spec = {
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": int(settings.duration_s),
            "renewTime": now,
            "acquireTime": before["acquireTime"] if mine and "acquireTime" in before else now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if mine or live is None else 1),
        }
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Leader election by a Lease: the holder renews it, another takes it when it has not changed for its duration.

Here: acquiring, renewing, releasing. Not here: what the holder does. Called by `handlers.lifecycle`.

Only this process's monotonic clock counts: another holder's Lease has expired when this process has seen no change of
it for its duration, whatever its timestamps are. Any exception is a failed renewal. The renewal deadline is shorter
than the duration, and each request's timeout shorter than the deadline: a holder that cannot reach the API server stops
writing before another may begin. (The client's own leader election can end silently, which leaves two leaders.)
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import UTC, datetime
from typing import Any

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.kinds import LEASE, Manifest
from omnipipeline_operator.settings import LeaseSettings

log = logging.getLogger(__name__)


class LeaseLost(errors.OperatorError):
    """Another process may write now; this one must end."""


class Lease:
    """This process as a candidate."""

    def __init__(self, client: Client, settings: LeaseSettings) -> None:
        self._client = client
        self._settings = settings
        self._last_observed: tuple[Any, ...] | None = (
            None  #: Holder, renewal and version of the Lease when it last changed…
        )
        self._last_observed_at = 0.0  #: …and when that was, by the monotonic clock.
        self._held: Manifest | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    async def acquire(self) -> None:
        """Return when this process holds the Lease."""
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
        """Renew until that fails.

        Raises: LeaseLost: it could not be renewed in time, or another process holds it.
        """
        renewed_at = _now()
        while True:
            deadline = renewed_at + self._settings.renew_deadline_s
            await asyncio.sleep(max(0.0, min(self._settings.retry_s, deadline - _now())))
            if _now() >= deadline:
                self._held = None  # not to be released
                raise LeaseLost(f"lease not renewed within {self._settings.renew_deadline_s:g} s")
            began = _now()
            try:
                async with asyncio.timeout_at(deadline):
                    if not await self._renew():
                        self._held = None
                        raise LeaseLost("another process holds the lease")
                renewed_at = began
            except (errors.ClusterError, TimeoutError) as error:
                log.warning(
                    "lease not renewed, %.1f s left: %s", max(0.0, deadline - _now()), str(error) or "no answer"
                )

    async def release(self) -> None:
        """Release the Lease, so that the next process takes it at once."""
        if self._held is None:
            return
        held, self._held = self._held, None
        free = {**held, "spec": {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self._client.replace(free, timeout_s=self._settings.retry_s)
        except errors.ClusterError as error:
            log.warning("lease not released: %s", error)

    async def _renew(self) -> bool:
        """Write without reading first: succeeds if no other client has written since."""
        if self._held is None:
            return await self._try()
        try:
            renewed = self._manifest(self._held)
            self._held = await self._client.replace(renewed, timeout_s=self._settings.renew_deadline_s / 2)
        except (errors.Conflict, errors.NotFound):
            return await self._try()
        return True

    async def _try(self) -> bool:
        """Create, take or renew the Lease once; False: another process holds it."""
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
        # Keep other metadata: the Lease may be part of a helm release.
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

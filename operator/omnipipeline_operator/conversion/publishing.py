"""Keeps the webhook's certificate in its Secret, and the CRD's `spec.conversion` pointing at the webhook.

Here: reading and writing the two objects. Not here: when a certificate is due (`certificates`), serving (`serving`).
Called by `handlers.lifecycle`, in every replica: who writes the Secret first has made the certificate of all.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.conversion import certificates, serving
from omnipipeline_operator.conversion.certificates import Held
from omnipipeline_operator.conversion.serving import Server
from omnipipeline_operator.kinds import CRD, DEFINITION, SECRET, Manifest
from omnipipeline_operator.settings import ConversionSettings

log = logging.getLogger(__name__)

MANAGER: Final = "omnipipeline-conversion"
AGAIN_S: Final = 60.0
RETRY_S: Final = 2.0
TIMEOUT_S: Final = 10.0
#: A write of the CRD may take as long as the API server allows: it compiles the rules of all versions anew, which took
#: more than 10 s where machines were busy. A client that gives up earlier and asks again never gets an answer.
CRD_TIMEOUT_S: Final = 60.0


class Publisher:
    """One replica's view of the certificate."""

    def __init__(
        self,
        client: Client,
        server: Server,
        settings: ConversionSettings,
        *,
        clock: Callable[[], datetime],
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = client
        self._server = server
        self._settings = settings
        self._clock = clock
        self._retry_s = retry_s

    async def keep(self) -> None:
        """Look at both objects now and every minute."""
        said = ""
        while True:
            wait = AGAIN_S * random.uniform(0.8, 1.2)
            try:
                await self.publish()
                said = ""
            except errors.Conflict:
                wait = 0.0  # another replica was first
            except errors.ClusterError as error:
                wait = self._retry_s
                if str(error) != said:  # not every two seconds the same
                    log.warning("conversion webhook: %s", error)
                said = str(error)
            await asyncio.sleep(wait)

    async def publish(self) -> None:
        """Renew the certificate if that is due, show it, and let API servers trust it.

        Raises: errors.Conflict: somebody has written the Secret or the CRD meanwhile; other errors.ClusterError.
        """
        settings = self._settings
        # It is read before the Secret: `withdrawing` deletes that first, so a patch of a CRD that was read earlier is a
        # Conflict.
        definition = await self._client.get(DEFINITION, None, CRD)
        secret = await self._client.get(SECRET, settings.namespace, settings.name)
        held = _held(secret)
        now = certificates.renewed(held, settings.host, self._clock())
        if now != held:
            data = {name: base64.b64encode(value).decode() for name, value in now.data().items()}
            named = {"apiVersion": SECRET.api_version, "kind": SECRET.name}
            await self._client.replace({**secret, **named, "data": data}, timeout_s=TIMEOUT_S)
            log.info("renewed the conversion webhook's certificate")
        wanted = conversion(settings, now)
        if not _includes(definition["spec"].get("conversion"), wanted):
            version = definition["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "spec": {"conversion": wanted}}
            await self._client.merge(DEFINITION, None, CRD, patch, manager=MANAGER, timeout_s=CRD_TIMEOUT_S)
            log.info("the API server converts by %s", settings.url or f"the Service {settings.name}")
        self._server.show(now)


def conversion(settings: ConversionSettings, held: Held) -> Manifest:
    """The CRD's `spec.conversion`."""
    service = {"name": settings.name, "namespace": settings.namespace, "path": serving.PATH, "port": 443}
    at: Manifest = {"url": settings.url} if settings.url else {"service": service}
    bundle = base64.b64encode(held.authorities).decode()
    webhook = {"conversionReviewVersions": ["v1"], "clientConfig": {**at, "caBundle": bundle}}
    return {"strategy": "Webhook", "webhook": webhook}


def _held(secret: Manifest) -> Held | None:
    """The certificate in the Secret; None: it is empty yet, or holds something else."""
    try:
        return certificates.of({name: base64.b64decode(text) for name, text in (secret.get("data") or {}).items()})
    except ValueError:
        return None


def _includes(found: Any, wanted: Any) -> bool:
    """Whether all of ``wanted`` is there; the API server may have added defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_includes(found.get(key), value) for key, value in wanted.items())
    return bool(found == wanted)

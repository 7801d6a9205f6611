"""Takes the conversion webhook out of the CRD, before the release that answers it goes.

Here: what the CRD should be without the webhook, and writing that. Not here: publishing it (`publishing`), when it goes
(the chart's hooks). Called by `cli`. A CRD that names a webhook which nobody answers makes reads of every other version
than the stored one fail, and with them the deletion of namespaces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.conversion import publishing
from omnipipeline_operator.kinds import CRD, DEFINITION, SECRET, Manifest
from omnipipeline_operator.settings import ConversionSettings

log = logging.getLogger(__name__)

ATTEMPTS: Final = 30
AGAIN_S: Final = 2.0


class StillNeeded(errors.OperatorError):
    """Objects may be stored in several versions, which nothing could read without the webhook."""


async def withdraw(client: Client, settings: ConversionSettings) -> None:
    """Delete the Secret, so that no operator publishes the webhook again, and take the webhook out of the CRD.

    Raises: StillNeeded: nothing has been changed; errors.ClusterError.
    """
    for attempt in range(ATTEMPTS):
        try:
            await _withdraw(client, settings)
            return
        except (errors.Conflict, errors.Unavailable) as error:
            if attempt == ATTEMPTS - 1:
                raise
            log.warning("conversion webhook: %s", error)
            await asyncio.sleep(AGAIN_S if isinstance(error, errors.Unavailable) else 0.0)


async def _withdraw(client: Client, settings: ConversionSettings) -> None:
    try:
        definition = await client.get(DEFINITION, None, CRD)
    except errors.NotFound:
        log.info("the CRD does not exist")
        return
    patch = without(definition, settings)
    if patch is None:
        log.info("the CRD does not name the Service %s", settings.name)
        return
    await _delete_secret(client, settings)
    definition = await client.get(DEFINITION, None, CRD)
    patch = without(definition, settings)
    if patch is not None:
        definition = await _patched(client, patch, manager=publishing.MANAGER)
        log.info("the CRD no longer names the Service %s", settings.name)
    # Fields that this program owns would make helm's next server-side apply of the CRD a conflict.
    others = [each for each in definition["metadata"].get("managedFields", ()) if not _is_own(each)]
    await _patched(client, _at(definition, {"managedFields": others}))


def without(definition: Manifest, settings: ConversionSettings) -> Manifest | None:
    """The merge patch of a CRD that takes the webhook out; None: it names another one, or none.

    The stored one of several versions alone is served from then on: without the webhook the API server would drop
    what one of the versions lacks.
    Raises: StillNeeded.
    """
    spec = definition["spec"]
    found = (spec.get("conversion") or {}).get("webhook") or {}
    service = (found.get("clientConfig") or {}).get("service") or {}
    if (service.get("name"), service.get("namespace")) != (settings.name, settings.namespace):
        return None
    patch: dict[str, Any] = {"conversion": {"strategy": "None", "webhook": None}}
    versions = spec["versions"]
    if sum(1 for each in versions if each["served"]) > 1:
        stored = (definition.get("status") or {}).get("storedVersions", ())
        [storage] = [each["name"] for each in versions if each["storage"]]
        if set(stored) > {storage}:
            raise StillNeeded(
                f"pipelines may be stored as {' and '.join(sorted(stored))}, and need the webhook to be read. Write all"
                f" of them, and set status.storedVersions of the CRD to [{storage}] (docs/operations.md), or delete the"
                " CRD"
            )
        patch["versions"] = [{**each, "served": each["name"] == storage} for each in versions]
    return {**_at(definition, {}), "spec": patch}


async def _patched(client: Client, patch: Manifest, *, manager: str = "") -> Manifest:
    """The CRD after a merge patch."""
    timeout_s = publishing.CRD_TIMEOUT_S
    return await client.merge(DEFINITION, None, CRD, patch, manager=manager, timeout_s=timeout_s)


async def _delete_secret(client: Client, settings: ConversionSettings) -> None:
    try:
        secret = await client.get(SECRET, settings.namespace, settings.name)
    except errors.NotFound:
        return
    await client.delete(SECRET, settings.namespace, settings.name, uid=secret["metadata"]["uid"])


def _at(definition: Manifest, metadata: Mapping[str, Any]) -> Manifest:
    """The beginning of a patch of this CRD as it was read: an edit meanwhile is a Conflict."""
    return {"metadata": {"resourceVersion": definition["metadata"]["resourceVersion"], **metadata}}


def _is_own(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("manager") == publishing.MANAGER)

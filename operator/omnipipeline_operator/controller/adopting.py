"""Adopts orphans: children that an earlier resource of this name left without an owner (``--cascade=orphan``).

Here: giving them their owner. Not here: what proves that an object is ours (`changes.comparing`). Called by
`reconciling` before it decides anything, so that the adopted workloads are known. An object with another owner is never
changed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.cluster.applying import SCALER, Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CONTROLLER_REVISION

log = logging.getLogger(__name__)


async def adopt(
    client: Client, snapshot: Snapshot, applier: Applier, ensure_exists: Callable[[], Awaitable[None]]
) -> bool:
    """Give orphans of this pipeline their owner; whether there were any.

    ensure_exists: raises when the resource does not exist or is being deleted. A deletion with ``--cascade=orphan``
    releases the children first; adopted again, they would be deleted with the resource.
    """
    orphans = snapshot.orphans()
    if not orphans:
        return False
    await ensure_exists()
    for live in orphans:
        metadata = live["metadata"]
        labels = {key: value for key, value in metadata["labels"].items() if key in naming.OWN_LABELS}
        head = naming.child(kinds.of(live), metadata["name"], snapshot.owner, of=labels)
        try:
            await applier.restore_owner(head, live)
        except (errors.NotFound, errors.Conflict, errors.Invalid, errors.Forbidden) as error:
            # Deleted, replaced, or refused by a policy: the write of this child will report that its name is taken.
            log.info("%s/%s: cannot adopt: %s", snapshot.owner.namespace, snapshot.owner.name, error)
            continue
        log.info(
            "%s/%s: %s %s is adopted", snapshot.owner.namespace, snapshot.owner.name, live["kind"], metadata["name"]
        )
    await _adopt_history(client, snapshot)
    return True


async def _adopt_history(client: Client, snapshot: Snapshot) -> None:
    """Adopt the entries of the history too. They are not watched, so they are listed."""
    owner, labels = snapshot.owner, naming.labels(snapshot.owner.name)
    try:
        found = client.listed(CONTROLLER_REVISION, owner.namespace, f"{naming.PIPELINE_LABEL}={owner.name}")
        for live in [one async for one in found]:
            metadata = live["metadata"]
            if metadata.get("ownerReferences") or not labels.items() <= metadata["labels"].items():
                continue
            head = {"name": metadata["name"], "namespace": owner.namespace, "uid": metadata["uid"]}
            body: dict[str, Any] = {"apiVersion": live["apiVersion"], "kind": live["kind"]}
            body["metadata"] = head | {"ownerReferences": [owner.reference()]}
            await client.apply(body, manager=SCALER)
    except (errors.NotFound, errors.Conflict, errors.Invalid, errors.Forbidden) as error:
        log.warning("%s/%s: the history is not adopted: %s", owner.namespace, owner.name, error)

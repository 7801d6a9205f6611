"""Children without an owner: what an earlier resource of this name left (``--cascade=orphan``, a backup) is taken up.

Here: which are taken, and giving them their owner. Not here: which objects are ours by their marks
(`changes.comparing`). Called by `reconciling`, before anything is decided: what runs is then known. An object that has
another owner is never touched.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster.applying import SCALER, Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CONTROLLER_REVISION

log = logging.getLogger(__name__)


async def adopt(
    client: Client, snapshot: Snapshot, applier: Applier, ensure_exists: Callable[[], Awaitable[None]]
) -> bool:
    """Give orphans of this pipeline their owner; whether there were any.

    still_there: raises when the resource is gone. A resource that is being deleted with ``--cascade=orphan`` lets go
    of its children first: given back to it they would be deleted with it.
    """
    orphans = snapshot.orphans()
    if not orphans:
        return False
    await ensure_exists()
    for live in orphans:
        metadata = live["metadata"]
        labels = {key: value for key, value in metadata["labels"].items() if key in comparing.OWN_LABELS}
        head = naming.child(kinds.of(live), metadata["name"], snapshot.owner, of=labels)
        try:
            await applier.restore_owner(head, live)
        except (errors.NotFound, errors.Conflict, errors.Invalid):
            continue  # gone, or another one by now
        log.info(
            "%s/%s: %s %s is taken up", snapshot.owner.namespace, snapshot.owner.name, live["kind"], metadata["name"]
        )
    await _adopt_history(client, snapshot)
    return True


async def _adopt_history(client: Client, snapshot: Snapshot) -> None:
    """Entries are not watched; where there are orphans, they are looked for, too."""
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
        log.warning("%s/%s: its history is not taken up: %s", owner.namespace, owner.name, error)

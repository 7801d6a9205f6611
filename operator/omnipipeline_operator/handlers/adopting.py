"""Children without an owner: what an earlier resource of this name left (``--cascade=orphan``, a backup) is taken up.

Here: which are taken, and giving them their owner. Not here: which objects are ours by their marks
(`changes.comparing`). Called by `reconciling`, before anything is decided: what runs is then known. An object that has
another owner is never touched.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from omnipipeline_operator import errors
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster.applying import SCALER, Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.kinds import CONTROLLER_REVISION
from omnipipeline_operator.desired import naming
from omnipipeline_operator.handlers.looking import Look

log = logging.getLogger(__name__)


async def adopt(client: Client, look: Look, applier: Applier, still_there: Callable[[], Awaitable[None]]) -> None:
    """Give orphans of this pipeline their owner.

    still_there: raises when the resource is gone. A resource that is being deleted with ``--cascade=orphan`` lets go
    of its children first: given back to it they would be deleted with it.
    """
    orphans = look.orphans()
    if not orphans:
        return
    await still_there()
    for there in orphans:
        metadata = there["metadata"]
        labels = {key: value for key, value in metadata["labels"].items() if key in comparing.OWN_LABELS}
        head = naming.child(there["apiVersion"], there["kind"], metadata["name"], look.owner, of=labels)
        try:
            await applier.adopt_back(head, there)
        except (errors.NotFound, errors.Conflict, errors.Invalid):
            continue  # gone, or another one by now
        log.info("%s/%s: %s %s is taken up", look.owner.namespace, look.owner.name, there["kind"], metadata["name"])
    await _adopt_history(client, look)


async def _adopt_history(client: Client, look: Look) -> None:
    """Entries are not watched; where there are orphans, they are looked for, too."""
    owner, labels = look.owner, naming.labels(look.owner.name)
    try:
        found = client.listed(CONTROLLER_REVISION, owner.namespace, f"{naming.PIPELINE_LABEL}={owner.name}")
        for there in [one async for one in found]:
            metadata = there["metadata"]
            if metadata.get("ownerReferences") or not labels.items() <= metadata["labels"].items():
                continue
            head = {"name": metadata["name"], "namespace": owner.namespace, "uid": metadata["uid"]}
            body: dict[str, Any] = {"apiVersion": there["apiVersion"], "kind": there["kind"]}
            body["metadata"] = head | {"ownerReferences": [owner.reference()]}
            await client.apply(body, manager=SCALER)
    except (errors.NotFound, errors.Conflict, errors.Invalid, errors.Forbidden) as error:
        log.warning("%s/%s: its history is not taken up: %s", owner.namespace, owner.name, error)

"""Records the spec of a revision that serves as a ControllerRevision, and deletes entries beyond the limit.

Here: writing the entries. Not here: their form (`desired.history`). Called by `reconciling` when a pipeline is Ready.
ControllerRevisions are not watched: only this module reads them, when a revision has just become Ready.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from omnipipeline_operator import errors
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster.applying import MANAGER, Applier
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import history, naming
from omnipipeline_operator.kinds import CONTROLLER_REVISION
from omnipipeline_spec.types.plan import PipelinePlan

log = logging.getLogger(__name__)


async def record(
    client: Client,
    applier: Applier,
    snapshot: Snapshot,
    resource: Mapping[str, Any],
    plan: PipelinePlan,
    limit: int,
) -> None:
    """Record the spec; a revision that serves again becomes the newest entry.

    limit:  entries beside the newest.
    Raises: errors.ClusterError: a request failed; retry.
    """
    listed, owner = snapshot.revisions(), snapshot.owner
    named = history.name(owner.name, plan)
    if listed is None or listed["metadata"].get("annotations", {}).get(history.RECORDED) == named:
        return
    try:
        await _put(client, snapshot, resource, plan)
        selector = f"{naming.PIPELINE_LABEL}={owner.name}"
        kept = [one async for one in client.listed(CONTROLLER_REVISION, owner.namespace, selector)]
        for one in history.beyond([one for one in kept if comparing.is_ours(one, owner)], limit):
            metadata = one["metadata"]
            await client.delete(CONTROLLER_REVISION, owner.namespace, metadata["name"], uid=metadata["uid"])
    except (errors.Forbidden, errors.Invalid) as error:
        # The role of an older chart lacks the permission, or the API server refuses the entry: the pipeline serves
        # without a history.
        log.warning("%s/%s: the history is not recorded: %s", owner.namespace, owner.name, error)
        return
    await applier.annotate_config_map(listed["metadata"]["name"], {history.RECORDED: named})


async def _put(client: Client, snapshot: Snapshot, resource: Mapping[str, Any], plan: PipelinePlan) -> None:
    manifest, owner = history.entry(resource, plan, snapshot.owner), snapshot.owner
    named = manifest["metadata"]["name"]
    try:
        await _made(client, manifest)
    except errors.Conflict as taken:
        live = await client.get(CONTROLLER_REVISION, owner.namespace, named)
        if comparing.belongs_to_predecessor(live, owner) and not comparing.is_ours(live, owner):
            raise taken  # the garbage collector will delete it; retry
        if not comparing.is_ours(live, owner):
            log.warning("%s/%s: ControllerRevision %s has another owner", owner.namespace, owner.name, named)
            return
        # Recreated: earlier operators created it by POST, and a patch of such an object is refused (see `_made`).
        await client.delete(CONTROLLER_REVISION, owner.namespace, named, uid=live["metadata"]["uid"])
        await _made(client, manifest)


async def _made(client: Client, manifest: Mapping[str, Any]) -> None:
    """Create an entry by an apply that requires absence, so that the API server encodes the data itself.

    The API server keeps the bytes of a POST, encodes them again at every patch, and refuses the difference because the
    data is immutable: the garbage collector could not remove the owner, and ``--cascade=orphan`` would never end.
    """
    metadata = {**manifest["metadata"], "resourceVersion": "1"}
    await client.apply({**manifest, "metadata": metadata}, manager=MANAGER)

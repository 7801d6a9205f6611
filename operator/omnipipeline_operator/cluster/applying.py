"""Writes in their safe forms: nothing of somebody else's is ever taken over.

Here: making, keeping, scaling, marking and deleting children, each write's answer put into the store. Not here: which
writes (`controller.reconciling` asks `changes`). Called by `controller`.

Server-side apply with ``force`` silently takes over a user's object of the same name. So a child is made by an apply
that demands absence (``resourceVersion: "1"``, an object's first version is never 1: 201 when absent, 409 when present)
and changed by one that demands its uid (422 when it is another). A POST followed by applies would never drop fields: it
is for what is written once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Final

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster.client import Client, Manifest
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import DEPLOYMENT, POD, Kind

MANAGER: Final = "omnipipeline-operator"
#: Owns ``replicas``, labels and owner of a Deployment; MANAGER owns what is written once. A manager that leaves a field
#: out of an apply gives it up, so the two must never be one.
SCALER: Final = "omnipipeline-operator-scaler"
_HEAD: Final = ("labels", "ownerReferences")


class NameTaken(errors.OperatorError):
    """A name of ours is borne by an object that is not ours."""

    def __init__(self, kind: str, name: str, foreign_owner: str, *, temporary: bool) -> None:
        self.kind = kind
        self.name = name
        self.foreign_owner = foreign_owner
        #: Whether its owner is an earlier pipeline of this name, which garbage collection is removing.
        self.temporary = temporary
        super().__init__(f"{kind} {name} exists and belongs to {foreign_owner}")


class Applier:
    """Writes for one pipeline."""

    def __init__(self, client: Client, store: Store, owner: Owner) -> None:
        self._client = client
        self._store = store
        self._owner = owner

    async def create(self, manifest: Manifest) -> Manifest:
        """Make a child that the store does not know.

        Returns: the child as it is now; one of ours that lost its labels is given them back.
        Raises:  NameTaken: there is one, and it is not ours.
        """
        absent = _with_metadata(manifest, resourceVersion="1")
        return await self._create_or_restore(manifest, self._client.apply(absent, manager=MANAGER))

    async def create_once(self, manifest: Manifest) -> Manifest:
        """As `create`, for a child of which MANAGER writes nothing ever after: less work for the API server."""
        return await self._create_or_restore(manifest, self._client.create(manifest, manager=MANAGER))

    async def _create_or_restore(self, manifest: Manifest, making: Awaitable[Manifest]) -> Manifest:
        try:
            return self._remember(await making)
        except errors.Conflict:
            live = await self._client.get(kinds.of(manifest), self._owner.namespace, manifest["metadata"]["name"])
        foreign_owner = comparing.foreign_owner(live, self._owner)
        if foreign_owner is not None:
            raise NameTaken(
                manifest["kind"],
                manifest["metadata"]["name"],
                foreign_owner,
                temporary=comparing.belongs_to_predecessor(live, self._owner)
                or "deletionTimestamp" in live["metadata"],
            )
        return await self.restore_owner(manifest, live)

    async def restore_owner(self, manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
        """Restore labels and owner of a child of ours, whatever else is in it; a Deployment keeps its replicas."""
        body = _head(manifest, live)
        body["metadata"] |= {key: value for key, value in manifest["metadata"].items() if key in _HEAD}
        if "replicas" in live.get("spec", {}):  # SCALER's too: left out, they would become the default, 1
            body["spec"] = {"replicas": live["spec"]["replicas"]}
        return self._remember(await self._client.apply(body, manager=SCALER))

    async def update(self, manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
        """Make a known child what it should be; fields that we no longer want go."""
        same = _with_metadata(manifest, uid=live["metadata"]["uid"])
        return self._remember(await self._client.apply(same, manager=MANAGER))

    async def scale(self, manifest: Manifest, live: Mapping[str, Any], replicas: int) -> Manifest:
        """Set the replicas of a known Deployment, and its labels and owner, nothing else."""
        body = _head(manifest, live)
        body["metadata"] |= {key: manifest["metadata"][key] for key in _HEAD}
        return self._remember(await self._client.apply({**body, "spec": {"replicas": replicas}}, manager=SCALER))

    async def create_secret(self, manifest: Manifest) -> None:
        """A Secret under a name that only this pipeline can know; one that is there is ours, made before a restart."""
        try:
            await self._client.create(manifest)
        except errors.Conflict:
            return

    async def secret_is_missing(self, manifest: Manifest) -> bool:
        """Whether a Secret is gone, asked by a dry run of making it: the operator may not read any."""
        try:
            await self._client.create(manifest, dry_run=True)
        except errors.Conflict:
            return False
        return True

    async def annotate_pod(self, name: str, annotations: Mapping[str, str]) -> None:
        """Annotations of one pod; one that has gone meanwhile is no error."""
        await self._annotate(POD, name, annotations)

    async def annotate_deployment(self, name: str, annotations: Mapping[str, str]) -> None:
        """The ReplicaSet gets them too, and its controller looks at it at once."""
        await self._annotate(DEPLOYMENT, name, annotations)

    async def _annotate(self, kind: Kind, name: str, annotations: Mapping[str, str]) -> None:
        try:
            patch = {"metadata": {"annotations": dict(annotations)}}
            self._remember(await self._client.merge(kind, self._owner.namespace, name, patch))
        except errors.NotFound:
            return

    async def has_template(self, manifest: Manifest, live: Mapping[str, Any]) -> bool:
        """Whether a known Deployment has the template that ``manifest`` has; the store keeps a part of it only."""
        try:
            current = await self._client.get(DEPLOYMENT, self._owner.namespace, live["metadata"]["name"])
        except errors.NotFound:
            return True  # its deletion is on the way to us
        return comparing.matches(manifest["spec"]["template"], current["spec"]["template"])

    async def delete(self, live: Mapping[str, Any]) -> None:
        """Delete this very child, and forget it: who looks again does not find it.

        No watch may tell of it: one that begins after the deletion knows nothing of the object.
        """
        metadata = live["metadata"]
        await self._client.delete(kinds.of(live), metadata["namespace"], metadata["name"], uid=metadata["uid"])
        gone = {key: value for key, value in metadata.items() if key != "resourceVersion"}
        self._store.drop({**live, "metadata": gone})

    async def write_status(self, status: Manifest) -> None:
        """The whole status, owned by us alone."""
        owner = self._owner
        body = {
            "apiVersion": kinds.PIPELINE.api_version,
            "kind": kinds.PIPELINE.name,
            "metadata": {"name": owner.name, "namespace": owner.namespace, "uid": owner.uid},
            "status": status,
        }
        self._remember(await self._client.apply(body, manager=MANAGER, subresource="status"))

    def _remember(self, manifest: Manifest) -> Manifest:
        self._store.put(manifest)
        return manifest


def _with_metadata(manifest: Manifest, **more: str) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], **more}}


def _head(manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
    metadata = {"name": manifest["metadata"]["name"], "namespace": manifest["metadata"]["namespace"]}
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {**metadata, "uid": live["metadata"]["uid"]},
    }

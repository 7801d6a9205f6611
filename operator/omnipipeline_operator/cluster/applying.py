"""Safe writes: an object of another owner is never overwritten.

Here: creating, updating, scaling, annotating and deleting children; each answer goes into the store. Not here: which
writes are due (`controller.writing`). Called by `controller`.

Server-side apply with ``force`` silently takes over a user's object of the same name. So a child is created by an apply
that requires absence (``resourceVersion: "1"``; an object's first version is never 1: 201 when absent, 409 when
present) and updated by one that requires its uid (422 when it is another). An object created by POST keeps the fields
that later applies leave out, so POST is for children that are written once.

An apply keeps what others own, and the result of both can be invalid: two ports of one name, minAvailable beside
maxUnavailable, data of a ConfigMap that somebody made immutable. Such a child is replaced: first its fields, and if
that is refused too, the whole object.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import CLAIM, CONFIG_MAP, DEPLOYMENT, POD, Kind, Manifest

log = logging.getLogger(__name__)

MANAGER: Final = "omnipipeline-operator"
#: Owns ``replicas``, labels and owner of a Deployment; MANAGER owns what is written once. A manager gives up the fields
#: that its apply leaves out, so the two must differ.
SCALER: Final = "omnipipeline-operator-scaler"
#: Owns for a moment what was replaced; MANAGER takes it over.
REPLACER: Final = "omnipipeline-operator-replacer"
#: The finalizer by which Kubernetes keeps a PodGroup while pods name it.
PROTECTION: Final = "scheduling.k8s.io/podgroup-protection"
_HEAD: Final = ("labels", "ownerReferences")


class NameTaken(errors.OperatorError):
    """A child's name is taken by an object with another owner."""

    def __init__(self, kind: str, name: str, foreign_owner: str, *, temporary: bool) -> None:
        self.kind = kind
        self.name = name
        self.foreign_owner = foreign_owner
        #: Whether its owner is an earlier pipeline of this name, which garbage collection will delete.
        self.temporary = temporary
        super().__init__(f"{kind} {name} exists and belongs to {foreign_owner}")


class Applier:
    """Writes for one pipeline."""

    def __init__(self, client: Client, store: Store, owner: Owner) -> None:
        self._client = client
        self._store = store
        self._owner = owner

    async def create(self, manifest: Manifest) -> Manifest:
        """Create a child that the store does not have.

        Returns: the live child; if one of ours had lost its labels, they are restored.
        Raises:  NameTaken: the name belongs to an object of another owner.
        """
        absent = _with_metadata(manifest, resourceVersion="1")
        return await self._create_or_restore(manifest, lambda: self._client.apply(absent, manager=MANAGER))

    async def create_once(self, manifest: Manifest) -> Manifest:
        """Create a child that MANAGER never updates, by POST: less work for the API server."""
        return await self._create_or_restore(manifest, lambda: self._client.create(manifest, manager=MANAGER))

    async def _create_or_restore(self, manifest: Manifest, make: Callable[[], Awaitable[Manifest]]) -> Manifest:
        kind, name = kinds.of(manifest), manifest["metadata"]["name"]
        try:
            return self._remember(await make())
        except errors.Conflict:
            live = await self._client.get(kind, self._owner.namespace, name)
        foreign_owner = comparing.foreign_owner(live, self._owner)
        ends = "deletionTimestamp" in live["metadata"]
        if ends and foreign_owner is None and live["metadata"].get("finalizers") == [PROTECTION]:
            await self._unprotect(kind, live)
            return self._remember(await make())
        if foreign_owner is not None or ends:
            temporary = ends or comparing.belongs_to_predecessor(live, self._owner)
            raise NameTaken(
                manifest["kind"],
                name,
                foreign_owner or f"this pipeline, and is being deleted{_waits(live)}",
                temporary=temporary,
            )
        return await self.restore_owner(manifest, live)

    async def restore_owner(self, manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
        """Restore labels and owner of a child and nothing else; a Deployment keeps its replicas."""
        body = _head(manifest, live)
        body["metadata"] |= {key: value for key, value in manifest["metadata"].items() if key in _HEAD}
        if "replicas" in live.get("spec", {}):  # SCALER owns them: left out, they would become the default, 1
            body["spec"] = {"replicas": live["spec"]["replicas"]}
        return self._remember(await self._client.apply(body, manager=SCALER))

    async def _unprotect(self, kind: Kind, deleted: Manifest) -> None:
        """Let a deleted PodGroup end while pods name it, so that another one can take its name.

        The API permits that. Pods that have a node stay there, and others wait for the new group.
        """
        metadata = deleted["metadata"]
        same = {key: metadata[key] for key in ("uid", "resourceVersion")}
        patch = {"metadata": {**same, "finalizers": None}}
        try:
            await self._client.merge(kind, self._owner.namespace, metadata["name"], patch)
        except errors.NotFound:
            return

    async def update(self, manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
        """Update a live child to the manifest; fields that are no longer in it are removed.

        Raises: errors.Invalid, errors.Forbidden: the manifest itself is refused.
        """
        if kinds.of(manifest) is kinds.OWN_POD_GROUP and not comparing.matches({"spec": manifest["spec"]}, live):
            await self.delete(live)  # its spec cannot be edited
            return await self.create(manifest)
        same = _with_metadata(manifest, uid=live["metadata"]["uid"])
        try:
            return self._remember(await self._client.apply(same, manager=MANAGER))
        except errors.Invalid as refused:
            current = await self._client.get(kinds.of(manifest), self._owner.namespace, manifest["metadata"]["name"])
            if current["metadata"]["uid"] != live["metadata"]["uid"]:
                raise
            await self._check_alone(manifest)
            log.warning("%s %s: replaced: %s", manifest["kind"], manifest["metadata"]["name"], refused.message)
            return await self._replace(same, current)

    async def _check_alone(self, manifest: Manifest) -> None:
        """Raises: errors.Invalid, errors.Forbidden: a new object of this manifest would be refused as well."""
        try:
            await self._client.create(manifest, dry_run=True)
        except errors.Conflict:
            return  # valid: only its name is taken

    async def _replace(self, manifest: Manifest, current: Manifest) -> Manifest:
        """Overwrite the manifest's fields, their lists included; where that is invalid, delete and create."""
        kind, name = kinds.of(manifest), manifest["metadata"]["name"]
        versions = {key: current["metadata"][key] for key in ("uid", "resourceVersion")}
        fields = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
        try:
            patch = {"metadata": versions, **fields}
            await self._client.merge(kind, self._owner.namespace, name, patch, manager=REPLACER)
            live = await self._client.apply(manifest, manager=MANAGER)
        except errors.Invalid:
            await self.delete({**current, "kind": manifest["kind"], "apiVersion": manifest["apiVersion"]})
            metadata = {key: value for key, value in manifest["metadata"].items() if key != "uid"}
            return await self.create({**manifest, "metadata": metadata})
        managers = [each for each in live["metadata"].get("managedFields", ()) if each["manager"] != REPLACER]
        owned = {"uid": versions["uid"], "resourceVersion": live["metadata"]["resourceVersion"]}
        patch = {"metadata": {**owned, "managedFields": managers}}
        return self._remember(await self._client.merge(kind, self._owner.namespace, name, patch))

    async def scale(self, manifest: Manifest, live: Mapping[str, Any], replicas: int) -> Manifest:
        """Set the replicas, labels and owner of a live Deployment, nothing else."""
        body = _head(manifest, live)
        body["metadata"] |= {key: manifest["metadata"][key] for key in _HEAD}
        return self._remember(await self._client.apply({**body, "spec": {"replicas": replicas}}, manager=SCALER))

    async def grow_claim(self, live: Mapping[str, Any], size: str) -> str | None:
        """Request more storage for a claim, nothing else; why it is refused, or None."""
        metadata = live["metadata"]
        patch = {"metadata": {"uid": metadata["uid"]}, "spec": {"resources": {"requests": {"storage": size}}}}
        try:
            self._remember(await self._client.merge(CLAIM, metadata["namespace"], metadata["name"], patch))
        except (errors.Forbidden, errors.Invalid) as error:
            return error.message
        except (errors.NotFound, errors.Conflict):
            return None  # deleted, or replaced by another one
        return None

    async def create_secret(self, manifest: Manifest) -> None:
        """Create a Secret; its name is random, so one that exists was made by this operator before a restart."""
        try:
            await self._client.create(manifest)
        except errors.Conflict:
            return

    async def secret_is_missing(self, manifest: Manifest) -> bool:
        """Whether a Secret is certainly missing, by a dry run of creating it: the operator may not read Secrets.

        Admission (a quota, a policy) may refuse before the name is looked up. Then it is unknown, and assumed to exist:
        the kubelet reports one that does not.
        """
        try:
            await self._client.create(manifest, dry_run=True)
        except errors.Conflict:
            return False
        except (errors.Forbidden, errors.Invalid) as error:
            name = f"{self._owner.namespace}/{manifest['metadata']['name']}"
            log.info("cannot check whether Secret %s exists: %s", name, error)
            return False
        return True

    async def annotate_pod(self, name: str, annotations: Mapping[str, str]) -> None:
        """Annotate a pod; a pod that no longer exists is not an error."""
        await self._annotate(POD, name, annotations)

    async def annotate_deployment(self, name: str, annotations: Mapping[str, str]) -> None:
        """Annotate a Deployment. Its ReplicaSet gets the annotations too, and is reconciled at once."""
        await self._annotate(DEPLOYMENT, name, annotations)

    async def annotate_config_map(self, name: str, annotations: Mapping[str, str]) -> None:
        """Annotate a ConfigMap; one that no longer exists is not an error."""
        await self._annotate(CONFIG_MAP, name, annotations)

    async def _annotate(self, kind: Kind, name: str, annotations: Mapping[str, str]) -> None:
        try:
            patch = {"metadata": {"annotations": dict(annotations)}}
            self._remember(await self._client.merge(kind, self._owner.namespace, name, patch))
        except errors.NotFound:
            return

    async def has_template(self, manifest: Manifest, live: Mapping[str, Any]) -> bool:
        """Whether a live Deployment has the template of ``manifest``; the store keeps only a part, so it is read."""
        try:
            current = await self._client.get(DEPLOYMENT, self._owner.namespace, live["metadata"]["name"])
        except errors.NotFound:
            return True  # the watch will report its deletion
        return comparing.matches(manifest["spec"]["template"], current["spec"]["template"])

    async def delete(self, live: Mapping[str, Any]) -> None:
        """Delete exactly this child, and drop it from the store.

        A watch that begins after the deletion would not report it.
        """
        metadata = live["metadata"]
        await self._client.delete(kinds.of(live), metadata["namespace"], metadata["name"], uid=metadata["uid"])
        deleted = {key: value for key, value in metadata.items() if key != "resourceVersion"}
        self._store.drop({**live, "metadata": deleted})

    async def write_status(self, status: Manifest) -> None:
        """Write the whole status; MANAGER is its only owner."""
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


def _waits(live: Mapping[str, Any]) -> str:
    """The finalizers that its end waits for, in words."""
    finalizers = live["metadata"].get("finalizers", ())
    return f" (it waits for {', '.join(finalizers)})" if finalizers else ""


def _with_metadata(manifest: Manifest, **more: str) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], **more}}


def _head(manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
    metadata = {"name": manifest["metadata"]["name"], "namespace": manifest["metadata"]["namespace"]}
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {**metadata, "uid": live["metadata"]["uid"]},
    }

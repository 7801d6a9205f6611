"""The newest known version of every pipeline and every child, as plain dicts.

Here: objects from watches, from lists and from the answers to our own writes; with the latter a snapshot is never older
than what was just written. Not here: watching (`handlers.watching`), any decision. Called by `controller` and
`handlers`.

Fields that nothing reads are dropped (`slimmed`). The watch event of our own write brings no newer version and queues
nothing; the reconcile that wrote is repeated because the count of `changes` grew.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import config, naming, podgroups
from omnipipeline_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, POD, Kind, Manifest

PipelineKey = tuple[str, str]  # namespace, name of the pipeline
Address = tuple[str, str, str]  # key of the kind, namespace, name

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
MAX_SHARED: Final = 128  # characters; longer texts, as those of a plan, are seldom equal
MAX_DELETIONS: Final = 1000  # remembered; a page of a list, or the answer to a write, is not older than these


class Store:
    """Objects by address, and children by the pipeline that their label names."""

    def __init__(self) -> None:
        self._objects: dict[Address, Manifest] = {}
        #: Addresses of the children of each pipeline. Every address in here is in ``_objects``.
        self._children: dict[PipelineKey, set[Address]] = {}
        self._changes: dict[PipelineKey, int] = {}
        self._deletions: dict[str, float] = {}  #: uid -> version at which an object was deleted or lost our label.

    def put(self, manifest: Mapping[str, Any]) -> set[PipelineKey]:
        """Store an object unless this or a newer version is known; the pipelines to reconcile.

        A page of a list, and the answer to a write, may arrive after the deletion of the object; it is ignored then. A
        child whose label was edited concerns two pipelines: the one it is labelled with now, and the one that lost it.
        """
        address, key = address_of(manifest), _pipeline_of(manifest)
        if _version(manifest) <= self._deletions.get(_uid(manifest), -1):
            return set()
        known = self._objects.get(address)
        if known is not None and _version(known) >= _version(manifest) and _uid(known) == _uid(manifest):
            return set()
        if known is not None:
            self._forget(address, known)
        self._objects[address] = shared(slimmed(manifest))
        if key is not None and manifest["kind"] != PIPELINE.name:
            self._children.setdefault(key, set()).add(address)
        concerned = _pipelines_of(manifest, known)
        if manifest["kind"] != PIPELINE.name or known is None or _spec_identity(known) != _spec_identity(manifest):
            for each in concerned:
                if self.pipeline(each) is not None:  # a label may name any pipeline
                    self._changes[each] = self._changes.get(each, 0) + 1
        return concerned

    def changes(self, key: PipelineKey) -> int:
        """A count that grows with each change of a pipeline's spec or children, but not of its status."""
        return self._changes.get(key, 0)

    def spec_identity(self, key: PipelineKey) -> tuple[Any, ...] | None:
        """It changes when a pipeline's spec does, or when the pipeline is deleted. None: it does not exist."""
        pipeline = self.pipeline(key)
        return None if pipeline is None else _spec_identity(pipeline)

    def drop(self, manifest: Mapping[str, Any]) -> set[PipelineKey]:
        """Remove a deleted object, unless a newer version or a successor is known; the pipelines to reconcile.

        The deletion is final without a resourceVersion: the uid does not return.
        """
        address, version = address_of(manifest), _version(manifest) or math.inf
        self._deletions.pop(_uid(manifest), None)
        self._deletions[_uid(manifest)] = version
        if len(self._deletions) > MAX_DELETIONS:
            del self._deletions[next(iter(self._deletions))]
        known = self._objects.get(address)
        if known is not None and _uid(known) == _uid(manifest) and _version(known) <= version:
            self._forget(address, known)
            del self._objects[address]
            if manifest["kind"] == PIPELINE.name:
                self._changes.pop(address[1:], None)
        return _pipelines_of(manifest, known)

    def drop_unlisted(
        self, kind: Kind, listed: Container[Address], *, older_than: int, kept: Container[str] = ()
    ) -> set[PipelineKey]:
        """Drop the objects of a kind that a complete list did not have and that are not newer than the list.

        kept: namespaces that were not listed.
        """
        changed: set[PipelineKey] = set()
        for address, known in list(self._objects.items()):
            unlisted = address[0] == kind.key and address not in listed and address[1] not in kept
            if unlisted and _version(known) <= older_than:
                changed |= self.drop(known)
        return changed

    def drop_namespace(self, namespace: str) -> set[PipelineKey]:
        """Drop all objects of a namespace that can no longer be read. They may exist, so no deletion is remembered."""
        changed: set[PipelineKey] = set()
        for address, known in list(self._objects.items()):
            if address[1] == namespace:
                self._forget(address, known)
                del self._objects[address]
                changed |= _pipelines_of(known)
        for key in changed:
            self._changes.pop(key, None)
        return changed

    def pipeline(self, key: PipelineKey) -> Manifest | None:
        return self._objects.get((PIPELINE.name, *key))

    def pipelines(self) -> Iterator[PipelineKey]:
        return (address[1:] for address in self._objects if address[0] == PIPELINE.name)

    def children(self, key: PipelineKey, kind: Kind) -> list[Manifest]:
        """All children of a kind with the pipeline's label, sorted by name."""
        found = sorted(address for address in self._children.get(key, ()) if address[0] == kind.key)
        return [self._objects[address] for address in found]

    def child(self, key: PipelineKey, kind: Kind, name: str) -> Manifest | None:
        """One child by name; None also for an object without our label."""
        address = (kind.key, key[0], name)
        return self._objects[address] if address in self._children.get(key, ()) else None

    def newest(self) -> int:
        """The highest known version; a list that begins after this call has everything up to it."""
        return max(map(_version, self._objects.values()), default=0)

    def __len__(self) -> int:
        return len(self._objects)

    def _forget(self, address: Address, known: Mapping[str, Any]) -> None:
        key = _pipeline_of(known)
        if key is not None and key in self._children:
            self._children[key].discard(address)
            if not self._children[key]:
                del self._children[key]


def address_of(manifest: Mapping[str, Any]) -> Address:
    """Kind, namespace and name of an object."""
    metadata = manifest["metadata"]
    return kinds.key_of(manifest), metadata["namespace"], metadata["name"]


def _pipelines_of(*manifests: Mapping[str, Any] | None) -> set[PipelineKey]:
    """The pipelines that these objects are or belong to."""
    return {key for each in manifests if each is not None and (key := _pipeline_of(each)) is not None}


def _pipeline_of(manifest: Mapping[str, Any]) -> PipelineKey | None:
    metadata = manifest["metadata"]
    if manifest["kind"] == PIPELINE.name:
        return metadata["namespace"], metadata["name"]
    name = metadata.get("labels", {}).get(naming.PIPELINE_LABEL)
    return (metadata["namespace"], name) if name else None


def _version(manifest: Mapping[str, Any]) -> int:
    # Comparable by the API's rules since Kubernetes 1.35; before that in practice, as etcd's revision.
    return int(manifest["metadata"].get("resourceVersion") or 0)


def _uid(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"].get("uid", ""))


def _spec_identity(pipeline: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a pipeline's spec: it changes when the spec does, or when the pipeline is deleted."""
    metadata = pipeline["metadata"]
    return _uid(pipeline), metadata.get("generation"), "deletionTimestamp" in metadata


def slimmed(manifest: Mapping[str, Any]) -> Manifest:
    """An object without unread fields: managedFields (a third of most objects) and the bulk of some kinds."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}
    if LAST_APPLIED in metadata.get("annotations", ()):
        metadata["annotations"] = {key: value for key, value in metadata["annotations"].items() if key != LAST_APPLIED}
    slim = {**manifest, "metadata": metadata}
    if manifest["kind"] == POD.name:
        slim["spec"] = _slim_pod_spec(manifest.get("spec", {}))
    elif manifest["kind"] == CONFIG_MAP.name and naming.REVISION_LABEL in metadata.get("labels", ()):
        slim["data"] = config.digests(manifest.get("data", {}))  # a plan is only compared
    elif manifest["kind"] == DEPLOYMENT.name and "template" in manifest.get("spec", {}):
        slim["spec"] = {**manifest["spec"], "template": _slim_template(manifest["spec"]["template"])}
    return slim


def _slim_pod_spec(spec: Mapping[str, Any]) -> Manifest:
    """Its node, and its priority where it has one."""
    kept = ("nodeName", "priority", "preemptionPolicy") if spec.get("priority") else ("nodeName",)
    return {key: value for key, value in spec.items() if key in kept}


def _slim_template(template: Mapping[str, Any]) -> Manifest:
    """A pod template is written once and never compared; its image, GPUs, Secret's name and group are read back."""
    spec = template["spec"]
    containers = [
        {key: value for key, value in each.items() if key in ("name", "image", "resources")}
        for each in spec.get("containers", ())
    ]
    volumes = [each for each in spec.get("volumes", ()) if "secret" in each]
    group = {key: value for key, value in spec.items() if key == podgroups.FIELD}
    return {"metadata": template.get("metadata", {}), "spec": {"containers": containers, "volumes": volumes, **group}}


def shared(value: Any) -> Any:
    """A copy whose keys and short texts exist once in the process, however many objects have them.

    A parser makes them anew for every object: with 500 pipelines they were half of the store's memory.
    """
    kind = type(value)  # a parser makes no other types than these: `isinstance` of a Mapping takes as long as the rest
    if kind is str:
        return sys.intern(value) if len(value) <= MAX_SHARED else value
    # Loops: a comprehension is a call of its own, and each level of an object would count twice (`cli.MOST_CALLS`).
    if kind is dict or (kind is not list and isinstance(value, Mapping)):
        copied = {}
        for key, item in value.items():
            copied[shared(key)] = shared(item)
        return copied
    if kind is list or isinstance(value, list | tuple):
        items = []
        for each in value:
            items.append(shared(each))
        return items
    return value

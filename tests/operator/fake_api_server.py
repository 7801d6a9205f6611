"""An API server in memory, with the verbs of `cluster.client.Client`, for tests of a whole reconcile.

Here: object versions, uids, the preconditions of server-side apply, a record of every write. Not here: controllers
(no Deployment makes pods), watches, admission.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.kinds import Kind, Manifest

Write = tuple[str, str, str]  # verb, kind, name


class ApiServer:
    """Objects by kind, namespace and name.

    before_write: called before each write with its verb, kind and name; a test may change objects there.
    """

    def __init__(self, before_write: Callable[[Write], None] = lambda write: None) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.writes: list[Write] = []
        self.before_write = before_write
        self.refusals: dict[
            str, errors.ClusterError
        ] = {}  #: Kind -> why none is made, as a quota: before it is looked up.
        self._versions: Iterator[int] = itertools.count(10)

    def put(self, manifest: Mapping[str, Any]) -> Manifest:
        """Store an object, as another writer would; returns its new version."""
        made = copy.deepcopy(dict(manifest))
        version = next(self._versions)
        made["metadata"] = {"uid": f"uid-{version}", **made["metadata"], "resourceVersion": str(version)}
        self.objects[_address(made)] = made
        return copy.deepcopy(made)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        found = self.objects.get((kind.key, namespace, name))
        if found is None:
            raise errors.NotFound(f"GET {kind.plural} {name}", 404, "not found")
        return copy.deepcopy(found)

    async def listed(self, kind: Kind, namespace: str | None, selector: str | None = None) -> AsyncIterator[Manifest]:
        for found in [each for each in self.objects.values() if kinds.key_of(each) == kind.key]:
            yield copy.deepcopy(found)

    async def pods_at(self, namespace: str, address: str) -> list[Manifest]:
        return []

    async def warnings(self, namespace: str, **about: str) -> list[Manifest]:
        return []

    async def create(self, manifest: Mapping[str, Any], *, manager: str = "", dry_run: bool = False) -> Manifest:
        if manifest["kind"] in self.refusals:
            raise self.refusals[manifest["kind"]]
        if not dry_run:
            self._record("create", manifest)
        if _address(manifest) in self.objects:
            raise errors.Conflict("POST", 409, "already exists", reason="AlreadyExists")
        return dict(manifest) if dry_run else self.put(manifest)

    async def apply(self, manifest: Mapping[str, Any], *, manager: str, subresource: str | None = None) -> Manifest:
        self._record("apply" if subresource is None else f"apply {subresource}", manifest)
        found, metadata = self.objects.get(_address(manifest)), manifest["metadata"]
        if (metadata.get("resourceVersion") == "1") is (found is not None):
            raise errors.Conflict("PATCH", 409, "exists" if found else "does not exist")
        if found is not None and metadata.get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            raise errors.Invalid("PATCH", 422, "another uid")
        if subresource is not None and found is not None:
            found = {key: value for key, value in found.items() if key != subresource}  # all of it is that manager's
        return self.put(_merged(found or {}, manifest))

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, manager: str = ""
    ) -> Manifest:
        found = await self.get(kind, namespace, name)
        self._record("merge", found)
        return self._end(self.put(_merged(found, patch)))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        found = self.objects.get((kind.key, namespace, name))
        if found is not None:
            self._record("delete", found)
            self._end(self.put({**found, "metadata": {**found["metadata"], "deletionTimestamp": "now"}}))

    def _end(self, manifest: Manifest) -> Manifest:
        """Remove a deleted object that no finalizer keeps."""
        if "deletionTimestamp" in manifest["metadata"] and not manifest["metadata"].get("finalizers"):
            del self.objects[_address(manifest)]
        return manifest

    def _record(self, verb: str, manifest: Mapping[str, Any]) -> None:
        write = (verb, manifest["kind"], manifest["metadata"]["name"])
        if manifest["kind"] != kinds.EVENT.name:
            self.before_write(write)
            self.writes.append(write)


def _address(manifest: Mapping[str, Any]) -> tuple[str, str, str]:
    return kinds.key_of(manifest), manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Manifest:
    """``new`` over ``old``, map by map; lists are replaced."""
    merged = dict(old)
    for key, value in new.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged

"""The writes of a first start without the operator: what the API server alone needs for them.

Here: bodies made from what the operator has written, for pipelines of other namespaces, and sending them: those of a
pipeline one after the other, as many pipelines at once as the operator has workers. Not here: a decision, a watch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from benchmarks.operatorlab import ground
from benchmarks.operatorlab.ground import Ground
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    PIPELINE,
    POLICY,
    SECRET,
    SERVICE,
    Kind,
    Manifest,
)

AT_ONCE: Final = 16  # the operator's workers
_KINDS: Final = (SECRET, CONFIG_MAP, SERVICE, POLICY, BUDGET, DEPLOYMENT)
_KEPT: Final = ("name", "labels", "annotations", "ownerReferences")
_ASSIGNED: Final = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")  # by the API server


class Replay:
    """The children and the status of all pipelines, to be written once more under other namespaces."""

    def __init__(self, admin: Client, pipelines: list[tuple[Manifest, list[Manifest]]]) -> None:
        self._admin = admin
        self._pipelines = pipelines
        self.writes = sum(len(children) + 1 for _, children in pipelines)

    async def run(self) -> None:
        """Send all of them."""
        waiting = iter(self._pipelines)

        async def work() -> None:
            for pipeline, children in waiting:
                await self._one(pipeline, children)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def edit(self, number: int, word: str) -> float:
        """Edit a pipeline, and write its Service as the operator would. Returns: seconds for both."""
        pipeline, children = self._pipelines[number]
        metadata = pipeline["metadata"]
        service = next(each for each in children if each["kind"] == SERVICE.name and is_door(each))
        annotations = {**service["metadata"].get("annotations", {}), ground.EDITED: word}
        edited = {**service, "metadata": {**service["metadata"], "annotations": annotations}}
        began = time.monotonic()
        await self._admin.merge(PIPELINE, metadata["namespace"], metadata["name"], ground.edited(word))
        await self._admin.apply(edited, manager="replay")
        return time.monotonic() - began

    async def _one(self, pipeline: Manifest, children: list[Manifest]) -> None:
        metadata = pipeline["metadata"]
        await self._admin.get(PIPELINE, metadata["namespace"], metadata["name"])
        for each in children:
            await self._verb(each)(each)
        await self._admin.apply(pipeline, manager="replay", subresource="status")

    def _verb(self, manifest: Manifest) -> Callable[[Manifest], Awaitable[object]]:
        """The verb that the operator creates a child with: see `cluster.applying`."""
        posted = manifest["kind"] in (SECRET.name, DEPLOYMENT.name) or manifest.get("immutable")
        return self._admin.create if posted else self._apply

    async def _apply(self, manifest: Manifest) -> None:
        absent = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "1"}}
        await self._admin.apply(absent, manager="replay")


async def prepare(place: Ground) -> Replay:
    """Makes the namespaces and the pipelines, which count for nothing."""
    children: dict[tuple[str, str], list[Manifest]] = {}
    for kind in _KINDS:
        async for each in place.admin.listed(kind, None, naming.PIPELINE_LABEL):
            metadata = each["metadata"]
            key = (metadata["namespace"], metadata["labels"][naming.PIPELINE_LABEL])
            children.setdefault(key, []).append(_again(kind, each))
    for space in sorted({namespace for namespace, _ in children}):
        ground.make_namespace(place, _elsewhere(space))
    pipelines = []
    async for each in place.admin.listed(PIPELINE, None):
        space, name = each["metadata"]["namespace"], each["metadata"]["name"]
        if "status" not in each or (space, name) not in children:
            continue
        head = {"apiVersion": each["apiVersion"], "kind": each["kind"]}
        address = {"namespace": _elsewhere(space), "name": name}
        made = await place.admin.create({**head, "metadata": address, "spec": each["spec"]})
        uid = made["metadata"]["uid"]
        for child in children[space, name]:
            for owner in child["metadata"].get("ownerReferences", ()):
                owner["uid"] = uid
        pipelines.append(
            ({**head, "metadata": {**address, "uid": uid}, "status": each["status"]}, children[space, name])
        )
    return Replay(place.admin, pipelines)


def is_door(service: Manifest) -> bool:
    """Whether it is the Service that clients use; the other one is the pods' own."""
    return bool(service["spec"].get("clusterIP") != "None")


def _elsewhere(space: str) -> str:
    return f"again-{space}"


def _again(kind: Kind, live: dict[str, Any]) -> Manifest:
    """A live child as it was written."""
    manifest = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    metadata = live["metadata"]
    manifest["metadata"] = {key: metadata[key] for key in _KEPT if key in metadata}
    manifest["metadata"]["namespace"] = _elsewhere(metadata["namespace"])
    if kind is SERVICE and is_door(live):
        manifest["spec"] = {key: value for key, value in live["spec"].items() if key not in _ASSIGNED}
    return manifest

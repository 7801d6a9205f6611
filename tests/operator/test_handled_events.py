"""Memory after watch events that kopf has handled: nothing of their objects stays, with no collector at work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import kopf
from kopf._cogs.structs.ephemera import AnyMemo, Memo
from kopf._cogs.structs.references import Resource
from kopf._core.actions import lifecycles
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor import processing

from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.handlers import watching
from omnipipeline_operator.handlers.watching import COLLECTED_TOGETHER, NoMemories, Watcher
from omnipipeline_operator.kinds import SERVICE


class Spec(dict[str, Any]):
    """A dict that can be referred to weakly."""


def service(number: int, spec: Spec) -> dict[str, Any]:
    labels = {"omnipipeline.dev/pipeline": "duo"}
    metadata = {"name": f"s{number}", "namespace": "a", "uid": f"u{number}", "resourceVersion": "1", "labels": labels}
    return {"kind": "Service", "apiVersion": "v1", "metadata": metadata, "spec": spec}


class Watched:
    """A watcher whose events of Services go through kopf."""

    def __init__(self) -> None:
        self.store, self.memories = Store(), NoMemories()
        self._registry = Watcher(self.store, WorkQueue()).registry()
        self._settings = kopf.OperatorSettings()

    async def handle(self, kind: str | None, manifest: dict[str, Any]) -> None:
        await watching.configure(self._settings)
        services = Resource(group="", version="v1", plural="services", kind="Service", namespaced=True, preferred=True)
        await processing.process_resource_event(
            lifecycle=lifecycles.get_default_lifecycle(),
            indexers=OperatorIndexers(),
            registry=self._registry,
            settings=self._settings,
            memories=self.memories,
            memobase=AnyMemo(Memo()),
            resource=services,
            raw_event={"type": kind, "object": manifest},  # type: ignore[typeddict-item]
            event_queue=asyncio.Queue(),
        )


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_handled_object_is_in_the_store_alone() -> None:
    watched = Watched()
    with no_collector():
        for number, kind in enumerate((None, "ADDED", "MODIFIED", "DELETED")):
            spec = Spec(ports=[{"port": number}])
            parsed = weakref.ref(spec)
            manifest = service(0, spec)
            manifest["metadata"]["resourceVersion"] = str(number + 1)
            del spec
            await watched.handle(kind, manifest)
            assert parsed() is None
            known = watched.store.child(("a", "duo"), SERVICE, "s0")
            assert (known or {}).get("spec") == (None if kind == "DELETED" else {"ports": [{"port": number}]})


async def test_kopf_keeps_no_state_of_an_object() -> None:
    watched = Watched()
    for number in range(3):
        await watched.handle("ADDED", service(number, Spec()))
    assert list(watched.memories.iter_all_memories()) == []


async def test_the_garbage_of_events_is_collected_before_there_is_much_of_it() -> None:
    watched = Watched()
    with no_collector():
        for number in range(2 * COLLECTED_TOGETHER):
            await watched.handle("ADDED", service(number, Spec()))
        # ``isinstance`` asks an object for its class, and a weak proxy of other tests' garbage raises then.
        bodies = sum(type(each) is kopf.Body for each in gc.get_objects())
    assert bodies <= 2, "the events that began a collection were being handled then"

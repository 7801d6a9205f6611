"""Watches feed the store and the queue: kopf's on.event for pipelines and for their labelled children, and re-lists.

Here: which kinds are watched and how, and the list every few minutes that drops ghosts. Not here: what a change means
(`reconciling`). Called by `lifecycle`. Of kopf only the watching is used: bookmarks, chunked lists, reconnects and
time-outs were measured to be right; indices, daemons, finalizers and peering are not wanted.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, Final

import kopf

from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.store import Store, address_of
from omnipipeline_operator.controller.work_queue import Key, WorkQueue
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import PIPELINE, WATCHED, Kind

log = logging.getLogger(__name__)

CHUNK: Final = 50
IDLE_S: Final = 75.0  # the API server sends a bookmark every minute: a silent stream is dead
CONNECT_S: Final = 10.0
WORKER_S: Final = 0.5  # kopf's task of an object holds its last event, whole, for so long: 7,000 of them after a list


class Watcher:
    """What comes in."""

    def __init__(self, store: Store, queue: WorkQueue) -> None:
        self._store = store
        self._queue = queue
        self.events = 0

    def registry(self) -> kopf.OperatorRegistry:
        """kopf's handlers: one for every watched kind."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(_configure)
        kopf.on.login(registry=registry)(_login)
        for kind in (PIPELINE, *WATCHED):
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def on_event(self, kind: Kind, event: str | None, manifest: Mapping[str, Any]) -> None:
        """Something has changed. ``event``: ADDED, MODIFIED, DELETED; None: it is there."""
        self.events += 1
        manifest = {**manifest, "kind": kind.name, "apiVersion": kind.api_version}
        before = self._store.pipeline(_key(manifest)) if kind is PIPELINE else None
        for key in self._store.drop(manifest) if event == "DELETED" else self._store.put(manifest):
            self._queue.add(key, urgent=kind is PIPELINE and event is not None and _is_edit(before, manifest))

    async def relist(self, client: Client, namespaces: tuple[str, ...], *, spread_s: float) -> None:
        """Read everything anew: what a watch has missed is put right, and what is gone is forgotten.

        spread_s: the time in which pipelines are looked at of which the lists said nothing new.
        Raises: errors.ClusterError: nothing was forgotten on account of a list that broke off.
        """
        for kind in (PIPELINE, *WATCHED):
            known_up_to, listed = self._store.newest(), set()
            selector = None if kind is PIPELINE else naming.PIPELINE_LABEL
            for namespace in namespaces or (None,):
                async for each in client.listed(kind, namespace, selector):
                    listed.add(address_of(each))
                    for key in self._store.put(each):
                        self._queue.add(key)
            for key in self._store.drop_unlisted(kind, listed, older_than=known_up_to):
                self._queue.add(key)
        for key in self._store.pipelines():
            self._queue.add(key, spread_s * random.random())

    def _handler(self, kind: Kind) -> Any:
        async def handle(event: Mapping[str, Any], **_: Any) -> None:
            self.on_event(kind, event["type"], event["object"])

        return handle


def _key(manifest: Mapping[str, Any]) -> Key:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _is_edit(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Somebody has asked for something and is waiting: a new pipeline or spec. Not: our own status, written back."""
    return before is None or before["metadata"].get("generation") != now["metadata"].get("generation")


class _NoDiffBase(kopf.DiffBaseStorage):
    """kopf compares no object with an earlier state of it: its copies were two thirds of all processor time."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return


async def _configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.watching.chunk_size = CHUNK
    settings.queueing.idle_timeout = WORKER_S
    settings.watching.inactivity_timeout = IDLE_S
    settings.watching.connect_timeout = CONNECT_S
    for kind in WATCHED:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = naming.PIPELINE_LABEL


async def _login(**context: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

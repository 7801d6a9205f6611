"""Feeds the store and the work queue: kopf's watches of pipelines and of their labelled children, and re-lists.

Here: which kinds are watched and how, and the periodic list that drops deleted objects. Not here: what a change means
(`controller.reconciling`). Called by `lifecycle`. Only kopf's watches are used: its bookmarks, chunked lists,
reconnects and timeouts were measured and work; its indices, daemons, finalizers and peering are not used.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Mapping
from typing import Any, Final

import kopf
from kopf._core.reactor import inventory

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.store import PipelineKey, Store, address_of
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import CRD, OPTIONAL, PIPELINE, WATCHED, Kind

log = logging.getLogger(__name__)

CHUNK: Final = 20  # kopf parses a whole one, of nine kinds at a time
IDLE_S: Final = 75.0  # the API server sends a bookmark every minute, so a silent stream is broken
CONNECT_S: Final = 10.0
WORKER_S: Final = 0.02  # kopf keeps an object's last event in memory for so long: with 0.5 s hundreds during a list
#: Events whose garbage is collected in one go, in a millisecond. The collector counts objects that are made and not
#: deleted: while lists of objects are deleted, it would leave the garbage of hundreds of events.
COLLECTED_TOGETHER: Final = 100
#: Fields of an object's metadata: for its logs and for whether it is being deleted.
READ_BY_KOPF: Final = ("uid", "name", "namespace", "resourceVersion", "deletionTimestamp", "finalizers")


class Watcher:
    """Puts watch events and lists into the store and the work queue."""

    def __init__(self, store: Store, queue: WorkQueue) -> None:
        self._store = store
        self._queue = queue
        self.events = 0
        #: Optional kinds that the last list could not read -> the API server's refusal.
        self.lacking: dict[str, errors.ClusterError] = {}

    def registry(self) -> kopf.OperatorRegistry:
        """kopf's handlers: one for every watched kind that the cluster has."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(configure)
        kopf.on.login(registry=registry)(_login)
        for kind in (PIPELINE, *WATCHED):
            if kind.key in self.lacking:
                continue
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.key)(self._handler(kind))
        return registry

    def on_event(self, kind: Kind, event: str | None, manifest: Mapping[str, Any]) -> None:
        """Handle one watch event. ``event``: ADDED, MODIFIED, DELETED; None: an object of the initial list."""
        self.events += 1
        manifest = {**manifest, "kind": kind.name, "apiVersion": kind.api_version}
        before = self._store.pipeline(_key(manifest)) if kind is PIPELINE else None
        for key in self._store.drop(manifest) if event == "DELETED" else self._store.put(manifest):
            self._queue.add(key, urgent=kind is PIPELINE and event is not None and _is_edit(before, manifest))

    async def relist(
        self, client: Client, namespaces: tuple[str, ...], *, spread_s: float
    ) -> dict[str, errors.ClusterError]:
        """List everything again: apply what a watch has missed, and drop what no longer exists.

        namespaces: the watched ones; empty: all.
        spread_s:   unchanged pipelines are queued at random times within this period.
        Returns:    the namespaces that cannot be read, with the refusal; all their objects are dropped.
        Raises:     errors.ClusterError: a list failed, or no namespace can be read; nothing of its kind is dropped.
        """
        unreadable: dict[str, errors.ClusterError] = {}
        lacking: dict[str, errors.ClusterError] = {}
        for kind in (PIPELINE, *WATCHED):
            known_up_to, listed = self._store.newest(), set()
            selector = None if kind is PIPELINE else naming.PIPELINE_LABEL
            for namespace in namespaces or (None,):
                if namespace in unreadable:
                    continue
                try:
                    async for each in client.listed(kind, namespace, selector):
                        listed.add(address_of(each))
                        for key in self._store.put(each):
                            self._queue.add(key)
                except (errors.Forbidden, errors.NotFound) as error:
                    if kind is PIPELINE and error.status == 404:  # of a namespace that is gone the list is empty
                        raise errors.NotFound(error.what, 404, f"the CRD {CRD} is not installed") from error
                    if kind in OPTIONAL and error.status != 401:
                        lacking[kind.key] = error
                        listed.clear()
                        break
                    # One namespace may be deleted, or take its role back. A refused token concerns all of them.
                    if namespace is None or error.status == 401 or {*unreadable, namespace} >= {*namespaces}:
                        raise
                    unreadable[namespace] = error
            for key in self._store.drop_unlisted(kind, listed, older_than=known_up_to, kept=unreadable):
                self._queue.add(key)
        self.lacking = lacking
        for namespace in unreadable:
            for key in self._store.drop_namespace(namespace):
                self._queue.add(key)
        for key in self._store.pipelines():
            self._queue.add(key, spread_s * random.random())
        return unreadable

    async def has_appeared(self, client: Client, namespaces: tuple[str, ...]) -> bool:
        """Whether a kind that the last list could not read can be read now."""
        for kind in OPTIONAL:
            if kind.key in self.lacking:
                try:
                    namespace = namespaces[0] if namespaces else None
                    [_ async for _ in client.listed(kind, namespace, naming.PIPELINE_LABEL)]
                except errors.ClusterError:
                    continue
                return True
        return False

    async def is_defined(self, client: Client, namespaces: tuple[str, ...]) -> bool:
        """Whether the API server serves pipelines; True also where it does not answer."""
        try:
            [_ async for _ in client.listed(PIPELINE, namespaces[0] if namespaces else None)]
        except errors.NotFound:
            return False
        except errors.ClusterError:
            return True
        return True

    def _handler(self, kind: Kind) -> Any:
        async def handle(event: Mapping[str, Any], **_: Any) -> None:
            self.on_event(kind, event["type"], event["object"])
            _shed(event["object"])
            if self.events % COLLECTED_TOGETHER == 0:
                gc.collect(0)

        return handle


def is_refusal(error: BaseException) -> bool:
    """Whether kopf raises this for an answer of the API server: its own classes for that are not public."""
    return isinstance(error, kopf.LoginError) or type(error).__module__.startswith("kopf._cogs.clients.")


def without_refusals(record: logging.LogRecord) -> bool:
    """A filter of log records: kopf logs a refused watch two or three times with a traceback, and then raises it."""
    if not record.name.startswith("kopf") or not record.exc_info or record.exc_info[1] is None:
        return True
    return not is_refusal(record.exc_info[1])


def _shed(manifest: dict[str, Any]) -> None:
    """Empty a handled object, but for the fields by which kopf goes on.

    kopf's views of an object refer to each other, so only a garbage collection frees them and what they show. One
    collection took as long as ten reconciles.
    """
    metadata = manifest["metadata"]
    kept = {key: metadata[key] for key in READ_BY_KOPF if key in metadata}
    manifest.clear()
    manifest["metadata"] = kept


def _key(manifest: Mapping[str, Any]) -> PipelineKey:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _is_edit(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether a pipeline is new or its spec was edited; a write of our own status is not an edit."""
    return before is None or before["metadata"].get("generation") != now["metadata"].get("generation")


class NoMemories(inventory.ResourceMemories):
    """Keeps nothing of an object between its events; kopf's state of daemons and handlers is not used.

    It was 0.9 KiB for each object, in pieces that lay among the parsed objects of a list and kept their memory in use.
    """

    async def recall(
        self, raw_body: Any, *, memobase: Any = None, noticed_by_listing: bool = False, ephemeral: bool = False
    ) -> inventory.ResourceMemory:
        return await super().recall(raw_body, memobase=memobase, noticed_by_listing=noticed_by_listing, ephemeral=True)


class _NoDiffBase(kopf.DiffBaseStorage):
    """Stores no last-handled state: kopf's copies of it were two thirds of all processor time."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return


async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Set how kopf watches: the first handler that it calls."""
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

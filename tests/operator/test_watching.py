"""A list of everything fills the store, and leaves out namespaces that cannot be read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.handlers.watching import Watcher
from omnipipeline_operator.kinds import PIPELINE, ROUTE, SERVICE, Kind

FORBIDDEN = errors.Forbidden("GET", 403, "services is forbidden")
GONE = errors.NotFound("GET", 404, "no such namespace")


def objects(namespace: str) -> list[dict[str, Any]]:
    metadata = {"name": "duo", "namespace": namespace, "resourceVersion": "5", "uid": f"p-{namespace}"}
    child = {**metadata, "uid": f"s-{namespace}", "labels": {"omnipipeline.dev/pipeline": "duo"}}
    return [{"kind": PIPELINE.name, "metadata": metadata}, {"kind": SERVICE.name, "metadata": child}]


class Lists:
    """An API server's lists of two namespaces. refused: (kind, namespace) -> the error of its list."""

    def __init__(self) -> None:
        self.refused: dict[tuple[str, str | None], errors.ClusterError] = {}

    async def listed(self, kind: Kind, namespace: str | None, selector: str | None = None) -> AsyncIterator[Any]:
        if (kind.name, namespace) in self.refused:
            raise self.refused[kind.name, namespace]
        for each in objects("a") + objects("b"):
            if each["kind"] == kind.name and namespace in (None, each["metadata"]["namespace"]):
                yield each


class Watched:
    """A watcher of the namespaces, its store, and the lists that it reads."""

    def __init__(self, *namespaces: str) -> None:
        self.lists, self.store = Lists(), Store()
        self._namespaces = namespaces
        self._watcher = Watcher(self.store, WorkQueue())

    async def relist(self) -> dict[str, errors.ClusterError]:
        return await self._watcher.relist(cast(Client, self.lists), self._namespaces, spread_s=0.0)

    async def has_appeared(self) -> bool:
        return await self._watcher.has_appeared(cast(Client, self.lists), self._namespaces)

    @property
    def lacking(self) -> dict[str, errors.ClusterError]:
        return self._watcher.lacking

    def is_watched(self, kind: Kind) -> bool:
        """Whether kopf would watch it."""
        return any(each.id == kind.key for each in self._watcher.registry()._watching._handlers)

    def known(self) -> dict[str, list[str]]:
        """namespace -> the kinds of what the store has of its pipeline."""
        found: dict[str, list[str]] = {}
        for namespace in ("a", "b"):
            key = (namespace, "duo")
            kinds = [PIPELINE.name] if self.store.pipeline(key) else []
            found[namespace] = kinds + [each["kind"] for each in self.store.children(key, SERVICE)]
        return found


WHOLE = ["OmniPipeline", "Service"]


async def test_everything_that_can_be_read_is_known() -> None:
    watched = Watched("a", "b")
    assert await watched.relist() == {}
    assert watched.known() == {"a": WHOLE, "b": WHOLE}


@pytest.mark.parametrize(
    "refused, error",
    [((PIPELINE.name, "a"), FORBIDDEN), ((SERVICE.name, "a"), FORBIDDEN), ((SERVICE.name, "a"), GONE)],
)
async def test_of_a_namespace_that_cannot_be_read_nothing_is_known_and_the_others_are(
    refused: tuple[str, str], error: errors.ClusterError
) -> None:
    watched = Watched("a", "b")
    watched.lists.refused = {refused: error}
    assert await watched.relist() == {"a": error}
    assert watched.known() == {"a": [], "b": WHOLE}


async def test_a_namespace_that_was_readable_is_forgotten_and_comes_back_whole() -> None:
    watched = Watched("a", "b")
    await watched.relist()
    watched.lists.refused = {(SERVICE.name, "b"): FORBIDDEN}
    assert await watched.relist() == {"b": FORBIDDEN}
    assert watched.known() == {"a": WHOLE, "b": []}
    watched.lists.refused = {}
    assert await watched.relist() == {}
    assert watched.known() == {"a": WHOLE, "b": WHOLE}


@pytest.mark.parametrize(
    "namespaces, refused, error",
    [
        (("a", "b"), [(PIPELINE.name, "a"), (SERVICE.name, "b")], FORBIDDEN),
        ((), [(SERVICE.name, None)], FORBIDDEN),
        (("a", "b"), [(PIPELINE.name, "a")], GONE),  # the CRD is gone, and back before the next namespace is read
        (("a", "b"), [(SERVICE.name, "b")], errors.Unavailable("GET", 503, "overloaded")),
        (("a", "b"), [(SERVICE.name, "b")], errors.Forbidden("GET", 401, "the token has expired")),
    ],
)
async def test_a_list_fails_as_a_whole_when_no_namespace_is_readable_or_the_cause_is_another(
    namespaces: tuple[str, ...], refused: list[tuple[str, str | None]], error: errors.ClusterError
) -> None:
    watched = Watched(*namespaces)
    await watched.relist()
    watched.lists.refused = dict.fromkeys(refused, error)
    with pytest.raises(type(error)):
        await watched.relist()
    assert watched.known() == {"a": WHOLE, "b": WHOLE}


@pytest.mark.parametrize("namespaces, error", [((), GONE), (("a", "b"), GONE), (("a", "b"), FORBIDDEN)])
async def test_a_kind_that_a_cluster_may_lack_costs_nothing_else_and_is_noticed_when_it_comes(
    namespaces: tuple[str, ...], error: errors.ClusterError
) -> None:
    watched = Watched(*namespaces)
    watched.lists.refused = {(ROUTE.name, each): error for each in namespaces or (None,)}
    assert await watched.relist() == {}
    assert watched.known() == {"a": WHOLE, "b": WHOLE}
    assert watched.lacking == {ROUTE.name: error}
    assert (watched.is_watched(ROUTE), watched.is_watched(SERVICE)) == (False, True)
    assert not await watched.has_appeared()
    watched.lists.refused = {}
    assert await watched.has_appeared()
    await watched.relist()
    assert watched.lacking == {} and watched.is_watched(ROUTE)
    assert not await watched.has_appeared()


async def test_routes_are_forgotten_with_their_kind() -> None:
    watched = Watched()
    route = {"name": "duo", "namespace": "a", "resourceVersion": "4", "uid": "r"}
    labels = {"labels": {"omnipipeline.dev/pipeline": "duo"}}
    watched.store.put({"kind": ROUTE.name, "metadata": {**route, **labels}})
    watched.lists.refused = {(ROUTE.name, None): GONE}
    await watched.relist()
    assert watched.store.child(("a", "duo"), ROUTE, "duo") is None


async def test_a_refused_token_is_not_a_missing_kind() -> None:
    watched = Watched()
    watched.lists.refused = {(ROUTE.name, None): errors.Forbidden("GET", 401, "the token has expired")}
    with pytest.raises(errors.Forbidden):
        await watched.relist()
    assert watched.lacking == {}

"""The store, and how watches, lists and our own writes change it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omnipipeline_operator.changes import comparing
from omnipipeline_operator.cluster import store as store_of
from omnipipeline_operator.cluster.store import MAX_DELETIONS, Store, address_of
from omnipipeline_operator.desired import config
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import PIPELINE, SERVICE

KEY = ("space", "demo")
OWNER = Owner(namespace="space", name="demo", uid="uid-1")


def service(version: int, *, name: str = "demo", uid: str = "s", labelled: bool = True, **spec: Any) -> dict[str, Any]:
    labels = {"omnipipeline.dev/pipeline": "demo"} if labelled else {}
    metadata = {"name": name, "namespace": "space", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Service", "apiVersion": "v1", "metadata": metadata, "spec": spec}


def pipeline(version: int, *, generation: int = 1, **more: Any) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "space", "uid": "u", "resourceVersion": str(version)}
    return {"kind": PIPELINE.name, "metadata": {**metadata, "generation": generation}, **more}


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    assert store.put(service(5, port=5)) == {KEY}
    assert store.put(service(4, port=4)) == set()
    assert store.children(KEY, SERVICE)[0]["spec"] == {"port": 5}


def test_the_successor_of_a_deleted_object_survives_its_late_deletion() -> None:
    store = Store()
    store.put(service(5, uid="old"))
    store.put(service(9, uid="new"))
    store.drop(service(8, uid="old"))
    assert store.child(KEY, SERVICE, "demo") is not None


def test_a_page_of_a_list_that_comes_in_after_a_deletion_brings_nothing_back() -> None:
    store = Store()
    store.put(service(5))
    store.drop(service(8))
    assert store.put(service(5)) == set()
    assert store.put(service(8, port=8)) == set()
    assert store.children(KEY, SERVICE) == []
    assert store.put(service(9, uid="made anew")) == {KEY}


def test_a_child_that_lost_its_label_to_the_watch_comes_back_with_it() -> None:
    """A watch by label reports an object that loses its label as deleted, and one that gets it back as added."""
    store = Store()
    store.put(service(5))
    store.drop(service(8))
    assert store.put(service(9)) == {KEY}
    store.drop(service(8))  # it was restored before the watch reported its loss
    assert store.child(KEY, SERVICE, "demo") is not None


def test_an_object_that_the_api_server_does_not_find_is_deleted_for_good() -> None:
    store = Store()
    store.put(pipeline(5))
    store.drop({"kind": PIPELINE.name, "metadata": {"namespace": "space", "name": "demo", "uid": "u"}})
    assert store.pipeline(KEY) is None
    assert store.put(pipeline(7)) == set()


def test_the_number_of_remembered_deletions_is_bounded() -> None:
    store = Store()
    for number in range(MAX_DELETIONS + 10):
        store.put(service(5, uid=f"s{number}"))
        store.drop(service(8, uid=f"s{number}"))
    assert [name for name, value in vars(store).items() if len(value) > MAX_DELETIONS] == []


def test_a_child_that_loses_its_label_is_no_longer_a_child() -> None:
    store = Store()
    store.put(service(5))
    store.put(service(6, labelled=False))
    assert store.children(KEY, SERVICE) == []
    assert store.child(KEY, SERVICE, "demo") is None


def test_a_relabelled_child_changes_the_pipeline_that_lost_it_too() -> None:
    """A watch by label reports no deletion: the child still has the label, with another value."""
    store, other = Store(), ("space", "other")
    store.put(pipeline(3))
    store.put(service(5))
    before = store.changes(KEY)
    relabelled = service(6)
    relabelled["metadata"]["labels"] = {"omnipipeline.dev/pipeline": "other"}
    assert store.put(relabelled) == {KEY, other}
    assert store.changes(KEY) > before
    assert store.child(KEY, SERVICE, "demo") is None
    assert store.drop(service(7)) == {KEY, other}, "the deletion bears the label of before"


def test_a_list_drops_deleted_objects_but_nothing_newer_than_itself() -> None:
    store = Store()
    store.put(service(5, name="ghost"))
    store.put(service(10, name="as old as the list"))
    store.put(service(11, name="just-made"))
    store.put(service(6, name="there"))
    changed = store.drop_unlisted(SERVICE, {address_of(service(6, name="there"))}, older_than=10)
    assert changed == {KEY}
    assert [each["metadata"]["name"] for each in store.children(KEY, SERVICE)] == ["just-made", "there"]


def test_a_list_without_news_queues_nothing() -> None:
    store = Store()
    store.put(service(5))
    assert store.put(service(5)) == set()
    assert store.drop_unlisted(SERVICE, {address_of(service(5))}, older_than=10) == set()


def test_the_watch_event_of_our_own_write_queues_nothing() -> None:
    store = Store()
    store.put(service(5))
    assert store.put(service(5)) == set()
    assert store.put(service(5, uid="made anew")) == {KEY}


def test_changes_of_children_and_of_the_spec_are_counted_and_those_of_the_status_are_not() -> None:
    store = Store()
    observed = [store.changes(KEY)]
    for manifest in (
        pipeline(3),
        pipeline(4, status={"ready": True}),
        pipeline(5, generation=2),
        service(6),
        service(6),
        service(7),
    ):
        store.put(manifest)
        observed.append(store.changes(KEY))
    assert observed == [0, 1, 1, 2, 3, 3, 4]


def test_nothing_is_kept_of_a_deleted_pipeline_that_a_late_child_names() -> None:
    store = Store()
    store.put(pipeline(3))
    store.drop(pipeline(5))
    assert store.put(service(6)) == {KEY}
    store.drop(service(7))
    assert [name for name, value in vars(store).items() if value and name != "_deletions"] == []


def test_an_edit_that_arrived_with_the_answer_to_our_write_is_counted() -> None:
    """Its watch event is not newer than the store: only the count shows the change."""
    store = Store()
    store.put(pipeline(3))
    before = store.changes(KEY)
    store.put(pipeline(9, generation=2, status={"observedGeneration": 1}))
    assert store.put(pipeline(8, generation=2)) == set()
    assert store.changes(KEY) > before


def test_unread_fields_are_not_stored() -> None:
    noise = {"managedFields": [{"manager": "m"}], "annotations": {"a": "1", store_of.LAST_APPLIED: "{}"}}
    head = {"name": "n", "namespace": "space"}
    template = {
        "metadata": {"annotations": {"kept": "1"}},
        "spec": {
            "containers": [{"name": "main", "image": "i", "resources": {"limits": {}}, "env": [{"name": "X"}]}],
            "volumes": [{"name": "control", "secret": {"secretName": "s"}}, {"name": "tmp", "emptyDir": {}}],
        },
    }
    kept = {
        "metadata": {"annotations": {"kept": "1"}},
        "spec": {
            "containers": [{"name": "main", "image": "i", "resources": {"limits": {}}}],
            "volumes": [{"name": "control", "secret": {"secretName": "s"}}],
        },
    }
    labels = {"omnipipeline.dev/revision": "abc"}
    for given, slim in (
        (
            {"kind": "Service", "metadata": head | noise},
            {"kind": "Service", "metadata": head | {"annotations": {"a": "1"}}},
        ),
        (
            {
                "kind": "Pod",
                "metadata": head,
                "spec": {"containers": [], "nodeName": "n"},
                "status": {"phase": "Running"},
            },
            {"kind": "Pod", "metadata": head, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}},
        ),
        (
            {"kind": "ConfigMap", "metadata": head | {"labels": labels}, "data": {"plan.json": "{}"}},
            {"kind": "ConfigMap", "metadata": head | {"labels": labels}, "data": config.digests({"plan.json": "{}"})},
        ),
        (
            {"kind": "ConfigMap", "metadata": head, "data": {"a": "b"}},
            {"kind": "ConfigMap", "metadata": head, "data": {"a": "b"}},
        ),
        (
            {"kind": "Deployment", "metadata": head, "spec": {"replicas": 2, "template": template}},
            {"kind": "Deployment", "metadata": head, "spec": {"replicas": 2, "template": kept}},
        ),
    ):
        assert store_of.slimmed(given) == slim


def test_a_pipeline_is_known_by_its_own_name() -> None:
    store = Store()
    metadata = {"name": "demo", "namespace": "space", "uid": "uid-1", "resourceVersion": "3"}
    assert store.put({"kind": PIPELINE.name, "metadata": metadata}) == {KEY}
    assert list(store.pipelines()) == [KEY]
    assert store.drop({"kind": PIPELINE.name, "metadata": metadata}) == {KEY}
    assert store.pipeline(KEY) is None


def test_a_child_matches_its_manifest_whatever_others_added() -> None:
    desired = {"metadata": {"labels": {"a": "1"}}, "spec": {"ports": [{"port": 80}], "type": "ClusterIP"}}
    live = {
        "metadata": {"labels": {"a": "1", "theirs": "x"}, "uid": "u"},
        "spec": {"ports": [{"port": 80, "nodePort": 30000}], "type": "ClusterIP", "clusterIP": "10.0.0.1"},
    }
    assert comparing.matches(desired, live)
    for path, value in (("ports", [{"port": 81}]), ("ports", [{"port": 80}, {"port": 81}]), ("type", "NodePort")):
        assert not comparing.matches(desired, {**live, "spec": {**live["spec"], path: value}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "desired, live, same",
    [
        ({"podSelector": {"matchLabels": {}}}, {"podSelector": {}}, True),
        (
            {"from": [{"podSelector": {"matchLabels": {}, "matchExpressions": []}}]},
            {"from": [{"podSelector": {}}]},
            True,
        ),
        ({"ingress": []}, {}, True),
        ({"ingress": []}, {"ingress": [{}]}, False),
        ({"podSelector": {"matchLabels": {}}}, {}, False),
        ({"podSelector": {}}, {}, False),
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "hostPath": {"path": "/"}}, False),
    ],
)
def test_empty_lists_and_maps_of_texts_match_what_the_api_server_drops_and_empty_objects_do_not(
    desired: Any, live: Any, same: bool
) -> None:
    assert comparing.matches(desired, live) == same


def test_the_applied_hash_changes_with_anything_in_the_manifest() -> None:
    stamps = {
        comparing.stamped(manifest)["metadata"]["annotations"]["omnipipeline.dev/applied"]
        for manifest in (service(1), service(1, port=1), service(1, port=1, more={}), service(1, port=2))
    }
    assert len(stamps) == 4


def test_an_object_is_ours_by_uid_and_not_by_name() -> None:
    mine = service(1)
    mine["metadata"]["ownerReferences"] = [OWNER.reference()]
    assert comparing.is_ours(mine, OWNER)
    before = service(1)
    before["metadata"]["ownerReferences"] = [{**OWNER.reference(), "uid": "an earlier one"}]
    assert not comparing.is_ours(before, OWNER)
    assert comparing.belongs_to_predecessor(before, OWNER)
    assert comparing.foreign_owner(service(1), OWNER) == "no pipeline: it has no owner"


def test_keys_and_short_texts_of_two_objects_exist_once() -> None:
    store, long = Store(), "x" * (store_of.MAX_SHARED + 1)
    for name in ("one", "two"):
        parsed = json.dumps(service(1, name=name, uid=name, ports=[{"protocolOf": "a text"}], long=long, port=5))
        store.put(json.loads(parsed))
    first, second = (each["spec"] for each in store.children(KEY, SERVICE))
    assert first == second == {"ports": [{"protocolOf": "a text"}], "long": long, "port": 5}
    (key, text), (other_key, other_text) = (next(iter(each["ports"][0].items())) for each in (first, second))
    assert key is other_key and text is other_text
    assert first["long"] is not second["long"]

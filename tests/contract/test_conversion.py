"""Conversion between versions: nothing is lost on any way, edits win, and forged notes are ignored."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.conversion import kept, versions
from omnipipeline_spec.conversion.versions import Spoke, Versions
from omnipipeline_spec.types.errors import UnreadableSpec
from tests.contract.next_version import HUB, NAME, VERSIONS

#: A third version: every name of the spec is in capitals.
SHOUTED = Spoke(
    to_hub=lambda document: _keys(document, str.lower),
    from_hub=lambda document: _keys(document, str.upper),
)
THREE = Versions(spokes={**VERSIONS.spokes, "v1": SHOUTED})


def _keys(document: Any, change: Any) -> Any:
    return {**document, "spec": {change(key): value for key, value in document.get("spec", {}).items()}}


def resource(version: str = HUB, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"omnipipeline.dev/{version}",
        "kind": "OmniPipeline",
        "metadata": {"name": "duo", "namespace": "team", "uid": "1", "annotations": {"mine": "yes"}},
        "spec": spec,
        "status": {"observedGeneration": 1},
    }


RICH = resource(
    modelPath="/models/a",
    restartedAt="today",
    rollout={"strategy": "Recreate", "maxSurge": 0},
    stages=[{"name": "one", "tpSize": 2}, {"name": "two", "factoryArgs": {"scale": 1.0, "on": True, "none": None}}],
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def _stage(version: str) -> st.SearchStrategy[dict[str, Any]]:
    sized: dict[str, Any] = {"tpSize": st.integers(1, 8)}
    if version == NAME:
        sized = {"parallelism": st.none() | st.fixed_dictionaries({}, optional={"tensor": st.integers(1, 8)})}
    return st.fixed_dictionaries(
        {"name": st.text(min_size=1, max_size=3)},
        optional={"process": st.text(), "factoryArgs": st.dictionaries(st.text(), values, max_size=3), **sized},
    )


def specs(version: str) -> st.SearchStrategy[dict[str, Any]]:
    """Specs of a version, with fields that no version knows among them."""
    own: dict[str, Any] = {"modelPath": st.text(), "restartedAt": st.text()}
    words = ("Coherent", "Recreate")
    if version == NAME:
        own, words = {"model": st.text(), "description": st.text()}, ("Coherent", "Surge")
    rollout = st.none() | st.fixed_dictionaries(
        {}, optional={"strategy": st.sampled_from(words), "maxSurge": st.integers()}
    )
    stages = st.none() | st.lists(st.none() | _stage(version), max_size=3)
    strange = st.dictionaries(st.text(max_size=5), values, max_size=2)
    known = st.fixed_dictionaries({}, optional={**own, "rollout": rollout, "stages": stages})
    return st.builds(lambda one, other: {**one, **other}, strange, known)


def same(one: Any, other: Any) -> bool:
    return kept.same(one, other)


@given(specs(HUB))
def test_an_object_of_the_hub_comes_back_from_the_other_version_as_it_was(spec: dict[str, Any]) -> None:
    before = resource(HUB, **spec)
    untouched = copy.deepcopy(before)
    there = VERSIONS.converted(before, NAME)
    assert same(before, untouched)
    assert same(VERSIONS.converted(there, HUB), before)


@given(specs(NAME))
def test_an_object_of_the_other_version_comes_back_from_the_hub_as_it_was(spec: dict[str, Any]) -> None:
    before = resource(NAME, **spec)
    assert same(VERSIONS.converted(VERSIONS.converted(before, HUB), NAME), before)


@given(specs(NAME))
def test_two_spokes_lose_nothing_between_each_other(spec: dict[str, Any]) -> None:
    lower = {key.lower(): value for key, value in spec.items() if key.isascii()}
    before = resource(NAME, **lower)
    for order in ((HUB, NAME), ("v1", NAME), ("v1", HUB, NAME), (HUB, "v1", HUB, "v1", NAME)):
        there = before
        for version in order:
            there = THREE.converted(there, version)
        assert same(there, before), order


@given(specs(HUB), specs(NAME))
def test_both_versions_keep_theirs_through_edits_in_the_other(first: dict[str, Any], second: dict[str, Any]) -> None:
    """An edit in one version replaces its spec; the two then show one object, however often it is converted."""
    edited = VERSIONS.converted(resource(HUB, **first), NAME)
    edited["spec"] = second
    hub = VERSIONS.converted(edited, HUB)
    there = VERSIONS.converted(hub, NAME)
    assert same(there["spec"], second)
    assert same(VERSIONS.converted(there, HUB), hub)


@pytest.mark.parametrize(("name", "spoke"), VERSIONS.spokes.items())
@given(st.data())
def test_a_third_step_changes_nothing_more(name: str, spoke: Spoke, data: st.DataObject) -> None:
    hub, other = {"spec": data.draw(specs(HUB))}, {"spec": data.draw(specs(name))}
    there, back = spoke.from_hub(hub), spoke.to_hub(other)
    assert same(spoke.from_hub(spoke.to_hub(there)), there)
    assert same(spoke.to_hub(spoke.from_hub(back)), back)


def test_what_each_version_shows_of_an_object() -> None:
    there = VERSIONS.converted(RICH, NAME)
    notes = json.loads(there["metadata"]["annotations"].pop(kept.ANNOTATION))
    assert there == {
        **resource(
            NAME,
            model="/models/a",
            rollout={"strategy": "Coherent", "maxSurge": 0},
            stages=[{"name": "one", "parallelism": {"tensor": 2}}, RICH["spec"]["stages"][1]],
        ),
    }
    assert notes == {
        HUB: [
            {"at": ["spec", "restartedAt"], "value": "today"},
            {"at": ["spec", "rollout", "strategy"], "value": "Recreate", "instead": "Coherent"},
        ]
    }


@pytest.mark.parametrize(
    "edit, expected",
    [
        (lambda spec: spec.update(model="/models/b"), {**RICH["spec"], "modelPath": "/models/b"}),
        (
            lambda spec: spec["rollout"].update(maxSurge=1),
            {**RICH["spec"], "rollout": {"strategy": "Recreate", "maxSurge": 1}},
        ),
        (lambda spec: spec.pop("rollout"), {key: value for key, value in RICH["spec"].items() if key != "rollout"}),
        (lambda spec: spec["stages"].reverse(), {**RICH["spec"], "stages": [*reversed(RICH["spec"]["stages"])]}),
    ],
)
def test_an_edit_in_one_version_is_that_edit_in_the_other(edit: Any, expected: Any) -> None:
    there = copy.deepcopy(VERSIONS.converted(RICH, NAME))
    edit(there["spec"])
    assert VERSIONS.converted(there, HUB)["spec"] == expected


#: A version in which each text of `mode` has three forms, and another name: `manner`. The hub has three forms, too.
FORMS = Spoke(
    to_hub=lambda document: _keys_and_values(document, {"manner": "mode"}, lambda text: text.rstrip("!?")),
    from_hub=lambda document: _keys_and_values(document, {"mode": "manner"}, lambda text: text.rstrip(".;")),
)


def _keys_and_values(document: Any, names: dict[str, str], change: Any) -> Any:
    """The fields of a spec by other names; the text of the renamed one is another."""
    spec = {
        names.get(key, key): change(value) if key in names and isinstance(value, str) else value
        for key, value in document.get("spec", {}).items()
    }
    return {**document, "spec": spec}


@pytest.mark.parametrize("before", ["Recreate", "Coherent"])
@pytest.mark.parametrize("shown", ["Surge", "Coherent"])
@pytest.mark.parametrize("edited", ["Surge", "Coherent"])
def test_a_kept_value_loses_against_an_edit_to_one_that_looks_the_same_from_its_version(
    before: str, shown: str, edited: str
) -> None:
    """Each version reads the other's own word as `Coherent`."""
    first = VERSIONS.converted({**RICH, "spec": {**RICH["spec"], "rollout": {"strategy": before}}}, NAME)
    first["spec"]["rollout"] = {"strategy": shown}
    hub = VERSIONS.converted(first, HUB)
    hub["spec"]["rollout"] = {"strategy": before}  # both have a value of their own now
    there = VERSIONS.converted(hub, NAME)
    was = there["spec"]["rollout"]["strategy"]
    there["spec"]["rollout"]["strategy"] = edited
    back = VERSIONS.converted(there, HUB)
    assert back["spec"]["rollout"]["strategy"] == (before if edited == was else "Coherent")
    assert back["spec"]["restartedAt"] == "today", "another field's kept value stays"
    assert VERSIONS.converted(back, NAME)["spec"]["rollout"]["strategy"] == edited


@given(
    st.sampled_from(["a", "b"]).flatmap(lambda word: st.sampled_from([word, f"{word}.", f"{word};"])),
    st.lists(st.sampled_from(["a", "a!", "a?", "b", "b!", "b?", None]), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_last_edit_decides_and_only_an_edit_does(first: str, edits: list[str | None], through: bool) -> None:
    """None: the object goes there and back without an edit. through: by way of a third version."""
    table = Versions(spokes={NAME: FORMS, "v1": SHOUTED})
    hub = resource(HUB, mode=first, other="kept.")
    for edit in edits:
        there = table.converted(table.converted(hub, "v1") if through else hub, NAME)
        was, mode = there["spec"]["manner"], hub["spec"]["mode"]
        if edit is not None:
            there["spec"]["manner"] = edit
        hub = table.converted(table.converted(there, "v1") if through else there, HUB)
        expected = mode if edit in (None, was) else edit.rstrip("!?") if edit is not None else ""
        assert hub["spec"] == {"mode": expected, "other": "kept."}
        assert table.converted(hub, NAME)["spec"]["manner"] == there["spec"]["manner"]


def test_a_kept_value_follows_its_stage_and_goes_with_it() -> None:
    own = Spoke(
        from_hub=lambda document: _each_stage(document, lambda stage: {"name": stage["name"]}),
        to_hub=lambda document: document,
    )
    table = Versions(spokes={NAME: own})
    there = table.converted(RICH, NAME)
    assert there["spec"]["stages"] == [{"name": "one"}, {"name": "two"}]
    there["spec"]["stages"] = [{"name": "two"}, {"name": "new"}]
    assert table.converted(there, HUB)["spec"]["stages"] == [RICH["spec"]["stages"][1], {"name": "new"}]


def _each_stage(document: Any, change: Any) -> Any:
    return {**document, "spec": {**document["spec"], "stages": [change(each) for each in document["spec"]["stages"]]}}


@pytest.mark.parametrize(
    "entry",
    [
        {"at": ["spec", "modelPath"], "value": "/models/evil", "instead": "/models/a"},
        {"at": ["spec", "stages"], "value": [], "instead": RICH["spec"]["stages"]},
        {"at": [], "value": 1, "instead": {}},
    ],
)
def test_a_note_cannot_give_one_version_what_the_other_shows_otherwise(entry: dict[str, Any]) -> None:
    """A policy that reads one version alone would not see what the operator then reads in the other."""
    shown = VERSIONS.converted(RICH, NAME)
    shown["metadata"]["annotations"][kept.ANNOTATION] = json.dumps({HUB: [entry]})
    assert VERSIONS.converted(shown, HUB)["spec"]["modelPath"] == "/models/a"
    assert VERSIONS.converted(shown, HUB)["spec"]["stages"] == RICH["spec"]["stages"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", "[" * 100_000),
        *('{"v1alpha1": 5}', '{"v1alpha1": [{"at": 5}]}', '{"v1alpha1": [{"at": [{"name": 1}]}]}'),
    ],
)
def test_a_note_in_another_form_counts_as_none(text: str) -> None:
    shown = resource(NAME, model="a")
    shown["metadata"]["annotations"][kept.ANNOTATION] = text
    assert VERSIONS.converted(shown, HUB) == resource(HUB, modelPath="a")


@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_any_note_converts(note: Any) -> None:
    shown = resource(NAME, model="a")
    shown["metadata"]["annotations"][kept.ANNOTATION] = json.dumps({HUB: note, NAME: [note]})
    assert VERSIONS.converted(shown, HUB)["spec"]["modelPath"] == "a"


def test_parts_of_objects_convert() -> None:
    """Server-side apply converts what is left of an object when a manager's fields are taken out of it."""
    for version, other in ((HUB, NAME), (NAME, HUB)):
        part = {"apiVersion": f"omnipipeline.dev/{version}", "kind": "OmniPipeline", "metadata": {}}
        for body in ({}, {"spec": None}, {"spec": {"stages": None, "rollout": None}, "status": None}):
            assert VERSIONS.converted({**part, **body}, other) == {
                **part,
                "apiVersion": f"omnipipeline.dev/{other}",
                **body,
            }


OTHER_VERSION = ".apiVersion: expected omnipipeline.dev/ and one of v1alpha1, v1beta1, got"


@pytest.mark.parametrize(
    "thing, message",
    [
        (5, ": expected an object, got 5"),
        ({}, ".kind: expected OmniPipeline, got None"),
        ({**RICH, "kind": "Pod"}, ".kind: expected OmniPipeline, got 'Pod'"),
        ({**RICH, "apiVersion": "v1"}, f"{OTHER_VERSION} 'v1'"),
        ({**RICH, "apiVersion": HUB}, f"{OTHER_VERSION} 'v1alpha1'"),
        ({**RICH, "metadata": []}, ".metadata: expected an object, got []"),
        ({**RICH, "metadata": {"annotations": 5}}, ".metadata.annotations: expected an object, got 5"),
        ({**RICH, "spec": "x"}, ".spec: expected an object, got 'x'"),
        ({"apiVersion": RICH["apiVersion"], "kind": "OmniPipeline"}, ".metadata: expected an object, got None"),
    ],
)
def test_what_is_not_a_pipeline_of_the_table_is_named_with_its_place(thing: Any, message: str) -> None:
    with pytest.raises(UnreadableSpec) as raised:
        VERSIONS.converted(thing, NAME)
    assert str(raised.value) == message


def test_this_release_converts_no_version_but_its_own() -> None:
    assert versions.RELEASED == Versions(hub="v1alpha1", spokes={})
    with pytest.raises(UnreadableSpec, match="version 'v1beta1' is not among v1alpha1"):
        versions.RELEASED.converted(RICH, NAME)

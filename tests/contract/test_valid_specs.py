"""Properties that hold for every sound pipeline, whatever it looks like."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import writing
from omnipipeline_spec.planning import inlinecode
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.resource import API_VERSION, KIND
from omnipipeline_spec.types.values import to_document
from tests import valid_specs
from tests.thoroughness import examples

#: Documents are large and many are drawn in vain.
SETTINGS = settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))


def resource(spec: valid_specs.Document) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": spec}


def shuffled(value: Any, order: random.Random) -> Any:
    """The same value, its maps in another order."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def snake(value: Any) -> Any:
    """The document as Python would spell it, free-form values too deep to be fields left alone."""
    spec = loading.from_resource(resource(value)).spec
    document = msgspec.structs.asdict(spec)
    return {
        key: to_document(held)
        for key, held in document.items()
        if key not in ("config_cls", "name") and to_document(held)
    }


@SETTINGS
@given(valid_specs.documents())
def test_every_sound_spec_has_a_plan_that_puts_each_stage_in_one_place(document: valid_specs.Document) -> None:
    plan = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    declared = [stage["name"] for stage in document["stages"]]
    placed = [stage.name for unit in plan.units for stage in unit.stages]
    grouped = [name for unit in plan.units for group in unit.groups for name in group.stages]
    assert sorted(placed) == sorted(grouped) == sorted(declared)
    assert list(plan.current.stages) == declared
    processes = [process for unit in plan.units for group in unit.groups for process in group.processes]
    assert len(set(processes)) == len(processes)


@SETTINGS
@given(valid_specs.documents())
def test_a_gpu_id_is_in_one_unit_and_its_number_there_is_its_position(document: valid_specs.Document) -> None:
    plan = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    ids = [gpu for unit in plan.units for gpu in unit.gpu_ids]
    assert len(set(ids)) == len(ids)
    wanted = {stage["name"]: tuple(stage.get("gpu", [])) for stage in document["stages"]}
    for unit in plan.units:
        assert list(unit.gpu_ids) == sorted(unit.gpu_ids)
        for stage in unit.stages:
            assert tuple(unit.gpu_ids[number] for number in stage.gpus) == wanted[stage.name]


@SETTINGS
@given(valid_specs.documents())
def test_edges_are_what_was_declared_and_each_end_knows_the_other(document: valid_specs.Document) -> None:
    plan = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    declared = {
        (stage["name"], target, kind)
        for stage in document["stages"]
        for field, kind in (("next", "normal"), ("streamTo", "stream"))
        for target in stage.get(field, [])
    }
    assert {(edge.source, edge.target, edge.kind) for edge in plan.edges} == declared
    received = {
        (source, stage.name, kind)
        for unit in plan.units
        for stage in unit.stages
        for sources, kind in ((stage.inputs_from, "normal"), (stage.stream_from, "stream"))
        for source in sources
    }
    assert received == declared


@SETTINGS
@given(valid_specs.documents(), st.randoms(use_true_random=False))
def test_the_order_of_maps_changes_no_byte_of_the_plan(document: valid_specs.Document, order: random.Random) -> None:
    one = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    other = planning.plan(loading.from_resource(resource(shuffled(document, order))).spec, name="p")
    assert msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
    assert canonical.encode(one) == canonical.encode(other)


@SETTINGS
@given(valid_specs.documents())
def test_a_spec_comes_back_from_its_own_yaml(document: valid_specs.Document) -> None:
    spec = loading.from_resource(resource(document)).spec
    again = loading.loads(writing.convert(spec, name="p"))
    assert again.spec == spec
    assert writing.convert(again.spec) == writing.convert(spec)


@SETTINGS
@given(valid_specs.documents())
def test_a_plain_file_in_snake_case_is_the_same_pipeline(document: valid_specs.Document) -> None:
    spec = loading.from_resource(resource(document)).spec
    plain = loading.loads(writing.to_yaml(snake(document)))
    assert planning.plan(plain.spec, name="p") == planning.plan(spec, name="p")


@SETTINGS
@given(valid_specs.documents())
def test_a_plan_comes_back_from_its_bytes_with_the_same_revisions(document: valid_specs.Document) -> None:
    plan = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=PipelinePlan) == plan
    for unit in plan.units:
        decoded = msgspec.json.decode(canonical.encode(unit), type=type(unit))
        hashed = msgspec.structs.replace(decoded, revision="", code=inlinecode.meanings(decoded.code))
        assert canonical.short_hash(hashed) == unit.revision


@SETTINGS
@given(valid_specs.documents())
def test_without_gpus_nothing_but_devices_is_gone(document: valid_specs.Document) -> None:
    plan = planning.plan(loading.from_resource(resource(document)).spec, name="p")
    bare = planning.without_gpus(plan)
    assert not any(stage.gpus for unit in bare.units for stage in unit.stages)
    assert [(s.name, s.tp_size, s.group) for u in bare.units for s in u.stages] == [
        (s.name, s.tp_size, s.group) for u in plan.units for s in u.stages
    ]
    assert {name: len(devices) for name, devices in bare.local_gpus.items()} == {
        name: len(devices) for name, devices in plan.local_gpus.items()
    }
    assert all(unit.on_cpu for unit in bare.units) and not any(unit.on_cpu for unit in plan.units)
    assert bare.current.units == {unit.name: unit.revision for unit in bare.units}

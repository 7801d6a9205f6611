"""Null entries of a file's free-form maps: dropped as on a cluster, and each named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnipipeline_spec import loading
from omnipipeline_spec.loading import nulls

PLAIN = """\
model_path: null
relay_backend:
runtime_overrides:
  a: {x: null}
env_defaults: {A: null}
stages:
- name: a
  process: a
  factory: w:m
  terminal: true
  gpu: null
  factory_args:
    x: ~
    m: {z: null, list: [null, {deep: null}]}
    odd key:
    kept: "null"
process_groups:
- name: a
  pod_template:
    spec: {volumes: [{name: v, emptyDir: null}]}
"""
PLACES = [
    ("runtimeOverrides.a.x", 4),
    ("envDefaults.A", 5),
    ("stages[0].factoryArgs.x", 13),
    ("stages[0].factoryArgs.m.z", 14),
    ("stages[0].factoryArgs.m.list[1].deep", 14),
    ("stages[0].factoryArgs['odd key']", 15),
    ("processGroups[0].podTemplate.spec.volumes[0].emptyDir", 20),
]
RESOURCE = "apiVersion: omnipipeline.dev/v1alpha1\nkind: OmniPipeline\nmetadata: {name: p}\nspec:\n"


def placed(text: str, *overrides: str) -> list[tuple[str, int | None]]:
    return [(fault.path, fault.line) for fault in loading.loads(text, overrides=overrides).dropped]


def test_each_null_of_a_free_form_map_is_named_and_no_unset_field_or_list_item() -> None:
    loaded = loading.loads(PLAIN)
    assert placed(PLAIN) == PLACES
    assert loaded.spec.stages[0].factory_args == {"m": {"list": [None, {}]}, "kept": "null"}
    assert all("Leave it out where the default is meant" in fault.message for fault in loaded.dropped)


def test_a_resource_has_the_same_places_one_head_lower() -> None:
    spec = PLAIN
    camel = {"model_path": "modelPath", "relay_backend": "relayBackend", "runtime_overrides": "runtimeOverrides"}
    camel |= {"env_defaults": "envDefaults", "factory_args": "factoryArgs", "process_groups": "processGroups"}
    for snake, key in (camel | {"pod_template": "podTemplate"}).items():
        spec = spec.replace(snake, key)
    indented = "".join(f"  {line}\n" for line in spec.splitlines())
    assert placed(RESOURCE + indented) == [(path, line + 4) for path, line in PLACES]


def test_a_null_over_a_classs_default_is_named_at_its_line_and_the_default_stays(tmp_path: Path) -> None:
    (tmp_path / "nullfamily.py").write_text(
        "from omnipipeline_spec.pipeline import PipelineConfig, StageConfig\n"
        "def stages():\n"
        "    return [StageConfig(name='a', process='a', factory='w:m', terminal=True, factory_args={'k': 1})]\n"
        "class Mine(PipelineConfig):\n"
        "    name: str = 'mine'\n"
        "    stages: list[StageConfig] = stages()\n"
    )
    file = tmp_path / "p.yaml"
    file.write_text("config_cls: nullfamily:Mine\nstages:\n- name: a\n  factory_args: {k: null}\n")
    loaded = loading.load(file)
    assert loaded.spec.stages[0].factory_args == {"k": 1}
    assert [(fault.path, fault.line) for fault in loaded.dropped] == [("stages[0].factoryArgs.k", 4)]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("stages.a.factoryArgs={w: null, v: 1}", "stages[0].factoryArgs.w"),
        ("stages.a.factoryArgs.y={w: {u: null}}", "stages[0].factoryArgs.y.w.u"),
        ("runtimeOverrides={a: {w: null}}", "runtimeOverrides.a.w"),
    ],
)
def test_a_null_inside_an_overrides_value_is_named_with_the_override(override: str, path: str) -> None:
    text = "stages: [{name: a, process: a, factory: 'w:m', terminal: true, factory_args: {x: 1}}]"
    (fault,) = loading.loads(text, overrides=[override]).dropped
    assert (fault.path, fault.line) == (path, None)
    assert f"(from --set {override})" in fault.message


def test_an_override_that_removes_a_value_is_not_warned_of() -> None:
    text = "stages: [{name: a, process: a, factory: 'w:m', terminal: true, factory_args: {x: 1}}]"
    loaded = loading.loads(text, overrides=["stages.a.factoryArgs.x=null"])
    assert (loaded.spec.stages[0].factory_args, loaded.dropped) == ({}, ())


def test_none_in_python_is_a_value_and_not_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    file.write_text(
        "from omnipipeline_spec.pipeline import PipelineConfig, StageConfig\n"
        "a = StageConfig(name='a', process='a', factory='w:m', terminal=True, factory_args={'k': None})\n"
        "pipeline = PipelineConfig(stages=[a])\n"
    )
    loaded = loading.load(file)
    assert (loaded.spec.stages[0].factory_args, loaded.dropped) == ({"k": None}, ())


def test_thousands_of_nulls_are_counted_after_the_first_ones() -> None:
    many = ", ".join(f"k{index}: null" for index in range(1000))
    text = f"stages: [{{name: a, process: a, factory: 'w:m', terminal: true, factory_args: {{{many}}}}}]"
    dropped = loading.loads(text).dropped
    assert len(dropped) == nulls.SHOWN + 1
    assert str(dropped[-1]) == f"{1000 - nulls.SHOWN} more null entries are dropped"

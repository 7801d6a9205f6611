"""One pipeline in every form that people write: the resource, plain files, Python values, classes with defaults.

A pipeline is planned as it was written, whichever form it has, and however it is shared out between a class, a file and
the command line.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import writing
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.resource import API_VERSION, KIND
from omnipipeline_spec.types.values import extra_of, fields_of, is_list, to_document, without_none
from omnipipeline_spec.validation import topology
from tests import valid_specs
from tests.thoroughness import examples

#: Examples are not shrunk: an example that fails is read as it is, and found again in seconds.
SETTINGS = settings(
    deadline=None,
    max_examples=examples(25),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
IMPORTS = "from omnipipeline_spec.pipeline import *\nfrom omnipipeline_spec.cluster import *\nfrom typing import Any\n"


def of_resource(document: valid_specs.Document) -> PipelineConfig:
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p"}, "spec": document}
    return loading.from_resource(resource).spec


def said_by(spec: PipelineConfig) -> valid_specs.Document:
    """The document of a resource with that spec."""
    return {key: held for key, held in to_document(spec).items() if key not in ("configCls", "name")}


def planned(spec: PipelineConfig) -> PipelinePlan:
    return planning.plan(spec, name="p")


def in_python(value: Any, kind: inspect.Type) -> str:
    """The expression that makes the value: ``StageConfig(name='a', ...)``."""
    inner = without_none(kind)
    if isinstance(inner, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field for field in fields_of(inner.cls)}
        given = [f"{fields[key].name}={in_python(held, fields[key].type)}" for key, held in value.items()]
        return f"{inner.cls.__name__}({', '.join(given)})"
    if is_list(inner) and isinstance(value, list):
        return f"[{', '.join(in_python(item, inner.item_type) for item in value)}]"  # type: ignore[attr-defined]
    return repr(value)


def field_in_python(document: valid_specs.Document, key: str) -> tuple[str, str]:
    """Name and expression of one field of the pipeline."""
    field = next(each for each in fields_of(PipelineConfig) if each.encode_name == key)
    return field.name, in_python(document[key], field.type)


def plain(value: Any, kind: inspect.Type, spelling: st.DataObject) -> Any:
    """The value as people write plain files: either spelling of each field, lone values where they may stand."""
    inner = without_none(kind)
    if isinstance(inner, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field for field in fields_of(inner.cls)}
        return {
            fields[key].name if spelling.draw(st.booleans()) else key: plain(held, fields[key].type, spelling)
            for key, held in value.items()
        }
    if is_list(inner) and isinstance(value, list):
        if "scalar" in extra_of(kind) and len(value) == 1 and spelling.draw(st.booleans()):
            return value[0]
        return [plain(item, inner.item_type, spelling) for item in value]  # type: ignore[attr-defined]
    return value


FOLDERS = itertools.count()


class Folder:
    """Files of one example; each has a name of its own, for modules are remembered by name."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._number = next(FOLDERS)

    def write(self, text: str, suffix: str, stem: str = "pipeline") -> Path:
        file = self._root / f"{stem}{self._number}{suffix}"
        file.write_text(text)
        return file


@pytest.mark.proves("every-form")
@SETTINGS
@given(valid_specs.documents(), st.data())
def test_what_was_written_is_planned_the_same_in_every_form(
    document: valid_specs.Document, data: st.DataObject
) -> None:
    spec = of_resource(document)
    written = said_by(spec)
    wanted = planned(spec)
    assert planned(of_resource(written)) == wanted
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root)
        arguments = ", ".join("=".join(field_in_python(written, key)) for key in written)
        python = folder.write(f"{IMPORTS}pipeline = PipelineConfig({arguments})\n", ".py")
        spelt = plain(written, inspect.type_info(PipelineConfig), data)
        yaml = folder.write(writing.to_yaml(spelt), ".yaml")
        for file in (python, yaml):
            loaded = loading.load(file)
            assert planned(loaded.spec) == wanted
            assert planned(loading.loads(writing.convert(loaded.spec, name="p")).spec) == wanted


@pytest.mark.proves("every-form")
@SETTINGS
@given(valid_specs.documents(), valid_specs.documents(), st.data())
def test_an_instance_has_its_own_values_and_its_class_s_for_the_rest(
    document: valid_specs.Document, others: valid_specs.Document, data: st.DataObject
) -> None:
    """The class says the fields of one pipeline and the instance those of another, any of which both may say."""
    own, of_class = said_by(of_resource(document)), said_by(of_resource(others))
    # A value that depends on the stages comes from where the stages come from.
    of_class = {key: of_class[key] for key in of_class if key in DEFAULTS}
    inherited = data.draw(st.sets(st.sampled_from(sorted(own))))
    defaults = {**of_class, **{key: own[key] for key in inherited}}
    written = {key: held for key, held in own.items() if key not in inherited or data.draw(st.booleans())}
    cleared = {key: DEFAULTS[key] for key in set(defaults) - set(own) if data.draw(st.booleans())}
    wanted = planned(of_resource({key: held for key, held in {**defaults, **written}.items() if key not in cleared}))
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root)
        body = [": Any = ".join(field_in_python(defaults, key)) for key in defaults] or ["pass"]
        lines = [f"{IMPORTS}class Mine(PipelineConfig):", *(f"    {line}" for line in body)]
        arguments = ["=".join(field_in_python(written, key)) for key in written]
        arguments += [f"{name}={default!r}" for name, default in cleared.values()]
        module = folder.write("\n".join([*lines, f"pipeline = Mine({', '.join(arguments)})", ""]), ".py", "family")
        loaded = loading.load(module)
        assert planned(loaded.spec) == wanted
        assert planned(loading.loads(writing.convert(loaded.spec, name="p")).spec) == wanted
        assert loaded.spec.config_cls == f"{module.stem}:Mine"


@SETTINGS
@given(valid_specs.documents(), st.data())
def test_a_file_that_starts_from_a_class_needs_to_say_only_the_rest(
    document: valid_specs.Document, data: st.DataObject
) -> None:
    own = said_by(of_resource(document))
    inherited = data.draw(st.sets(st.sampled_from(sorted(own))))
    again = {key for key in inherited if data.draw(st.booleans())}
    rest = {key: held for key, held in own.items() if key not in inherited or key in again}
    rest |= {key: None for key in inherited - again if data.draw(st.booleans())}
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root)
        body = [": Any = ".join(field_in_python(own, key)) for key in sorted(inherited)] or ["pass"]
        module = folder.write(
            "\n".join([f"{IMPORTS}class Mine(PipelineConfig):", *(f"    {line}" for line in body), ""]), ".py", "family"
        )
        yaml = folder.write(writing.to_yaml({"config_cls": f"{module.stem}:Mine", **rest}), ".yaml")
        assert planned(loading.load(yaml).spec) == planned(of_resource(own))


@SETTINGS
@given(valid_specs.documents(), st.data())
def test_none_in_python_reaches_the_factory_wherever_it_stands(
    document: valid_specs.Document, data: st.DataObject
) -> None:
    spec = of_resource(document)
    arguments = {stage.name: data.draw(valid_specs.FREE) for stage in spec.stages}
    stages = [msgspec.structs.replace(stage, factory_args=arguments[stage.name]) for stage in spec.stages]
    spec = msgspec.structs.replace(spec, stages=stages, runtime_overrides={})
    plan = planned(spec)
    assert planned(topology.check(spec)) == plan
    given = {stage.name: stage.factory_args for unit in plan.units for stage in unit.stages}
    assert given == arguments
    overridden = msgspec.structs.replace(
        spec,
        stages=[msgspec.structs.replace(stage, factory_args={}) for stage in stages],
        runtime_overrides=arguments,
    )
    assert planned(overridden).units == plan.units


#: Fields whose values do not depend on which stages there are -> (Python name, what says nothing there).
DEFAULTS: dict[str, tuple[str, Any]] = {
    "modelPath": ("model_path", None),
    "serves": ("serves", []),
    "accepts": ("accepts", []),
    "relayBackend": ("relay_backend", "auto"),
    "envDefaults": ("env_defaults", {}),
    "env": ("env", []),
    "networkPolicy": ("network_policy", None),
    "restartedAt": ("restarted_at", None),
    "code": ("code", None),
}

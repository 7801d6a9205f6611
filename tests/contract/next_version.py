"""A second version of the resource, for tests: ``v1beta1`` as a breaking change would make it.

It renames a field (``modelPath`` is ``model``), moves one (``stages[].tpSize`` is ``stages[].parallelism.tensor``),
takes other values of one (``rollout.strategy`` has no ``Recreate`` and has ``Surge``; each version reads the other's as
``Coherent``), lacks one (``restartedAt``), and has one of its own (``description``). Here: its steps and its schema.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from omnipipeline_spec.conversion.versions import Document, Spoke, Versions
from omnipipeline_spec.generating import schema
from omnipipeline_spec.generating.schema import ServedVersion
from omnipipeline_spec.types.resource import VERSION

NAME = "v1beta1"
HUB = VERSION


def from_hub(document: Document) -> Document:
    return _spec(document, _spec_from_hub)


def to_hub(document: Document) -> Document:
    return _spec(document, _spec_to_hub)


VERSIONS = Versions(spokes={NAME: Spoke(to_hub=to_hub, from_hub=from_hub)})


def served() -> ServedVersion:
    """It in the CRD: the schema of the hub with the same changes."""
    own = schema.own_version()
    root = copy.deepcopy(dict(own.schema))
    spec = root["properties"]["spec"]
    fields = spec["properties"]
    fields["model"] = fields.pop("modelPath")
    fields.pop("restartedAt")
    fields["description"] = {"type": "string", "maxLength": 256}
    fields["rollout"]["properties"]["strategy"]["enum"] = ["Coherent", "Surge"]
    stage = fields["stages"]["items"]
    size = stage["properties"].pop("tpSize")
    stage["properties"]["parallelism"] = {
        "type": "object",
        "properties": {"tensor": size},
        "default": {"tensor": size["default"]},
    }
    rules = [each for each in spec["x-kubernetes-validations"] if "tpSize" not in each["rule"]]
    spec["x-kubernetes-validations"] = [each for each in rules if "modelPath" not in each["rule"]]
    stage["x-kubernetes-validations"] = [
        each for each in stage["x-kubernetes-validations"] if "tpSize" not in each["rule"]
    ]
    columns = [
        {**each, "jsonPath": ".spec.model"} if each["jsonPath"] == ".spec.modelPath" else each for each in own.columns
    ]
    return ServedVersion(name=NAME, schema=root, columns=columns)


def _spec(document: Document, change: Callable[[Mapping[str, Any]], Document]) -> Document:
    spec = document.get("spec")
    return {**document, "spec": change(spec)} if isinstance(spec, Mapping) else document


def _spec_from_hub(spec: Mapping[str, Any]) -> Document:
    made = {key: value for key, value in spec.items() if key not in ("modelPath", "restartedAt")}
    if "modelPath" in spec:
        made["model"] = spec["modelPath"]
    return _stages(_strategy(made, {"Recreate": "Coherent"}), _stage_from_hub)


def _spec_to_hub(spec: Mapping[str, Any]) -> Document:
    made = {key: value for key, value in spec.items() if key not in ("model", "description")}
    if "model" in spec:
        made["modelPath"] = spec["model"]
    return _stages(_strategy(made, {"Surge": "Coherent"}), _stage_to_hub)


def _strategy(spec: dict[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    rollout = spec.get("rollout")
    if isinstance(rollout, Mapping) and rollout.get("strategy") in words:
        return {**spec, "rollout": {**rollout, "strategy": words[rollout["strategy"]]}}
    return spec


def _stages(spec: dict[str, Any], change: Callable[[Mapping[str, Any]], Document]) -> Document:
    if isinstance(stages := spec.get("stages"), list):
        return {**spec, "stages": [change(each) if isinstance(each, Mapping) else each for each in stages]}
    return spec


def _stage_from_hub(stage: Mapping[str, Any]) -> Document:
    if "tpSize" not in stage:
        return stage
    made = {key: value for key, value in stage.items() if key != "tpSize"}
    return {**made, "parallelism": {"tensor": stage["tpSize"]}}


def _stage_to_hub(stage: Mapping[str, Any]) -> Document:
    size = (stage.get("parallelism") or {}).get("tensor")
    made = {key: value for key, value in stage.items() if key != "parallelism"}
    return made if size is None else {**made, "tpSize": size}

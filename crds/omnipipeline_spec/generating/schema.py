"""The CRD, generated from the types. It writes crds/omnipipelines.yaml as a program.

Here: types -> structural OpenAPI schema, with descriptions, defaults, bounds, list types and the rules of `celrules`;
columns, names and the status subresource. Not here: any field (`pipeline`, `cluster`, `status`). Called by ``make
crds`` and by a test that compares. Never edit the YAML. v1alpha1's defaults are frozen: a changed CRD default rewrites
stored objects without an event; new defaults belong in the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from omnipipeline_spec.generating import celrules
from omnipipeline_spec.generating.celrules import Rule
from omnipipeline_spec.generating.writing import to_yaml
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.quantities import FORMS
from omnipipeline_spec.types.resource import GROUP, KIND, PLURAL, VERSION
from omnipipeline_spec.types.status import PipelineStatus
from omnipipeline_spec.types.values import (
    default_of,
    extra_of,
    fields_of,
    is_list,
    is_optional,
    may_be_empty,
    unwrap,
    without_none,
)

PATH: Final = Path(__file__).resolve().parents[2] / f"{PLURAL}.yaml"
#: Status of a pipeline that no operator has reconciled yet. The API server sets it, as a default.
UNSEEN: Final[dict[str, Any]] = {
    "conditions": [
        {
            "type": kind,
            "status": "Unknown",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
            "reason": "NoOperatorYet",
            "message": "no operator has reconciled this pipeline yet; check that one watches its namespace",
        }
        for kind in ("Accepted", "Ready")
    ]
}
HEADER: Final = "# Generated from crds/omnipipeline_spec by `make crds`; never edited.\n"


class ServedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version beside the one of the types: its schema and its columns, written once and frozen."""

    name: str
    schema: Mapping[str, Any]
    columns: Sequence[Mapping[str, Any]]


def crd(others: Sequence[ServedVersion] = (), *, storage: str = VERSION) -> dict[str, Any]:
    """The CustomResourceDefinition as plain values.

    others:  served beside the version of the types; `omnipipeline_spec.conversion` has to convert them.
    storage: the version that is written to etcd, one of all these.
    """
    versions = (own_version(), *others)
    if storage not in [each.name for each in versions]:
        raise ValueError(f"storage: {storage!r} is not a served version")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["omni", "opl"],
                "categories": ["all", "omni"],
            },
            "versions": [_version(each, storage) for each in versions],
        },
    }


def render() -> str:
    """The CRD as the file holds it."""
    return HEADER + to_yaml(crd(), compact=True)


def own_version() -> ServedVersion:
    """The version of the types."""
    return ServedVersion(name=VERSION, schema=_root(), columns=_columns())


def _version(version: ServedVersion, storage: str) -> dict[str, Any]:
    return {
        "name": version.name,
        "served": True,
        "storage": version.name == storage,
        "subresources": {"status": {}},
        "additionalPrinterColumns": version.columns,
        "schema": {"openAPIV3Schema": version.schema},
    }


def _columns() -> list[dict[str, Any]]:
    ready, available = (f'.status.conditions[?(@.type=="{kind}")]' for kind in ("Ready", "Available"))
    columns: Sequence[tuple[str, str, str, int]] = (
        ("Ready", "string", f"{ready}.status", 0),
        ("Reason", "string", f"{ready}.reason", 0),
        ("Stages", "string", ".status.stagesReady", 0),
        ("GPUs", "integer", ".status.gpus.requested", 0),
        ("Model", "string", ".spec.modelPath", 0),
        ("URL", "string", ".status.endpoint.url", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Available", "string", f"{available}.status", 1),
        ("Revision", "string", ".status.revision.current", 1),
        ("Message", "string", f"{ready}.message", 1),
    )
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in columns
    ]


def _root() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "A pipeline of stages that serves a model, as one resource.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                "description": "The stages of the pipeline, and how they run on a cluster.",
                **_struct(PipelineConfig),
            },
            "status": {
                "description": "State of the pipeline, as the operator last observed it.",
                **_struct(PipelineStatus),
                "default": UNSEEN,
            },
        },
        "x-kubernetes-validations": [_rule(rule) for rule in celrules.ROOT],
    }


def _struct(struct: type[msgspec.Struct]) -> dict[str, Any]:
    fields = [field for field in fields_of(struct) if "outside_resource" not in extra_of(field.type)]
    required = [field.encode_name for field in fields if field.required]
    rules = [_rule(rule) for rule in celrules.RULES.get(struct, ())]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        "properties": {field.encode_name: _field(field) for field in fields},
        **({"x-kubernetes-validations": rules} if rules else {}),
    }


def _field(field: inspect.Field) -> dict[str, Any]:
    optional = is_optional(unwrap(field.type)[0])
    schema = {"description": description_of(field), **_type(without_none(field.type), extra_of(field.type))}
    pattern = schema.get("pattern")
    if optional and pattern and may_be_empty(field.type):
        schema["pattern"] = f"^$|{pattern}"  # templates write "" for unset; `shapes` accepts it
    default = None if field.required else default_of(field)
    if isinstance(default, bool | int | float | str) and default:
        schema["default"] = default
    return schema


def description_of(field: inspect.Field) -> str:
    """The description in the field's annotation."""
    kind = field.type
    found = ""
    while isinstance(kind, inspect.Metadata):
        found = (kind.extra_json_schema or {}).get("description", found)
        kind = kind.type
    return found


def _type(kind: inspect.Type, extra: dict[str, Any]) -> dict[str, Any]:
    if is_list(kind):
        return _list(kind, extra)
    match kind:
        case inspect.StructType():
            return _struct(kind.cls)
        case inspect.DictType():
            return _map(kind)
        case inspect.StrType() if "quantity" in extra:
            either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
            return either | _bounds(kind.max_length, "maxLength") | {"pattern": kind.pattern}
        case inspect.StrType():
            form = {"pattern": kind.pattern} if kind.pattern else {}
            form |= {"format": extra["format"]} if "format" in extra else {}
            return {"type": "string", **_bounds(kind.max_length, "maxLength"), **form}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            return {"type": "integer", "format": "int64", **_range(kind)}
        case inspect.FloatType():
            return {"type": "number", **_range(kind)}
        case inspect.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
    raise TypeError(f"{kind} has no place in a structural schema")


def _list(kind: Any, extra: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "array",
        **_bounds(kind.min_length, "minItems"),
        **_bounds(kind.max_length, "maxItems"),
        "items": _type(without_none(kind.item_type), extra_of(kind.item_type)),
    }
    if "map_key" in extra:
        return schema | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [extra["map_key"]]}
    return schema | {"x-kubernetes-list-type": "set" if "unique" in extra else "atomic"}


def _map(kind: inspect.DictType) -> dict[str, Any]:
    value = without_none(kind.value_type)
    bounds = _bounds(kind.max_length, "maxProperties")
    if isinstance(value, inspect.AnyType):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, **bounds}
    return {"type": "object", "additionalProperties": _type(value, extra_of(kind.value_type)), **bounds, **_keys(kind)}


def _keys(kind: inspect.DictType) -> dict[str, Any]:
    """The rule for the names in a map: a structural schema has a pattern for values alone."""
    pattern = getattr(without_none(kind.key_type), "pattern", None)
    if not isinstance(pattern, str) or pattern not in FORMS:
        return {}
    rule = Rule(rule=f"self.all(k, k.matches('{pattern}'))", message=f"each key must be {FORMS[pattern]}")
    return {"x-kubernetes-validations": [_rule(rule)]}


def _range(kind: inspect.IntType | inspect.FloatType) -> dict[str, Any]:
    lower = {"minimum": kind.gt, "exclusiveMinimum": True} if kind.gt is not None else _bounds(kind.ge, "minimum")
    return lower | _bounds(kind.le, "maximum")


def _bounds(value: float | None, name: str) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _rule(rule: Rule) -> dict[str, Any]:
    if not rule.names_stage:
        return {"rule": rule.rule, "message": rule.message}
    return {
        "rule": rule.rule,
        "message": f"a stage {rule.message}",
        "messageExpression": f"'stage ' + self.name + ' {rule.message}'",
    }


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
    print(f"wrote {PATH}")

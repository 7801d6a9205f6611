"""The generated files are those of the types, and the CRD says what kubectl users look for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import omnipipeline_spec
from omnipipeline_spec.generating import reference, schema
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.status import PipelineStatus
from omnipipeline_spec.types.values import extra_of, fields_of, is_list, without_none


def test_the_crd_is_fresh() -> None:
    assert schema.PATH.read_text(encoding="utf-8") == schema.render(), "run `make crds`"


def test_the_config_reference_is_fresh() -> None:
    assert reference.PATH.read_text(encoding="utf-8") == reference.render(), "run `make crds`"


def test_the_crd_is_small_enough_to_be_applied_and_annotated() -> None:
    """`kubectl apply` keeps it in an annotation, and a resource's annotations have at most 256 KiB."""
    assert len(schema.render().encode()) < 92 * 1024


def test_names_categories_and_columns() -> None:
    spec = schema.crd()["spec"]
    assert spec["group"] == "omnipipeline.dev" and spec["scope"] == "Namespaced"
    assert spec["names"] == {
        "kind": "OmniPipeline",
        "listKind": "OmniPipelineList",
        "plural": "omnipipelines",
        "singular": "omnipipeline",
        "shortNames": ["omni", "opl"],
        "categories": ["all", "omni"],
    }
    (version,) = spec["versions"]
    assert version["subresources"] == {"status": {}}
    shown = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    wide = [column["name"] for column in version["additionalPrinterColumns"] if column.get("priority")]
    assert shown == ["Ready", "Reason", "Stages", "GPUs", "Model", "URL", "Age"]
    assert wide == ["Available", "Revision", "Message"]


def nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}.*")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def spec_schema() -> dict[str, Any]:
    root: dict[str, Any] = schema.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: dict[str, Any] = root["properties"]["spec"]
    return found


def test_everything_has_a_bound_or_the_cost_of_rules_could_not_be_estimated() -> None:
    unbounded = [
        path
        for path, node in nodes(spec_schema())
        if (node.get("type") == "array" and "maxItems" not in node)
        or (node.get("type") == "string" and not node.keys() & {"maxLength", "enum"})
        or ("additionalProperties" in node and "maxProperties" not in node)
    ]
    assert unbounded == []


def test_every_field_is_described() -> None:
    assert [
        path for path, node in nodes(spec_schema()) if path and path[-1] not in "]*" and not node.get("description")
    ] == []


def test_each_list_says_how_it_is_merged() -> None:
    kinds = {path: node["x-kubernetes-list-type"] for path, node in nodes(spec_schema()) if node.get("type") == "array"}
    assert {kinds[path] for path in (".stages", ".processGroups", ".env")} == {"map"}
    assert {kinds[f".stages[].{field}"] for field in ("next", "waitFor", "streamTo", "gpu")} == {"set"}


def test_rules_that_need_a_default_have_it() -> None:
    defaults = {path: node["default"] for path, node in nodes(spec_schema()) if "default" in node}
    assert defaults[".stages[].tpSize"] == 1
    assert defaults[".gpuMemoryLimit"] == 0.95
    assert defaults[".coordinator.http.port"] == 8000
    assert defaults[".control.deadAfterSeconds"] == 3


def test_every_default_of_the_crd_is_the_default_of_the_type() -> None:
    for path, node in nodes(spec_schema()):
        if "default" in node:
            kind = node["type"] if "type" in node else "string"
            wanted = {"integer": int, "number": int | float, "boolean": bool, "string": str}[kind]
            assert isinstance(node["default"], wanted), path


@pytest.mark.parametrize("struct", [PipelineConfig, PipelineStatus])
def test_every_field_of_the_types_is_in_the_crd(struct: type[msgspec.Struct]) -> None:
    root = schema.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    in_crd = {path for path, _ in nodes(root["spec" if struct is PipelineConfig else "status"])}
    assert set(field_paths(struct)) - in_crd == set()


def field_paths(struct: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    for field in fields_of(struct):
        if "outside_resource" in extra_of(field.type):
            continue
        place, kind = f"{path}.{field.encode_name}", without_none(field.type)
        yield place
        while is_list(kind):
            place, kind = f"{place}[]", without_none(kind.item_type)  # type: ignore[attr-defined]
        if isinstance(kind, msgspec.inspect.StructType):
            yield from field_paths(kind.cls, place)


#: Only the command lines import these two.
_OF_COMMANDS = {"consoles.py": {"rich"}, "terminal.py": {"click"}}


def test_the_contract_needs_the_standard_library_msgspec_and_yaml_alone() -> None:
    folder = Path(omnipipeline_spec.__file__).parent
    allowed = {*sys.stdlib_module_names, "msgspec", "yaml", "omnipipeline_spec"}
    for source in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed | _OF_COMMANDS.get(source.name, set()), (
                source.name
            )

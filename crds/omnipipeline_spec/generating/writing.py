"""A spec as the resource's YAML, from which kubectl reads exactly the same values.

Here: the resource as plain values, and its YAML. Not here: reading (`loading`, `goyaml`). Called by ``omni convert``
and by the tools that make manifests. Strings that Go would read as another type (``y``, ``1e3``, ``0o17``) are quoted;
PyYAML alone would not quote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from omnipipeline_spec.loading import goyaml
from omnipipeline_spec.pipeline import PipelineConfig, class_name
from omnipipeline_spec.types.canonical import join
from omnipipeline_spec.types.errors import Fault, InvalidPipeline
from omnipipeline_spec.types.quantities import pipeline_slug
from omnipipeline_spec.types.resource import API_VERSION, CLASS_ANNOTATION, KIND
from omnipipeline_spec.types.values import extra_of, fields_of, to_document
from omnipipeline_spec.validation import topology


def resource(spec: PipelineConfig, *, name: str | None = None, metadata: Mapping[str, Any] | None = None) -> Any:
    """The resource as plain values: camelCase, without defaults, with a valid name.

    Raises: InvalidPipeline: a free-form value holds None in a map.
    """
    outside = {field.encode_name for field in fields_of(PipelineConfig) if "outside_resource" in extra_of(field.type)}
    document = {key: value for key, value in to_document(spec).items() if key not in outside}
    nulls = [Fault(path=path, message=_NULL) for path in _nulls(document, "")]
    if nulls:
        raise InvalidPipeline(nulls)
    named = {**(metadata or {}), "name": pipeline_slug(name or spec.name or "pipeline")}
    if spec.config_cls and spec.config_cls != class_name(PipelineConfig):
        named["annotations"] = {**(named.get("annotations") or {}), CLASS_ANNOTATION: spec.config_cls}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": document}


def convert(spec: PipelineConfig, *, name: str | None = None) -> str:
    """The resource as YAML.

    Raises: InvalidPipeline: the spec is invalid.
    """
    return to_yaml(resource(topology.check(spec), name=name))


_NULL: Final = "is None, which a resource cannot hold: kubectl drops such an entry; leave it out or give it a value"


def _nulls(value: Any, place: str) -> Iterator[str]:
    """Paths of the entries of maps that are None."""
    if isinstance(value, dict):
        for key, item in value.items():
            inner = join(place, str(key))
            yield from [inner] if item is None else _nulls(item, inner)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nulls(item, f"{place}[{index}]")


def to_yaml(value: Any, *, compact: bool = False) -> str:
    """YAML that Go reads as the same values; keys in the order given. ``compact``: innermost maps take one line."""
    style = None if compact else False
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=160 if compact else 120,
        default_flow_style=style,
    )
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists stand indented below their key


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    plain = all(isinstance(item, str | int | float | bool) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True if plain else None)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and text.replace("\n", "").isprintable():
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    if not text.isprintable():  # only between double quotes there are escapes; U+0085 and U+2028 are line breaks
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _stays(text) else "'")


def _stays(text: str) -> bool:
    try:
        return goyaml.scalar(text) == text
    except ValueError:
        return False


_Dumper.add_representer(str, _string)
_Dumper.add_representer(list, _list)

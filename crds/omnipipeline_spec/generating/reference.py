"""The config reference, generated from the types. It writes docs/config.md as a program.

Here: one table per type, in the order of the spec, and the text around them. Not here: any field. Called by ``make
crds`` and by a test that compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from omnipipeline_spec.generating import celrules
from omnipipeline_spec.generating.schema import description_of
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import quantities, resource
from omnipipeline_spec.types.status import PipelineStatus
from omnipipeline_spec.types.values import default_of, extra_of, fields_of, is_list, to_document, without_none

PATH: Final = Path(__file__).resolve().parents[3] / "docs" / "config.md"

_HEAD: Final = """\
<!-- Generated from crds/omnipipeline_spec by `make crds`; never edited. -->
# Config reference

One file describes a pipeline, on a laptop (`omni up -f`) and on a cluster (`kubectl apply -f`):

```yaml
apiVersion: API_VERSION
kind: KIND
metadata: {name: hello}
spec:
  stages:
  - {name: split, process: front, factory: "hello:split", next: [shout], streamTo: [shout]}
  - {name: shout, process: voice, factory: "hello:shout", terminal: true}
```

## Three ways to write it

- **The resource**, as above. Keys in camelCase, lists as lists.
- **A plain YAML**: the content of `spec` above, without the rest, in camelCase or snake_case. `next`, `waitFor`,
  `streamTo` and `gpu` may be one value: `next: thinker`. The pipeline's name is `name`, else derived from `modelPath`.
- **Python**: a module-level `PipelineConfig(...)` in snake_case. `omni up -f pipeline.py`, or `pipeline.py:name` when
  there are several. [python-pipelines.md](python-pipelines.md) shows it, and classes that carry defaults.

`omni convert` prints any of them as the resource. The command line overrides the file: `--set
stages.thinker.factoryArgs.x=1`, `--set stages[2].gpu=0`, `--set stages.*.relay.credits=4` (a path to one stage takes
precedence over a path to all of them). A value that is set twice is refused. `--set path=null` removes the file's.

A subclass of `PipelineConfig` may have defaults of its own. An instance has the values that it sets, and its class's
for the others. A plain file names a class with `config_cls: package.module:Class`, and is merged over its defaults:
stages, process groups and variables by name, maps by key; any other value replaces the class's. A class that is not
found is refused with the nearest name. `configCls` is refused in a resource, and the operator imports nothing. `omni
convert` prints all values; the annotation `omnipipeline.dev/config-cls` says from which class they came.

An unknown key is refused, with the nearest known one; so is a duplicate key. The API server drops unknown keys unless
the client asks for strict validation: `kubectl apply` does, other clients may not.

## What YAML means

Scalars are read as kubectl reads them, so a file gives the same plan on a laptop and on a cluster: `yes`, `no`, `on`,
`off`, `y` and `n` are booleans, `0o17` and `017` are 15, `1e3` is the integer 1000, dates and `12:30:45` are strings,
`1.0` is 1. Integers beyond 64 bits are refused. A null entry of a map counts as absent, also inside `factoryArgs` and
over a class's default: `kubectl apply` would drop it. `omni up`, `validate`, `plan` and `convert` warn of each with its
line. Leave it out where the default is meant, else write a value that the factory takes for none (`false`, `"none"`).
Only in Python None is a value: `factory_args={"x": None}` and `runtime_overrides={"stage": {"x": None}}` give the
factory None. `omni convert` refuses such a pipeline with the path, because no resource can hold it. Quotes make
any scalar a string.

"""


def render() -> str:
    """The reference as the file holds it."""
    head = _HEAD.replace("API_VERSION", resource.API_VERSION).replace("KIND", resource.KIND)
    return "".join([head, *_section("spec", PipelineConfig), *_rules(), *_section("status", PipelineStatus)])


def _section(path: str, struct: type[msgspec.Struct]) -> Iterator[str]:
    """A type's table, then those of the types in it."""
    yield f"## `{path}`\n\n{_sentence(struct)}\n\n"
    yield "| field | Python | type | default | |\n|---|---|---|---|---|\n"
    for field in fields_of(struct):
        yield _row(field)
    yield "\n"
    for field in fields_of(struct):
        inner, step = _inside(field)
        if inner is not None:
            yield from _section(f"{path}.{field.encode_name}{step}", inner)


def _sentence(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").strip().partition("\n")[0]


def _inside(field: inspect.Field) -> tuple[type[msgspec.Struct] | None, str]:
    kind, step = without_none(field.type), ""
    while is_list(kind):
        kind, step = without_none(getattr(kind, "item_type", inspect.AnyType())), f"{step}[]"
    return (kind.cls, step) if isinstance(kind, inspect.StructType) else (None, "")


def _row(field: inspect.Field) -> str:
    name = f"`{field.encode_name}`"
    if "outside_resource" in extra_of(field.type):
        name += " (not in the resource)"
    python = "" if field.name == field.encode_name else f"`{field.name}`"
    description = description_of(field).replace("|", "\\|")
    kind = _type(without_none(field.type), extra_of(field.type))
    return f"| {name} | {python} | {kind} | {_default(field)} | {description} |\n"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "**required**"
    default = to_document(default_of(field))
    return "" if default in (None, [], {}) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(kind: inspect.Type, extra: dict[str, Any]) -> str:
    if is_list(kind):
        inner = _type(without_none(getattr(kind, "item_type", inspect.AnyType())), {})
        single = " (or one)" if "scalar" in extra else ""
        most = getattr(kind, "max_length", None)
        return f"list of {inner}{f', at most {most}' if most else ''}{single}"
    match kind:
        case inspect.StructType():
            return "object"
        case inspect.DictType():
            value = without_none(kind.value_type)
            return "map" if isinstance(value, inspect.AnyType) else f"map of {_type(value, extra_of(kind.value_type))}"
        case inspect.StrType() if "quantity" in extra or kind.pattern == quantities.QUANTITY_PATTERN:
            return "quantity"
        case inspect.StrType() if kind.pattern == quantities.FUNCTION_PATTERN:
            return "function"
        case inspect.StrType() if kind.pattern == quantities.NAME_PATTERN:
            return "name"
        case inspect.StrType():
            return "string"
        case inspect.BoolType():
            return "boolean"
        case inspect.IntType():
            return f"integer{_range(kind)}"
        case inspect.FloatType():
            return f"number{_range(kind)}"
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
    raise TypeError(f"{kind} has no name in the reference")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f"> {kind.gt:g}" if kind.gt is not None else f"≥ {kind.ge}" if kind.ge is not None else ""
    high = f"≤ {kind.le}" if kind.le is not None else ""
    return f" {', '.join(bound for bound in (low, high) if bound)}" if low or high else ""


def _rules() -> Iterator[str]:
    yield "## What the API server refuses\n\n"
    yield (
        "The API server checks these in addition to types and bounds, before it stores a pipeline. `omni validate` "
        "reports these and more.\n\n"
    )
    for struct, rules in celrules.RULES.items():
        for rule in rules:
            where = "a stage " if rule.names_stage else ""
            of = "" if rule.names_stage or struct is PipelineConfig else f"`{struct.__name__}`: "
            yield f"- {of}{where}{rule.message}\n"
    yield from (f"- {rule.message}\n" for rule in celrules.ROOT)
    yield "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
    print(f"wrote {PATH}")

"""``--set path=value``: which values of a document a path selects, and setting them.

Here: parsing of paths (``stages.thinker.factoryArgs.x``, ``stages[2].gpu``, ``stages.*.relay.credits``, either
spelling of a field, quoted keys in brackets) and their application. Not here: files (`reading`), validation of the
result (`shapes`). A path that names one stage takes precedence over one that selects all of them, in any order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

from omnipipeline_spec.loading import goyaml, layering, nulls
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.canonical import MAX_LEVELS, join
from omnipipeline_spec.types.errors import Fault, InvalidPipeline, UnreadableSpec, quoted
from omnipipeline_spec.types.values import extra_of, fields_of, is_list, type_of, without_none
from omnipipeline_spec.validation import shapes

EVERY: Final = "*"
_STEP: Final = re.compile(r"""\.?(?:([^.\[\]'"=]+)|\[([0-9]{1,9})\]|\[(?:'([^']*)'|"([^"]*)")\])""")


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """One value that a path selects."""

    holder: Any  #: The map or list that contains it.
    key: str | int
    path: str
    kind: inspect.Type | None  #: None inside free-form values.


class _Override(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    path: str
    value: str

    @property
    def label(self) -> str:
        return f"--set {self.text}"

    @property
    def steps(self) -> tuple[str | int, ...]:
        return _steps(self.path, self.label)

    @property
    def broad(self) -> bool:
        return EVERY in self.steps


def apply(
    document: dict[str, Any], given: Sequence[str], sources: layering.Sources, dropped: list[Fault]
) -> dict[str, Any]:
    """A copy of the document with all overrides applied; records them as sources, and what they drop.

    dropped: gets a warning for each null entry inside a value that is set. A null itself removes what is there.
    Raises: InvalidPipeline: paths that select nothing, values that are set twice; all of them at once.
    """
    result: dict[str, Any] = copy.deepcopy(document)
    faults: list[Fault] = []
    written: dict[tuple[str, bool], str] = {}
    for override in sorted(map(_parsed, given), key=lambda each: (not each.broad, len(each.steps))):
        try:
            for place in list(_places(override.steps, result)):
                twin = written.setdefault((place.path, override.broad), override.text)
                if twin != override.text or given.count(override.text) > 1:
                    message = f"is set twice: --set {twin} and --set {override.text}"
                    faults.append(Fault(path=place.path, message=message))
                _put(place, override, sources, dropped)
        except _NowhereError as error:
            faults.append(Fault(path=override.path, message=f"{override.label}: {error}"))
    if faults:
        raise InvalidPipeline(dict.fromkeys(faults), source="the command line")
    return result


def select(document: dict[str, Any], path: str, label: str) -> tuple[str, ...]:
    """The places that a path names in a complete document, as ``stages[0].gpu``. label: how a message calls the path.

    Raises: UnreadableSpec: it is not a path, or it names nothing.
    """
    try:
        return tuple(place.path for place in _places(_steps(path, label), copy.deepcopy(document)))
    except _NowhereError as error:
        raise UnreadableSpec(f"{label}: {error}") from None


class _NowhereError(Exception):
    """A path that selects nothing; the message has the reason."""


def _parsed(text: str) -> _Override:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise UnreadableSpec(f"--set {text}: write it as path=value, such as stages.thinker.factoryArgs.x=1")
    return _Override(text=text, path=path.strip(), value=value)


def _steps(path: str, label: str) -> tuple[str | int, ...]:
    steps: list[str | int] = []
    end = 0
    for found in _STEP.finditer(path):
        if found.start() != end:
            break
        word, index, *quoted = found.groups()
        steps.append(int(index) if index else word or next((text for text in quoted if text is not None), ""))
        end = found.end()
    if end != len(path):
        raise UnreadableSpec(f"{label}: cannot parse the path from {path[end:]!r} on")
    if len(steps) > MAX_LEVELS:
        raise UnreadableSpec(f"{label[:86]}…: names more than {MAX_LEVELS} levels")
    return tuple(steps)


def _places(steps: Sequence[str | int], document: dict[str, Any]) -> Iterator[_Place]:
    """All values that the path selects; missing maps on the way are created."""
    return _descend(document, type_of(PipelineConfig), steps, "")


def _descend(holder: Any, kind: inspect.Type | None, steps: Sequence[str | int], path: str) -> Iterator[_Place]:
    for key, child_kind, child_path in _step(holder, kind, steps[0], path):
        if len(steps) == 1:
            yield _Place(holder=holder, key=key, path=child_path, kind=child_kind)
            continue
        child = holder.get(key) if isinstance(holder, dict) else holder[key]
        if child is None:
            child = holder[key] = [] if child_kind is not None and is_list(without_none(child_kind)) else {}
        yield from _descend(child, child_kind, steps[1:], child_path)


def _step(
    holder: Any, kind: inspect.Type | None, step: str | int, path: str
) -> list[tuple[str | int, inspect.Type | None, str]]:
    plain = without_none(kind) if kind is not None else None
    if isinstance(holder, list):
        item = getattr(plain, "item_type", None)
        map_key = extra_of(kind).get("map_key") if kind is not None else None
        return [(at, item, f"{path}[{at}]") for at in _indices(holder, step, map_key, path)]
    if not isinstance(holder, dict):
        raise _NowhereError(f"{path} is {quoted(holder)}, which is neither a map nor a list")
    if isinstance(step, int):
        raise _NowhereError(f"{path or 'the spec'} is a map, not a list")
    if isinstance(plain, inspect.StructType):
        fields = {name: field for field in fields_of(plain.cls) for name in (field.name, field.encode_name)}
        if step not in fields:
            near = shapes.nearest(step, [field.encode_name for field in fields_of(plain.cls)])
            raise _NowhereError(
                f"{step!r} is not a key of {path or 'the spec'}" + (f"; did you mean {near}?" if near else "")
            )
        field = fields[step]
        return [(field.encode_name, field.type, join(path, field.encode_name))]
    inner = plain.value_type if isinstance(plain, inspect.DictType) else None
    return [(step, inner, join(path, step))]


def _indices(items: list[Any], step: str | int, map_key: str | None, path: str) -> list[int]:
    if step == EVERY:
        return list(range(len(items)))
    if isinstance(step, int):
        if step >= len(items):
            raise _NowhereError(f"{path} has {len(items)} entries; [{step}] is out of range")
        return [step]
    named = [index for index, item in enumerate(items) if map_key and _name(item, map_key) == step]
    if named or map_key is None:
        return named or _no_name(step, path)
    if path == "stages":
        known = [str(_name(item, map_key)) for item in items]
        near = shapes.nearest(step, known)
        raise _NowhereError(f"{step!r} is not a stage" + (f"; did you mean {near}?" if near else ""))
    items.append({map_key: step})  # settings of a process group that had none
    return [len(items) - 1]


def _name(item: Any, map_key: str) -> Any:
    return item.get(map_key) if isinstance(item, dict) else None  # what is not a map is refused by `shapes`


def _no_name(step: str, path: str) -> list[int]:
    raise _NowhereError(f"{path} is a list: write {path}[0], not {path}.{step}")


def _put(place: _Place, override: _Override, sources: layering.Sources, dropped: list[Fault]) -> None:
    value = _value(place, override, dropped)
    if place.path == "configCls":
        raise _NowhereError("overrides come after the defaults of a class: name the class in the file")
    for path in [path for path in sources if path.startswith((f"{place.path}.", f"{place.path}["))]:
        del sources[path]
    if value is None and isinstance(place.holder, dict):
        place.holder.pop(place.key, None)  # null is unset, as in a file
    else:
        place.holder[place.key] = value
    layering.record(value, sources, lambda _: f"--set {override.text}", place.path, place.path)


def _value(place: _Place, override: _Override, dropped: list[Fault]) -> Any:
    """The text read as YAML; for a string field the text itself: ``modelPath=123`` needs no quotes."""
    read = goyaml.documents(override.value, f"--set {override.text}")
    value = read[0].value if read else None
    kind = inspect.AnyType() if place.kind is None else place.kind
    dropped += [nulls.dropped(path, source=override.label) for path in nulls.places(value, kind, place.path)]
    if place.kind is None:
        return value
    kind = without_none(place.kind)
    if isinstance(kind, inspect.StrType) and isinstance(value, bool | int | float):
        return override.value
    if is_list(kind) and "scalar" in extra_of(place.kind) and isinstance(value, str | int):
        return [value]
    return shapes.respell_value(value, place.kind)

"""A pipeline is planned, or refused with its path, whatever Python value stands anywhere in it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from omnipipeline_spec import loading, planning
from omnipipeline_spec.generating import writing
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.canonical import MAX_LEVELS
from omnipipeline_spec.types.errors import InvalidPipeline
from omnipipeline_spec.types.values import fields_of, is_list, without_none
from omnipipeline_spec.validation import topology
from tests.contract.odd_values import ODD
from tests.contract.test_hostile_yaml import at_most
from tests.thoroughness import crossed, examples

Step = str | type[list[Any]]


def stage(**more: Any) -> StageConfig:
    return StageConfig(**{"name": "a", "process": "a", "factory": "w:m", "terminal": True, **more})


def places(struct: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], inspect.Type]]:
    """Every field of a pipeline, and of what is in it, as names in Python."""
    for field in fields_of(struct):
        yield (*path, field.name), field.type
        kind = without_none(field.type)
        inner = without_none(getattr(kind, "item_type", inspect.AnyType())) if is_list(kind) else kind
        if isinstance(inner, inspect.StructType):
            yield from places(inner.cls, (*path, field.name))


PLACES = dict(places(PipelineConfig))


def pipeline(path: tuple[str, ...], value: Any) -> PipelineConfig:
    """A small pipeline with ``value`` in the field at ``path``."""
    if path[0] == "stages" and len(path) > 1:
        return PipelineConfig(name="p", stages=[stage(**{path[1]: _made(path[:2], path[2:], value)})])
    given = {"name": "p", "stages": [stage()], path[0]: _made(path[:1], path[1:], value)}
    return PipelineConfig(**given)


def _made(path: tuple[str, ...], rest: tuple[str, ...], value: Any) -> Any:
    if not rest:
        return value
    kind = without_none(PLACES[path])
    listed = is_list(kind)
    inner = without_none(getattr(kind, "item_type", inspect.AnyType())) if listed else kind
    assert isinstance(inner, inspect.StructType)
    fields: dict[str, Any] = {field.name: None for field in fields_of(inner.cls) if field.required}
    made = inner.cls(**fields | {rest[0]: _made((*path, rest[0]), rest[1:], value)})
    return [made] if listed else made


WRAPS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in a list": lambda value: [value],
    "in a map": lambda value: {"k": value},
    "in maps of maps": lambda value: {"k": {"l": [value]}},
}


def _loaded(spec: PipelineConfig) -> loading.LoadedPipeline:
    module = types.ModuleType("odd_module")
    module.pipeline = spec  # type: ignore[attr-defined]
    sys.modules["odd_module"] = module
    try:
        return loading.load("odd_module:pipeline")
    finally:
        del sys.modules["odd_module"]


def _planned_or_refused(path: tuple[str, ...], value: Any) -> None:
    spec = pipeline(path, value)
    key = "".join(part.title() for part in path[0].split("_"))
    head = key[0].lower() + key[1:]
    with at_most(20_000_000):
        try:
            plan = planning.plan(spec)
        except InvalidPipeline as error:
            with pytest.raises(InvalidPipeline) as raised:
                _loaded(spec)
            for refused in (error, raised.value):
                str(refused).encode()
                assert any(fault.path.startswith((head, "stages")) for fault in refused.faults), str(refused)
        else:
            msgspec.json.encode(plan)
            loaded = _loaded(spec)
            assert planning.plan(loaded.spec) == plan


@pytest.mark.parametrize(("what", "wrap"), crossed(list(ODD), list(WRAPS)))
def test_an_odd_value_among_the_arguments_of_a_factory_is_planned_or_refused(what: str, wrap: str) -> None:
    _planned_or_refused(("stages", "factory_args"), WRAPS[wrap](ODD[what]()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("code", "inline"), {"m.py": "# caf\udce9\n"}),
        (("code", "inline"), {"\udce9.py": ""}),
        (("name",), "a" * 60 + "\udce9"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_place(path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(InvalidPipeline):
        planning.plan(pipeline(path, value))
    _planned_or_refused(path, value)


@pytest.mark.proves("odd-python-values")
@settings(max_examples=examples(60))
@given(path=st.sampled_from(sorted(PLACES)), what=st.sampled_from(sorted(ODD)), wrap=st.sampled_from(sorted(WRAPS)))
def test_an_odd_value_in_any_field_is_planned_or_refused(path: tuple[str, ...], what: str, wrap: str) -> None:
    _planned_or_refused(path, WRAPS[wrap](ODD[what]()))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a null key", "stages[0].factoryArgs.k: the key None is of type NoneType; keys are strings"),
        ("bytes as key", "stages[0].factoryArgs.k: the key b'x' is of type bytes; keys are strings"),
        ("a surrogate", "stages[0].factoryArgs.k: 'caf\\udce9' contains half of a surrogate pair"),
        ("a surrogate as key", "stages[0].factoryArgs.k: the key 'caf\\udce9' contains half of a surrogate pair"),
        ("a huge integer", "stages[0].factoryArgs.k: an integer of 16610 bits is beyond 64 bits"),
        ("a list in itself", f"is nested deeper than {MAX_LEVELS} levels, or contains itself"),
        ("lists that double", "the pipeline has more than 200000 values"),
        ("a hostile object", "stages[0].factoryArgs.k: a Hostile is of type Hostile; a spec holds JSON values only"),
        ("another struct", "stages[0].factoryArgs.k: Foreign(x=1) is of type Foreign; a spec holds JSON values only"),
    ],
)
def test_an_odd_value_is_named_with_its_path(what: str, message: str) -> None:
    with pytest.raises(InvalidPipeline) as raised:
        _loaded(PipelineConfig(name="p", stages=[stage(factory_args={"k": ODD[what]()})]))
    assert message in str(raised.value)


def test_all_odd_values_of_a_pipeline_are_named_at_once() -> None:
    odd_keys: Any = {1: "x"}
    spec = PipelineConfig(name="p", stages=[stage(factory_args={None: 1}, gpu=10**5000)], env_defaults=odd_keys)
    for refusal in (topology.faults(spec), _faults(spec)):
        assert {fault.path for fault in refusal} >= {"stages[0].factoryArgs", "stages[0].gpu[0]", "envDefaults.1"}


def _faults(spec: PipelineConfig) -> tuple[Any, ...]:
    with pytest.raises(InvalidPipeline) as raised:
        _loaded(spec)
    return raised.value.faults


def test_values_of_subclasses_of_str_int_and_float_are_plain_in_the_plan() -> None:
    given = {"a": ODD["an enum"](), "b": ODD["an integer enum"](), "c": ODD["a scalar of numpy"]()}
    loaded = _loaded(PipelineConfig(name="p", stages=[stage(factory_args=given)]))
    args = planning.plan(loaded.spec).units[0].stages[0].factory_args
    assert [type(value) for value in args.values()] == [str, int, float]
    assert "a: hi" in writing.convert(loaded.spec)

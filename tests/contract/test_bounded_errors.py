"""Errors are short and plain whatever the document holds. One beyond its bounds is refused for that alone."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from omnipipeline_spec import loading
from omnipipeline_spec.types.errors import InvalidPipeline, SpecError
from omnipipeline_spec.types.resource import API_VERSION, KIND
from tests.contract.rulecases import Document, pair

MIB = 1 << 20
LONG = "Aa" * (MIB // 2)
A_MESSAGE = 2500  #: Characters: a bounded message with its path and source.


def error_of(read: Callable[[], object]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read()
    return caught.value


def of_resource(spec: object, **metadata: object) -> Callable[[], object]:
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "p", **metadata}, "spec": spec}
    return lambda: loading.from_resource(resource)


def of_text(text: str, *overrides: str) -> Callable[[], object]:
    return lambda: loading.loads(text, overrides=overrides)


def with_stage(**fields: object) -> Document:
    spec = pair()
    spec["stages"] = [{**spec["stages"][0], **fields}, *spec["stages"][1:]]
    return spec


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"stages": [{"nme": "a"}] * 65}, "stages: has 65 entries; at most 64 are allowed"),
        (pair(env=[{"nme": "a"}] * 257), "env: has 257 entries; at most 256 are allowed"),
        (pair(envDefaults={f"{at} ": 1 for at in range(257)}), "envDefaults: has 257 entries; at most 256 are allowed"),
        (with_stage(next=["b"] * 17), "stages[0].next: has 17 entries; at most 16 are allowed"),
        (with_stage(name="_" * 300), "stages[0].name: has 300 characters; at most 63 are allowed"),
    ],
    ids=["stages", "variables", "a map", "targets", "a text"],
)
def test_what_is_beyond_its_bound_is_refused_before_anything_in_it_is_looked_at(given: object, fault: str) -> None:
    error = error_of(of_resource(given))
    assert isinstance(error, InvalidPipeline)
    assert [str(each) for each in error.faults] == [fault]


def test_the_work_of_reading_a_file_grows_as_its_length_does() -> None:
    def calls(count: int) -> int:
        """The number of Python calls while a file of so many stages is refused."""
        text = "stages:\n" + "".join(f"- {{name: s{at}, process: p, factory: 'w:m'}}\n" for at in range(count))
        made = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(counted)
        try:
            with pytest.raises(SpecError):
                loading.loads(text)
        finally:
            sys.setprofile(None)
        return made

    calls(100)  # what is inspected once is
    assert calls(400) < 6 * calls(100)

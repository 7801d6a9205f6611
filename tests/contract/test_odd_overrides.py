"""``--set`` is applied or refused with a message, whatever it is given, over whatever document."""

from __future__ import annotations

import pytest

from omnipipeline_spec import loading
from omnipipeline_spec.types.errors import SpecError

STAGE = "name: a\nstages:\n- {name: a, process: a, factory: 'w:m', terminal: true}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (STAGE, ["stages[0]=foo", "stages.a.process=x"], "'a' is not a stage"),
        (STAGE, ["stages=foo", "stages.a.process=x"], "stages is 'foo', which is neither a map nor a list"),
        ("stages: [null]", ["stages.a.process=x"], "'a' is not a stage"),
        ("stages: [null]", ["stages[0].process=x"], "stages[0].name: is required"),
        ("stages: [1, [2]]", ["stages.*.process=x"], "stages[0] is 1, which is neither a map nor a list"),
        ("stages: {a: 1}", ["stages.a.process=x"], "stages.a is 1, which is neither a map nor a list"),
        (STAGE, [" =1"], "write it as path=value"),
        (STAGE, [f"stages[{'9' * 5000}].gpu=0"], "--set stages[9999"),
        (STAGE, ["stages[000000001].gpu=0"], "stages has 1 entries; [1] is out of range"),
        (STAGE, ['stages.a.factoryArgs.k="\\U00110000"'], "--set stages.a.factoryArgs.k="),
        (STAGE, ["stages.a.factoryArgs.caf\udce9=1"], "contains half of a surrogate pair"),
        (STAGE, [f"stages.a.factoryArgs{'.k' * 500}=1"], "names more than 128 levels"),
        (STAGE, [f"stages.a.factoryArgs{'.k' * 5000}=1"], "names more than 128 levels"),
    ],
)
def test_an_odd_override_is_refused_with_a_message(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        loading.loads(text, overrides=overrides)
    assert message in str(raised.value)
    str(raised.value).encode()

"""The operator's environment: a value that cannot be used ends the process with the variable's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator import cli, errors, settings

IMAGE = {"OMNI_OPERATOR_STAGE_IMAGE": "stage:1"}
WEBHOOK = {"OMNI_OPERATOR_CONVERSION_NAME": "web"}
NUMBERS = {
    **{key: ["-1", "65536", "1.5", "nan", "inf", "x", "1e9"] for key in ("PROBE_PORT", "CONVERSION_PORT")},
    "WORKERS": ["0", "-1", "1.5", "nan", "inf", "many"],
    "WRITES_PER_SECOND": ["0", "-1", "nan", "inf", "-inf", "fast"],
    "WRITE_BURST": ["0", "0.5", "nan", "inf"],
    "RELIST_SECONDS": ["0", "-1", "nan", "inf"],
    "GPU_PATIENCE_SECONDS": ["-1", "nan", "inf", "5m"],
    "GPU_PRIORITY_SECONDS": ["-0.1", "nan", "inf"],
}
OTHERS = {
    "STAGE_IMAGE": [""],
    "POD_GROUP_SCHEDULER": [" ", "A", "my scheduler", "a_b", "-a", "a-", "a..b", ".a", "a\n", "a/b", "x" * 254, "ü"],
    "LEASE": ["true", "yes", "2"],
    "ALLOW_PRIVILEGED": ["true", "false"],
    "LOG_FORMAT": ["JSON", "xml"],
    "DEFAULT_RESOURCES": [
        '{"stage": {"requests": {"gpu": 1}}}',
        '{"stage": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}',
        '{"coordinator": {"limits": {"foo/bar": 0.5}}}',
        "[]",
        "{",
        '{"stage": {"requests": {"cpu": "-1"}}}',
        '{"stages": {}}',
        '{"stage": null}',
    ],
    "POD_SECURITY_CONTEXT": ['{"runAsUser": "root"}', '{"privileged": true}', "5"],
    "NODE_MODELS": ['{"path": "models"}', '{"path": "/"}', '{"path": "/a/../b"}', '{"path": "/a", "bound": "much"}'],
    "SCRAPERS": ["{}", "[5]", "["],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, each) for name, all_ in (NUMBERS | OTHERS).items() for each in all_]
)
def test_a_value_that_cannot_be_used_is_refused_by_its_variable(name: str, value: str) -> None:
    variable = f"OMNI_OPERATOR_{name}"
    with pytest.raises(errors.ConfigurationError, match=f"^{variable}"):
        settings.read({**IMAGE, **WEBHOOK, variable: value}, hostname="h")


def test_usual_values_are_read() -> None:
    read = settings.read(
        {
            **IMAGE,
            "OMNI_OPERATOR_WORKERS": "1e1",
            "OMNI_OPERATOR_POD_GROUP_SCHEDULER": "scheduler-plugins-scheduler",
            "OMNI_OPERATOR_GPU_PATIENCE_SECONDS": "0",
            "OMNI_OPERATOR_WRITES_PER_SECOND": "0.5",
        },
        hostname="h",
    )
    expected: Any = (10, "scheduler-plugins-scheduler", 0.0, 0.5)
    assert (read.workers, read.group_scheduler, read.gpu_patience_s, read.writes_per_s) == expected


@given(st.sampled_from([*NUMBERS]), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_is_a_number_in_bounds_or_refused(name: str, value: str) -> None:
    variable = f"OMNI_OPERATOR_{name}"
    try:
        settings.read({**IMAGE, **WEBHOOK, variable: value}, hostname="h")
    except errors.ConfigurationError as error:
        assert str(error).startswith(variable)


def test_the_process_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (*IMAGE.items(), ("OMNI_OPERATOR_POD_GROUP_SCHEDULER", "no such!")):
        monkeypatch.setenv(name, value)
    assert cli.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("cannot start: OMNI_OPERATOR_POD_GROUP_SCHEDULER: 'no such!'") and said.count("\n") == 1

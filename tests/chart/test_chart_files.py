"""Checks of the chart that need no helm: generated files, the smoke test's code, the docs."""

from __future__ import annotations

import ast
import json
import re

import pytest
import yaml

from tests.chart.rendering import CHART
from tests.cluster_kit import REPOSITORY


def test_the_charts_crd_is_the_generated_one() -> None:
    generated = (REPOSITORY / "crds" / "omnipipelines.yaml").read_text()
    assert (CHART / "crds.yaml").read_text() == generated, (
        "copy crds/omnipipelines.yaml to charts/omnipipeline/crds.yaml"
    )


def test_every_value_has_a_place_in_the_schema_and_no_object_takes_unknown_ones() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, value in values.items():
        described = schema["properties"][name]
        if isinstance(value, dict) and "properties" in described:
            assert set(value) == set(described["properties"]), name
            assert described["additionalProperties"] is False, name


def test_the_smoke_test_and_the_code_it_sends_are_python() -> None:
    text = (CHART / "files" / "smoke.py").read_text()
    tree = ast.parse(text)
    sent = next(
        str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and "omni" in str(node.value.value)
    )
    assert {"split", "shout"} <= {node.name for node in ast.parse(sent).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "reason",
    ["CrashLoopBackOff", "FailedMount", "UnexpectedAdmissionError", "TopologyAffinityError", "OutOfcpu", "Evicted"],
)
def test_a_unit_whose_pods_do_not_start_raises_one_alert(reason: str) -> None:
    rules = (CHART / "files" / "alerts.yaml").read_text()
    selectors = re.findall(r'omnipipeline_unit_status_reason\{reason=~"([^"]*)"\}', rules)
    assert [bool(re.fullmatch(each, reason)) for each in selectors].count(True) == 1


def test_every_alert_of_the_chart_stands_in_the_docs() -> None:
    rules = (CHART / "files" / "alerts.yaml").read_text()
    documented = (REPOSITORY / "docs" / "operations.md").read_text()
    table = documented[documented.index("<!-- alerts: ") :].split("\n\n")[0]
    assert sorted(re.findall(r"- alert: (\w+)", rules)) == sorted(re.findall(r"^\| (OmniPipeline\w+) \|", table, re.M))

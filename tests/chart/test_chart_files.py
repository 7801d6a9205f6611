"""What of the chart can be judged without helm: generated files, the smoke test's code, the dashboard's names."""

from __future__ import annotations

import ast
import json
import re

import yaml
from cluster_kit import REPOSITORY
from rendering import CHART

#: Series that nobody defines: PromQL's own words and Prometheus' suffixes.
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")


def test_the_charts_definition_is_the_generated_one() -> None:
    generated = (REPOSITORY / "crds" / "omnipipelines.yaml").read_text()
    assert (CHART / "crds.yaml").read_text() == generated, (
        "copy crds/omnipipelines.yaml to charts/omnipipeline/crds.yaml"
    )


def test_every_value_has_a_place_in_the_schema_and_no_object_takes_unknown_ones() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, value in values.items():
        told = schema["properties"][name]
        if isinstance(value, dict) and "properties" in told:
            assert set(value) == set(told["properties"]), name
            assert told["additionalProperties"] is False, name


def test_dashboard_and_alerts_ask_only_for_series_that_the_code_defines() -> None:
    asked = (CHART / "files" / "dashboard.json").read_text() + (CHART / "templates" / "prometheusrule.yaml").read_text()
    series = {SUFFIX.sub("", name) for name in re.findall(r"\bomni(?:pipeline|_process)_[a-z_]+", asked)}
    series -= {name for name in series if name.startswith("omnipipeline_dev_")}  # labels of the pods
    code = "".join(
        path.read_text() for folder in ("stage_runtime", "operator") for path in (REPOSITORY / folder).rglob("*.py")
    )
    missing = [name for name in sorted(series) if not _is_defined(name, code)]
    assert series and missing == []


def _is_defined(name: str, code: str) -> bool:
    """The last part of the name stands in the code as a word of its own (prefixes are put before it there)."""
    for prefix in ("omnipipeline_operator_", "omnipipeline_stage_", "omnipipeline_", "omni_process_"):
        short = name.removeprefix(prefix)
        if short != name and re.search(rf"""["'_}}]{re.escape(short)}(_total)?["']""", code):
            return True
    return False


def test_the_smoke_test_and_the_code_it_sends_are_python() -> None:
    text = (CHART / "files" / "smoke.py").read_text()
    tree = ast.parse(text)
    sent = next(
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and "omni" in str(node.value.value)
    )
    assert {"split", "shout"} <= {node.name for node in ast.parse(sent).body if isinstance(node, ast.FunctionDef)}

"""Every series and label in the chart's alerts and dashboard is served by a program.

Each program has a list of its metrics, and tests of its own that it serves them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

import yaml

from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.handlers.metrics import OPERATOR, STATUS
from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types import metrics
from stage_runtime.metrics import catalog
from tests.chart.rendering import CHART

NAME: Final = re.compile(r"\b(omnipipeline_[a-z_]+)(\{[^}]*\})?")
GROUPED: Final = re.compile(r"\bby \(([^)]*)\)")
#: Labels that Prometheus and the PodMonitor's podTargetLabels add to every series.
ADDED: Final = {"namespace", "pod", "omnipipeline_dev_pipeline", "omnipipeline_dev_unit", "omnipipeline_dev_revision"}


def expressions() -> Iterator[str]:
    """The expressions of the dashboard's panels, and of the rules as they stand in the template."""
    board = json.loads((CHART / "files" / "dashboard.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


def test_whatever_the_chart_asks_for_is_served() -> None:
    live = metrics.series(
        [*catalog.COORDINATOR, *catalog.TLS, *catalog.SERVICE, *catalog.PLANES, *catalog.PROCESSES, *OPERATOR, *STATUS]
    )
    queries = list(expressions())
    missing = []
    for expression in queries:
        for name, selector in NAME.findall(expression):
            if name in ADDED:
                continue
            desired = set(re.findall(r"([a-z_]+)\s*[=!]", selector))
            desired |= {each.strip() for group in GROUPED.findall(expression) for each in group.split(",")}
            unknown = sorted(desired - ADDED - live.get(name, frozenset()))
            if name not in live or unknown:
                missing.append(f"{name}: {unknown or 'nobody serves it'}")
    assert len(queries) > 15 and missing == []


def test_the_monitor_of_pipelines_asks_a_port_and_copies_labels_that_all_their_pods_have() -> None:
    text = (CHART / "templates" / "podmonitor.yaml").read_text().split("\n---\n")[0]
    ports = set(re.findall(r"\bport: (\w+)", text))
    [copied] = re.findall(r"podTargetLabels: \[(.*)\]", text)
    [selected] = re.findall(r"key: (\S+), operator: Exists", text)
    spec = PipelineConfig(name="p", stages=[StageConfig(name="a", process="a", factory="m:a", terminal=True)])
    facts = PodFacts(owner=Owner(namespace="n", name="p", uid="u"), image="i", control_secret="s")
    made = children.children(spec, planning.plan(spec), facts).workloads
    assert len(made) == 2
    for each in made:
        template = each.deployment["spec"]["template"]
        assert ports <= {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {selected, *copied.split(", ")} <= set(template["metadata"]["labels"])

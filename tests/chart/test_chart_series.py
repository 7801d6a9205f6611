"""Every series and label in the chart's alerts and dashboard is served by a program.

What the runtime serves is rendered by the code that serves it, with one sample of everything; the operator has a list.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_operator.desired import children
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pods import PodFacts
from omnipipeline_operator.handlers.metrics import OPERATOR, STATUS
from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types import metrics
from stage_runtime.coordinator import request_manager
from stage_runtime.coordinator.stats import RequestStats
from stage_runtime.processes import pod
from stage_runtime.processes.instances import ProcessView
from stage_runtime.web.metrics import Metrics as CoordinatorMetrics
from stage_runtime.wire.messages import Timing
from tests.chart.rendering import CHART

NAME: Final = re.compile(r"\b(omni(?:pipeline|_process)_[a-z_]+)(\{[^}]*\})?")
GROUPED: Final = re.compile(r"\bby \(([^)]*)\)")
#: What Prometheus and the PodMonitor's podTargetLabels add to every series.
ADDED: Final = {"namespace", "pod", "omnipipeline_dev_pipeline", "omnipipeline_dev_unit", "omnipipeline_dev_revision"}


def expressions() -> Iterator[str]:
    """Of the dashboard's panels, and of the rules as they stand in the template."""
    board = json.loads((CHART / "files" / "dashboard.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    rules = (CHART / "templates" / "prometheusrule.yaml").read_text()
    found = re.findall(r"^ +expr: (?:\|-\n((?: {12}.*\n)+)|(.*)\n)", rules, re.MULTILINE)
    yield from (several or single for several, single in found)


def served(*texts: str) -> dict[str, frozenset[str]]:
    """Each series' labels."""
    labels: dict[str, frozenset[str]] = defaultdict(frozenset)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels[sample.name] |= set(sample.labels)
    return labels


def of_coordinator() -> str:
    stats = RequestStats()
    stats.timed([Timing("split", 1000, 2000)])
    source = ast.parse(textwrap.dedent(inspect.getsource(request_manager.RequestManager.metrics)))
    tables = [node for node in ast.walk(source) if isinstance(node, ast.Dict)]
    keys = [str(key.value) for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    numbers: dict[str, Any] = dict.fromkeys(keys, 1.0)
    shaped = {"requests": {("chat", "completed"): 1}, "stages": stats.stages(), "control": {}, "relay": {}}
    assert set(shaped) <= set(numbers)
    counted: Any = SimpleNamespace(metrics=lambda: numbers | shaped | {"instances_ready": {"front": 1}})
    metrics = CoordinatorMetrics(counted)
    exchange: Any = SimpleNamespace(
        method="GET", route="/", status=200, outcome="completed", sent_bytes=1, begun_at=1.0, first_byte_at=2.0
    )
    metrics.observe(exchange, 3.0)
    return metrics.render().decode()


def of_pod() -> str:
    view = ProcessView(process="front", instance="i", stages=(), state="ready", pid=os.getpid())
    fake: Any = SimpleNamespace(
        _supervisor=SimpleNamespace(views=lambda: [view]),
        _settings=SimpleNamespace(plan=SimpleNamespace(pipeline="p", name="u")),
    )
    fake._family = functools.partial(pod.Pod._family, fake)
    return pod.Pod._metrics(fake).body


def test_whatever_the_chart_asks_for_is_served() -> None:
    live = served(of_coordinator(), of_pod()) | metrics.series([*OPERATOR, *STATUS])
    asked = list(expressions())
    missing = []
    for expression in asked:
        for name, selector in NAME.findall(expression):
            if name in ADDED:
                continue
            desired = set(re.findall(r"([a-z_]+)\s*[=!]", selector))
            desired |= {each.strip() for group in GROUPED.findall(expression) for each in group.split(",")}
            unknown = sorted(desired - ADDED - live.get(name, frozenset()))
            if name not in live or unknown:
                missing.append(f"{name}: {unknown or 'nobody serves it'}")
    assert len(asked) > 15 and missing == []


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

"""The operator serves the metrics of its one list, with their labels, and no others."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_operator.cluster.client import Client
from omnipipeline_operator.cluster.status_client import StatusClient
from omnipipeline_operator.handlers.lifecycle import Operator
from omnipipeline_operator.handlers.metrics import OPERATOR, STATUS, OperatorMetrics
from omnipipeline_operator.settings import Settings
from omnipipeline_spec.types import metrics

PIPELINE = {
    "kind": "OmniPipeline",
    "metadata": {"namespace": "n", "name": "p", "uid": "u", "resourceVersion": "1"},
    "status": {
        "conditions": [{"type": "Ready", "status": "False", "reason": "CrashLoopBackOff"}],
        "units": [{"name": "u", "reason": "CrashLoopBackOff", "replicas": 3, "updated": 2, "ready": 1}],
    },
}


def scraped(*, leads: bool) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Series -> labels -> value, of an operator with one sample of everything."""
    served, nobody = OperatorMetrics(), cast(Any, None)
    operator = Operator(
        Settings(stage_image="i"), Client(nobody, nobody, served.count_request), cast(StatusClient, nobody), served
    )
    operator._store.put(PIPELINE)
    operator._leads = leads
    served.count_request("GET", "pods", 0)
    served.reconcile_errors.labels("Unavailable").inc()
    served.relists.labels("success").inc()
    served.reconcile_time.observe(0.1)
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(served.registry).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_metric_of_the_list_is_served_with_its_labels_and_no_other() -> None:
    served = {name: frozenset(dict(next(iter(samples)))) for name, samples in scraped(leads=True).items()}
    assert served == metrics.series([*OPERATOR, *STATUS])


def test_the_status_of_a_unit_is_served_as_spec_updated_and_ready_replicas() -> None:
    names = (("namespace", "n"), ("pipeline", "p"), ("unit", "u"))
    served = scraped(leads=True)
    assert served["omnipipeline_unit_spec_replicas"] == {names: 3}
    assert served["omnipipeline_unit_status_replicas_updated"] == {names: 2}
    assert served["omnipipeline_unit_status_replicas_ready"] == {names: 1}


def test_a_standby_serves_no_metric_of_a_pipeline() -> None:
    assert not set(scraped(leads=False)) & set(metrics.series(STATUS))


def test_a_request_without_an_answer_has_the_code_error() -> None:
    [(labels, value)] = scraped(leads=True)["omnipipeline_operator_rest_client_requests_total"].items()
    assert (dict(labels), value) == ({"method": "GET", "resource": "pods", "code": "<error>"}, 1)

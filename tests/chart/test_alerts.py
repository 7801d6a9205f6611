"""Each alert of the chart rings within minutes of what a person must act on, and for nothing else.

promtool evaluates the rules over series as Prometheus records them, one value a minute.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from omnipipeline_operator.changes.reporting import diagnostics
from tests.chart.rendering import CHART

RULES: Final = CHART / "files" / "alerts.yaml"
OF_PIPELINE: Final = 'namespace="team", pipeline="duo"'


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Series, and the alerts that ring at a minute. Values: promtool's form, ``1x9`` is ten times 1, ``_`` a gap."""

    name: str
    series: dict[str, str]
    minute: int
    rings: tuple[str, ...] = ()


def condition(kind: str, status: str, reason: str, pod: str = "operator-1") -> str:
    labels = f'{OF_PIPELINE}, condition="{kind}", status="{status}", reason="{reason}", pod="{pod}"'
    return f"omnipipeline_status_condition{{{labels}}}"


def unit(reason: str) -> str:
    return f'omnipipeline_unit_status_reason{{{OF_PIPELINE}, unit="first", reason="{reason}"}}'


LEADS: Final = {'omnipipeline_operator_leader_election_master_status{pod="operator-1"}': "1x60"}
FAILING: Final = 'omnipipeline_operator_workqueue_longest_failing_seconds{pod="operator-1"}'
OLDEST: Final = 'omnipipeline_operator_workqueue_oldest_item_seconds{pod="operator-1"}'
READY: Final = (
    'omnipipeline_process_ready{namespace="team", omnipipeline_dev_pipeline="duo", omnipipeline_dev_unit="first"}'
)
ANSWERS: Final = 'omnipipeline_http_requests_total{namespace="team", omnipipeline_dev_pipeline="duo", status="%s"}'
CERTIFICATE: Final = (
    'omnipipeline_http_certificate_%s{namespace="team", omnipipeline_dev_pipeline="duo", pod="coordinator"}'
)
RESTARTS: Final = 'omnipipeline_process_restarts_total{namespace="team", pod="p", process="first"}'

CASES: Final = [
    Case(name="all is well", series={condition("Ready", "True", "Serving"): "1x60", READY: "1x60"}, minute=50),
    # A pod that always fails is tried every 60 to 72 s.
    Case(
        name="a reconcile always fails",
        series={FAILING: "0+60x60"},
        minute=8,
        rings=("OmniPipelineOperatorReconcileErrors",),
    ),
    Case(name="reconciles fail in turn", series={FAILING: "30x20"}, minute=15),
    Case(
        name="the old revision serves, the new one does not start",
        series={
            condition("Progressing", "False", "ProgressDeadlineExceeded"): "1x60",
            condition("Available", "True", "Serving"): "1x60",
        },
        minute=6,
        rings=("OmniPipelineRolloutStuck",),
    ),
    Case(
        name="no room beside the old revision",
        series={condition("Progressing", "False", "InsufficientCapacity"): "1x60"},
        minute=6,
        rings=("OmniPipelineRolloutStuck",),
    ),
    Case(
        name="the old revision serves, the model of the new one is not there",
        series={condition("Ready", "False", "PrefetchFailed"): "1x60"},
        minute=6,
        rings=("OmniPipelinePrefetchFailed",),
    ),
    Case(
        name="an operator is replaced meanwhile",
        series={
            condition("Progressing", "False", "InsufficientCapacity"): "1 1 1 1 stale",
            condition("Progressing", "False", "InsufficientCapacity", "operator-2"): "_ _ _ _ _ 1x20",
        },
        minute=7,
        rings=("OmniPipelineRolloutStuck",),
    ),
    Case(
        name="an invalid spec",
        series={condition("Accepted", "False", "InvalidSpec"): "1x60"},
        minute=6,
        rings=("OmniPipelineNotAccepted",),
    ),
    Case(
        name="nothing answers, for changing reasons",
        series={
            condition("Available", "False", "CrashLoopBackOff"): "1 stale " * 10,
            condition("Available", "False", "Starting"): "_ 1 " + "stale 1 " * 9,
        },
        minute=16,
        rings=("OmniPipelineNotAvailable",),
    ),
    Case(name="suspended", series={condition("Available", "False", "Suspended"): "1x60"}, minute=50),
    Case(
        name="no controller serves the Ingress",
        series={condition("Exposed", "False", "AddressPending"): "1x60"},
        minute=16,
        rings=("OmniPipelineNotExposed",),
    ),
    Case(
        name="a route is waited for, then refused",
        series={
            condition("Exposed", "False", "AddressPending"): "1x8 stale",
            condition("Exposed", "False", "RouteRefused"): "_x8 1x20",
        },
        minute=17,
        rings=("OmniPipelineNotExposed",),
    ),
    Case(
        name="the cluster has no Gateway API",
        series={condition("Exposed", "False", "GatewayAPIMissing"): "1x60"},
        minute=16,
        rings=("OmniPipelineNotExposed",),
    ),
    Case(name="no process is ready", series={READY: "0x60"}, minute=6, rings=("OmniPipelineStageNotReady",)),
    Case(
        name="every tenth answer is an error",
        series={ANSWERS % "200": "0+90x30", ANSWERS % "503": "0+10x30"},
        minute=12,
        rings=("OmniPipelineHighErrorRate",),
    ),
    Case(
        name="a process crashes every three minutes",
        series={RESTARTS: "0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6"},
        minute=16,
        rings=("OmniPipelineProcessCrashLooping",),
    ),
    # A life of 100 minutes, of which half are over when promtool's clock begins.
    *(
        Case(
            name=f"minute {50 + minute} of a certificate's 100",
            series={
                CERTIFICATE % "not_before_timestamp_seconds": "-3000x60",
                CERTIFICATE % "not_after_timestamp_seconds": "3000x60",
                CERTIFICATE % "refused": "0x60",
            },
            minute=minute,
            rings=rings,
        )
        for minute, rings in ((39, ()), (46, ("OmniPipelineCertificateEnds",)), (55, ("OmniPipelineCertificateEnds",)))
    ),
    Case(
        name="a Secret holds another certificate's key",
        series={CERTIFICATE % "refused": "0x3 1x30"},
        minute=12,
        rings=("OmniPipelineCertificateRefused",),
    ),
    Case(
        name="the liveness probe restarts an operator that is stuck",
        series={OLDEST: "0 60 120 0 60 120 0 60 120 0 60 120 0 60 120"},
        minute=9,
        rings=("OmniPipelineOperatorQueueStuck",),
    ),
]


def evaluated(tmp_path: Path, cases: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program is not None, "the mark `debian` asks for it"
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": cases}))
    return subprocess.run([program, "test", "rules", str(file)], capture_output=True, text=True, timeout=100)


def names() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def _expected(expression: str, minute: int, value: int) -> dict[str, Any]:
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}


def asked(case: Case) -> dict[str, Any]:
    """The case as promtool's test: each alert, how many of it ring. (Their labels and texts are templates.)"""
    count = "count(ALERTS{alertname='%s', alertstate='firing'}) or vector(0)"
    expected = [_expected(count % name, case.minute, int(name in case.rings)) for name in names()]
    series = [{"series": name, "values": values} for name, values in (LEADS | case.series).items()]
    return {"name": case.name, "interval": "1m", "input_series": series, "promql_expr_test": expected}


@pytest.mark.debian("prometheus")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_person_must_act_on_rings_and_nothing_else(case: Case, tmp_path: Path) -> None:
    done = evaluated(tmp_path, [asked(case)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.debian("prometheus")
@pytest.mark.parametrize("leads", ["0x60", "_x60", "0 0 1 0 0 0 0 1 0 0 0 0 1 0 0"])
def test_an_operator_that_mostly_does_not_lead_rings(leads: str, tmp_path: Path) -> None:
    case = asked(Case(name="none", series={}, minute=9, rings=("OmniPipelineOperatorNoLeader",)))
    case["input_series"] = [{"series": next(iter(LEADS)), "values": leads}]
    done = evaluated(tmp_path, [case])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.debian("prometheus")
def test_each_reason_of_a_unit_rings_one_alert_also_when_it_comes_and_goes(tmp_path: Path) -> None:
    cases = []
    for reason in diagnostics._SEVERITY:
        full = f"{reason}cpu" if reason == "OutOf" else reason
        ringing = [_expected("count(ALERTS{alertstate='firing'})", 13, 1)]
        comes_and_goes = {unit(full): "1 1 stale " * 5} | LEADS
        series = [{"series": name, "values": values} for name, values in comes_and_goes.items()]
        cases.append({"name": full, "interval": "1m", "input_series": series, "promql_expr_test": ringing})
    done = evaluated(tmp_path, cases)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_makes_it_ring() -> None:
    covered = {name for case in CASES for name in case.rings} | {"OmniPipelineOperatorNoLeader"}
    by_reason = {"OmniPipelinePodsCannotStart", "OmniPipelineImagePullFailing", "OmniPipelinePodsRefused"}
    assert covered | by_reason == set(names())

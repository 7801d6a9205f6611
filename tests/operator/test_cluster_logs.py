"""The operator logs one line that says what happened when things end around it, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster_kit import REPOSITORY, Cluster
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

CRD = "omnipipelines.omnipipeline.dev"


def lines(operator: OperatorProcess) -> list[dict[str, str]]:
    """All that it has logged so far, in all its processes."""
    whole, _, _ = operator.log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def test_the_definition_goes_and_comes_back_while_the_operator_runs(
    kube: Kube, operator: OperatorProcess, prepared: tuple[Cluster, Path]
) -> None:
    cluster, _ = prepared
    operator.start(OMNI_OPERATOR_LOG_FORMAT="json").managing()
    kube.apply(pipeline("duo"))
    kube.wait_ready("duo")
    cluster.kubectl("delete", "crd", CRD, "--timeout=50s")
    assert operator.process is not None
    assert operator.process.wait(timeout=60) == 1
    [last] = [each for each in lines(operator) if each["level"] == "error"]
    assert last["message"].startswith("ending: a watch has ended: ")

    # The kubelet starts it again. It waits for the definition, and says so once.
    operator.start(OMNI_OPERATOR_LOG_FORMAT="json")
    missing = "list: GET /apis/omnipipeline.dev/v1alpha1/"
    eventually(lambda: [each for each in lines(operator) if each["message"].startswith(missing)], what="it is told")
    cluster.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds" / "omnipipelines.yaml"))
    wait = ("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=50s")
    eventually(lambda: cluster.kubectl(*wait, check=False).returncode == 0, what="the CRD is established")
    operator.managing()
    kube.apply(pipeline("again"))
    kube.wait_ready("again")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log.read_text() and not [each for each in lines(operator) if "trace" in each]
    assert len([each for each in lines(operator) if each["message"].startswith(missing)]) <= 2


@pytest.mark.parametrize("moment", ["at work", "before the first list"])
def test_a_stopped_operator_logs_one_line_and_no_traceback(kube: Kube, operator: OperatorProcess, moment: str) -> None:
    operator.start()
    if moment == "at work":
        operator.managing()
        kube.apply(pipeline("duo"))
        eventually(lambda: kube.names("deployments"), what="it works")
    else:
        eventually(lambda: operator.log.exists(), what="it runs")
    assert operator.stop() in (0, -15), "before it has its handlers, the signal itself ends it"
    log = operator.log.read_text()
    assert "Traceback" not in log
    assert "stopped by a signal" in log or not log

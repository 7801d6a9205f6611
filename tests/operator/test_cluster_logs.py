"""The operator logs one line that says what happened when things end around it, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster_kit import REPOSITORY, Cluster
from tests.operator.running import Kube, OperatorProcess, eventually, pipeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

CRD = "omnipipelines.omnipipeline.dev"


GONE = f"the API server no longer serves pipelines: the CRD {CRD} has been deleted"
MISSING = f"the CRD {CRD} is not installed (404)"


def define(cluster: Cluster) -> None:
    """Apply the definition, and wait until it is served."""

    def applied() -> bool:
        apply = ("apply", "--server-side", "-f", str(REPOSITORY / "crds" / "omnipipelines.yaml"))
        wait = ("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=50s")
        return all(cluster.kubectl(*each, check=False).returncode == 0 for each in (apply, wait))

    eventually(applied, what="the CRD is established")


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
    assert last["message"] == f"ending: {GONE}"

    # The kubelet starts it again. It waits for the definition, and says so once.
    operator.start(OMNI_OPERATOR_LOG_FORMAT="json")
    missing = f"list: GET /apis/omnipipeline.dev/v1alpha1/namespaces/{kube.namespace}/omnipipelines: {MISSING}"
    eventually(lambda: [each for each in lines(operator) if each["message"].startswith(missing)], what="it is told")
    define(cluster)
    operator.managing()
    kube.apply(pipeline("again"))
    kube.wait_ready("again")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log.read_text() and not [each for each in lines(operator) if "trace" in each]
    assert len([each for each in lines(operator) if each["message"].startswith(missing)]) <= 2


@pytest.mark.parametrize("watched", ["its namespace", "all namespaces"])
def test_the_definition_is_replaced_at_once_and_edits_are_carried_out(
    kube: Kube, operator: OperatorProcess, prepared: tuple[Cluster, Path], watched: str
) -> None:
    """Whether the operator sees that the definition was away depends on when it looks; it works on in both cases."""
    cluster, _ = prepared
    scope = {"OMNI_OPERATOR_WATCH": kube.namespace if watched == "its namespace" else ""}
    operator.start(OMNI_OPERATOR_LOG_FORMAT="json", **scope).managing()
    kube.apply(pipeline("duo"))
    before = kube.wait_ready("duo")["metadata"]["uid"]
    # The definition stays until its objects are gone: the next apply waits for that.
    cluster.kubectl("delete", "crd", CRD, "--timeout=50s")
    define(cluster)
    kube.apply(pipeline("duo"))

    def at_work(condition: Callable[[], bool]) -> bool:
        """Do as a kubelet: start it again when it has ended."""
        assert operator.process is not None
        if operator.process.poll() is not None:
            assert operator.process.returncode == 1
            operator.start(OMNI_OPERATOR_LOG_FORMAT="json", **scope)
        return condition()

    def is_ready() -> bool:
        ready = kube.condition("duo", "Ready")
        return bool(ready.get("status") == "True")

    eventually(lambda: at_work(is_ready), what="the pipeline of the same name is ready")
    assert kube.get("omnipipeline", "duo")["metadata"]["uid"] != before
    patch = '{"spec":{"expose":{"service":{"annotations":{"edited":"after"}}}}}'
    kube("patch", "omnipipeline", "duo", "--type=merge", "-p", patch)

    def is_edited() -> bool:
        return bool(kube.get("service", "duo")["metadata"].get("annotations", {}).get("edited") == "after")

    eventually(lambda: at_work(is_edited), what="the edit is carried out")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log.read_text()


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

"""A node that stops answering: its pods are replaced, and the pipeline reports why it was unavailable."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import delete_lost_node_pipeline
from tests.cluster.installing import Installed, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]


def test_a_lost_nodes_pod_is_replaced_elsewhere_and_the_conditions_reported_why(
    installed: Installed, lost_node_pipeline: str
) -> None:
    def leaving() -> dict[str, bool]:
        pods = installed.pods(lost_node_pipeline, "only")
        return {pod["spec"].get("nodeName", ""): "deletionTimestamp" in pod["metadata"] for pod in pods}

    def found() -> str:
        nodes = installed.cluster.kubectl("get", "nodes").stdout
        return f"another pod elsewhere; pods that end, by node: {leaving()}; nodes:\n{nodes}"

    try:
        wait_for(found, lambda: leaving() == {"doomed-1": True, "spare-1": False}, timeout_s=300)
        wait_ready(installed.cluster, installed.namespace, lost_node_pipeline)
        events = installed.all("events")
        messages = [each["message"] for each in events if each["involvedObject"]["name"] == lost_node_pipeline]
        assert any("doomed-1" in message for message in messages), messages
    finally:
        delete_lost_node_pipeline(installed, lost_node_pipeline)  # later tests check that nothing is left

"""Fixtures that several rooms' tests share; they live in modules beside this one."""

import os

import hypothesis
import pytest

from tests.cluster_kit import api_server, cluster_kit, node_cluster

# In CI the same examples every time: a change fails for what it changed. New ones are looked for on desks.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

__all__ = ["api_server", "cluster_kit", "node_cluster"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The release of the chart last: its operator looks after every namespace, the other tests' too."""
    items.sort(key=lambda item: item.path.parent.name == "cluster")

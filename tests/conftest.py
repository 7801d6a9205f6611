"""Fixtures that several rooms' tests share; they live in modules beside this one."""

import os
from typing import Any

import hypothesis
import pytest
import pytest_timeout as timeouts

from tests import debian
from tests.cluster_kit import api_server, cluster_kit, node_cluster
from tests.engines.overlap_kit import each_way
from tests.patience import patience
from tests.thoroughness import THOROUGH, examples

hypothesis.settings.register_profile(
    "tests",
    max_examples=examples(40),
    # CI draws the same examples every time: a change fails for what it changed. New ones are looked for at night.
    derandomize=bool(os.environ.get("CI")) and not THOROUGH,
    deadline=None,  # no limits of time: machines are shared
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("tests")

__all__ = ["api_server", "cluster_kit", "each_way", "node_cluster"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test before its fixtures, which may need the same packages."""
    debian.require(item, ci=bool(os.environ.get("CI")))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    return timeouts.pytest_timeout_set_timer(item, settings._replace(timeout=patience(settings.timeout)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The release of the chart last: its operator looks after every namespace, the other tests' too."""
    items.sort(key=lambda item: item.path.parent.name == "cluster")
    if THOROUGH:
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]

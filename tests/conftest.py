"""Fixtures that several rooms' tests share; they live in modules beside this one."""

import functools
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_timeout as timeouts

from stage_runtime import imports
from tests import debian, order
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

HERE = Path(__file__).parent

__all__ = ["api_server", "cluster_kit", "each_way", "node_cluster"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test before its fixtures, which may need the same packages."""
    debian.require(item, ci=bool(os.environ.get("CI")))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    return timeouts.pytest_timeout_set_timer(item, settings._replace(timeout=patience(settings.timeout)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector; afterwards it looks at nothing that was there before the first test.

    All modules and 11,000 tests live to the end of the run. Each collection would look at all of them.
    """
    with imports.uncollected():
        result = yield
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape surrogates, which tests of hostile values log: one in a report would end its worker of xdist."""
    data = yield
    return _encodable(data)


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case list():
            return [_encodable(each) for each in value]
        case tuple():
            return tuple(map(_encodable, value))
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
    return value


@functools.cache
def _place(file: Path) -> tuple[bool, int]:
    """The release of the chart last: its operator looks after every namespace, the other tests' too."""
    path = file.relative_to(HERE)
    return path.parts[0] == "cluster", order.place(path.as_posix())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))
    if THOROUGH:
        return
    kept: list[pytest.Item] = []
    nightly: list[pytest.Item] = []
    for item in items:
        (nightly if item.get_closest_marker("nightly") else kept).append(item)
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = kept

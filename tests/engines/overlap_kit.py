"""Whether steps overlap in the engines that a module's tests make: each of its tests runs once with, once without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


class Steps:
    overlap = False  #: The value that `generation_kit.core` takes where its caller does not say.


@pytest.fixture(scope="module", params=[False, True], ids=["in_turn", "overlapping"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fixture for ``pytestmark = pytest.mark.usefixtures("each_way")``."""
    Steps.overlap = request.param
    yield
    Steps.overlap = False

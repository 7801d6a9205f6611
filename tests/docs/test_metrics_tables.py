"""The tables of metrics in docs/operations.md are made from the programs' lists."""

from __future__ import annotations

from typing import Final

import pytest

from omnipipeline_operator.handlers.metrics import OPERATOR, STATUS
from omnipipeline_spec.types.metrics import Metric, table
from stage_runtime.metrics.catalog import (
    CACHES,
    COORDINATOR,
    ENGINES,
    PLANES,
    PLANES_WITH_NIXL,
    PROCESSES,
    REALTIME,
    SERVICE,
    TLS,
)
from tests.docs.blocks import ROOT

LISTS: Final[dict[str, tuple[Metric, ...]]] = {
    "coordinator-metrics": COORDINATOR,
    "tls-metrics": TLS,
    "service-metrics": SERVICE,
    "realtime-metrics": REALTIME,
    "planes-metrics": PLANES,
    "nixl-metrics": PLANES_WITH_NIXL,
    "engines-metrics": ENGINES,
    "caches-metrics": CACHES,
    "processes-metrics": PROCESSES,
    "operator-metrics": OPERATOR,
    "status-metrics": STATUS,
}


@pytest.mark.parametrize("mark", LISTS)
def test_the_table_in_the_docs_is_made_from_the_list(mark: str) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    written = text[text.index(f"<!-- {mark}: ") :].splitlines()[1 : len(LISTS[mark]) + 4]
    made = table(LISTS[mark])
    assert written == [*made, ""], "\n".join(["put these lines into docs/operations.md:", *made])


def test_no_metric_stands_in_two_lists() -> None:
    names = [each.name for listed in LISTS.values() for each in listed]
    assert len(names) == len(set(names))

"""The tables of docs/http-api.md and docs/profiling.md name every route, and no other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stage_runtime.web import routes
from stage_runtime.web.endpoints import AdapterNames, HandlerContext
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.page import files
from stage_runtime.web.reading.fetching import Fetcher
from stage_runtime.web.routing import Route
from stage_runtime.web.sound.pool import CodecPool
from tests.docs.blocks import ROOT
from tests.web.running import ALL
from tests.web.scripted_manager import ScriptedManager, play

PROFILING: Any = None  # the handlers are not called
OPERATIONS: Any = None

PAGES = ("/", "/docs")  # what they load has no row
MANAGER = ScriptedManager(play())
SERVICE = HandlerContext(
    manager=MANAGER, settings=ALL, fetcher=Fetcher(ALL), codecs=CodecPool(), adapter_names=AdapterNames(MANAGER)
)


@pytest.mark.parametrize(
    ("page", "table"),
    [
        (
            "http-api.md",
            (
                *routes.public(SERVICE),
                *routes.probes(MANAGER, CoordinatorMetrics(MANAGER)),
                *routes.engines(OPERATIONS, OPERATIONS, model="hello"),
                *routes.page(MANAGER, ALL, profiler=True),
                *(one for one in (*files.page(keyed=True), *files.documentation(keyed=True)) if one.path in PAGES),
            ),
        ),
        ("profiling.md", routes.profiler(PROFILING)),
    ],
)
def test_the_page_has_a_row_for_every_route_and_no_other(page: str, table: tuple[Route, ...]) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(
        re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", "\n".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)))
    )
    assert named == {f"{one.method} {one.path.replace(':path', '')}" for one in table}

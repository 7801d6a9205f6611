"""The page in a browser's tab, over a request manager in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.wire.values import Text
from tests.web.page.browser import Tab, chromium
from tests.web.page.page_pipelines import Edge, samples, status
from tests.web.running import ALL, Running, start
from tests.web.scripted_manager import Script, chunk, play

LOCAL = msgspec.structs.replace(ALL, local=True)
KEYED = msgspec.structs.replace(LOCAL, api_keys=ApiKeys(("se&cret #1",)))
HELLO = play(chunk(Text("hello ")), chunk(Text("<b>you</b>"), index=1), ResultEvent(stage="talk", data=Text("done")))
TALL: dict[str, Any] = {"width": 1300, "height": 1600}


@asynccontextmanager
async def page(
    folder: Path,
    groups: dict[str, str],
    edges: list[Edge],
    *,
    instances: int = 2,
    settings: Any = KEYED,
    script: Script = HELLO,
    refused: str = "no status",
) -> AsyncIterator[tuple[Running, Tab]]:
    """refused: the status of requests that the server refuses, of which a browser writes to its console."""
    async with start(script, settings) as running, chromium(folder) as tab:
        running.manager.shown = status(groups, edges, instances=instances, loading=1)
        running.manager.samples = samples(groups)
        await tab.look(**TALL)
        yield running, tab
        assert [one for one in tab.problems if refused not in one] == [], tab.problems
        assert [url for url in tab.asked if not url.startswith((running.url, "data:", "blob:", "about:"))] == []

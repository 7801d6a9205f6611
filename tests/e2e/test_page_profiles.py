"""The page's panel of profiles, in Debian's Chromium, over a running pipeline: start, stop, the files of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.local_pipelines import Client, diamond, running
from tests.web.page.browser import chromium

pytestmark = [pytest.mark.browser, pytest.mark.debian("chromium"), pytest.mark.timeout(300)]
BUTTON = "[...document.querySelectorAll('#profile button')].find(one => one.textContent == '%s')"


@pytest.mark.long
async def test_a_profile_is_started_stopped_and_fetched_by_the_page(base: Path) -> None:
    async with running(diamond(), base) as pipeline, Client(pipeline.url) as client, chromium(base) as tab:
        await tab.look(width=1300, height=1600)
        await tab.open(pipeline.url)
        await tab.until(f"({BUTTON % 'Start'})?.disabled === false")
        await tab.do(f"({BUTTON % 'Start'}).click()")
        await tab.until("document.querySelector('#profile [role=status]').textContent.endsWith('records')")
        await client.answer("while it records")
        await tab.do(f"({BUTTON % 'Stop'}).click()")
        await tab.until("document.querySelector('#profile [role=status]').textContent.endsWith('has ended')")
        await tab.until(BUTTON % "Report")
        await tab.do(f"({BUTTON % 'Report'}).click()")
        await tab.until(f"!({BUTTON % 'Report'}).disabled")
        assert await tab.do("document.querySelector('#profile .error').textContent") == ""
        assert any("report?format=html" in url for url in tab.asked)
        assert tab.problems == []

"""The page in a real browser: Debian's Chromium, without an error in its console and without another host.

Missing Chromium is a failure under CI and a skip elsewhere.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Audio, Text
from tests.web.page.opened import TALL, page
from tests.web.page.page_pipelines import LOADING, Edge, record, status
from tests.web.running import ALL
from tests.web.scripted_manager import chunk, play

pytestmark = [pytest.mark.browser, pytest.mark.debian("chromium"), pytest.mark.timeout(300)]

MARKUP = "<img src=x onerror=\"document.title='taken'\">"


async def test_the_page_shows_nothing_without_the_key_and_everything_with_it(tmp_path: Path) -> None:
    groups = {"listen": "ears", "think": "head", "speak": "head"}
    edges = [("listen", "think", "normal"), ("think", "speak", "stream")]
    failure = {"code": "stage_failed", "message": "ValueError: no sound", "stage": "listen"}
    async with page(tmp_path, groups, edges) as (running, tab):
        running.manager.records = [record("bad", ["listen"], error=failure), record("good", list(groups))]
        await tab.open(running.url)
        await tab.until("document.activeElement.id == 'key'")
        assert await tab.do("document.getElementById('main').hidden")
        assert [url for url in tab.asked if "events" in url] == []
        assert "listen" not in await tab.do("document.body.textContent")

        await tab.call("Input.insertText", text="se&cret #1")
        await tab.press("Enter", code=13, text="\r")
        await tab.until("document.body.dataset.ready")
        assert await tab.do("document.querySelectorAll('.node').length") == 4
        labels = await tab.do("[...document.querySelectorAll('.label')].map(one => one.textContent)")
        assert labels[1:] == ["shm", "in process"]
        assert "ValueError: no sound" in await tab.do("document.getElementById('requests').textContent")

        await tab.do("document.querySelectorAll('#requests button')[0].click()")
        await tab.until("document.querySelectorAll('#waterfall g').length == 7")

        running.manager.shown = status({**groups, "draw": "hand"}, edges)  # live: no reload
        await tab.until("document.querySelectorAll('.node').length == 5")

        await tab.do("document.getElementById('logout').click()")
        assert "listen" not in await tab.do("document.body.textContent")
        assert await tab.do("sessionStorage.length") == 0


async def test_a_key_in_the_fragment_opens_the_page_and_leaves_the_address(tmp_path: Path) -> None:
    async with page(tmp_path, {"a": "a"}, []) as (running, tab):
        await tab.open(f"{running.url}/#key=se%26cret%20%231")
        await tab.until("document.body.dataset.ready")
        assert await tab.do("location.href") == f"{running.url}/"


async def test_names_and_messages_are_never_markup(tmp_path: Path) -> None:
    groups = {MARKUP: MARKUP, "__proto__x": "constructor", "b": "</svg><script>document.title='taken'</script>"}
    edges = [(MARKUP, "b", "normal"), ("b", "__proto__x", "stream")]
    failure = {"code": "stage_failed", "message": f"{MARKUP}\n\n\u2028data: x", "stage": MARKUP}
    settings = msgspec.structs.replace(ALL, local=True)
    async with page(tmp_path, groups, edges, settings=settings) as (running, tab):
        running.manager.records = [record(MARKUP, list(groups), error=failure)]
        running.manager.shown = {**running.manager.shown, "pipeline": MARKUP, "problem": MARKUP}
        await tab.open(running.url)
        await tab.until("document.body.dataset.ready")
        await tab.do("document.querySelector('#requests button').click()")
        await tab.until("document.querySelectorAll('#waterfall g').length")
        assert await tab.do("document.querySelectorAll('img, #main script, #graph script').length") == 0
        assert await tab.do("document.title") == f"{MARKUP} · OmniPipeline"
        assert await tab.do("document.getElementById('problem').textContent") == MARKUP


async def test_chat_and_raw_json_are_tried_and_shown_as_text(tmp_path: Path) -> None:
    async with page(tmp_path, {"a": "a"}, [], settings=msgspec.structs.replace(ALL, local=True)) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try textarea')")
        tabs = await tab.do("[...document.querySelectorAll('[role=tab]')].map(one => one.textContent)")
        assert tabs == ["Chat", "Speech", "Transcription", "Raw JSON"]
        await tab.do("document.querySelector('#try-0 textarea').focus()")
        await tab.call("Input.insertText", text="say something")
        await tab.do("document.querySelector('#try-0 .fields:last-of-type button').click()")
        await tab.until("document.querySelector('#try-0 .assistant')?.textContent == 'hello <b>you</b>'")
        sent = running.manager.last.request
        assert sent.last_text() == "say something"

        await tab.do("document.querySelector('[role=tab]:nth-child(4)').click()")
        await tab.do("[...document.querySelectorAll('#try-3 button')].find(one => one.textContent == 'Send').click()")
        await tab.until("document.querySelector('#try-3 pre').textContent.includes('results')")
        shown = json.loads(await tab.do("document.querySelector('#try-3 pre').textContent"))
        assert shown["results"] == {"talk": {"type": "text", "text": "done"}}


async def test_a_picture_is_sent_with_the_text_and_shown(tmp_path: Path) -> None:
    async with page(tmp_path, {"a": "a"}, [], settings=msgspec.structs.replace(ALL, local=True)) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-0 input[accept^=image]')")
        await tab.do(CHOOSE)
        await tab.do("document.querySelector('#try-0 textarea').value = 'what is it?'")
        await tab.do("[...document.querySelectorAll('#try-0 button')].find(one => one.textContent == 'Send').click()")
        await tab.until("document.querySelector('#try-0 .assistant')?.textContent == 'hello <b>you</b>'")
        [sent] = running.manager.last.request.media("image")
        assert (sent.data, running.manager.last.request.last_text()) == (PICTURE, "what is it?")
        assert await tab.do("document.querySelector('#try-0 .user img').naturalWidth") == 1
        assert await tab.do("document.querySelector('#try-0 input[accept^=image]').files.length") == 0


async def test_speech_can_be_played(tmp_path: Path) -> None:
    spoken = play(chunk(Audio(np.zeros(12_000, np.float32), 24_000)), ResultEvent(stage="talk", data=Text("")))
    settings = msgspec.structs.replace(ALL, local=True)
    async with page(tmp_path, {"a": "a"}, [], settings=settings, script=spoken) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-1 textarea')")
        await tab.do("document.querySelector('#try-1 textarea').value = 'say it'")
        await tab.do("[...document.querySelectorAll('#try-1 button')].find(one => one.textContent == 'Send').click()")
        await tab.until("document.querySelector('#try-1 audio').duration > 0")
        assert await tab.do("document.querySelector('#try-1 audio').duration") == pytest.approx(0.5, abs=0.01)
        assert running.manager.last.request.last_text() == "say it"


async def test_the_microphone_is_sent_as_a_wav_file(tmp_path: Path) -> None:
    async with page(tmp_path, {"a": "a"}, [], settings=msgspec.structs.replace(ALL, local=True)) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-2 button')")
        await tab.do("document.querySelector('[role=tab]:nth-child(3)').click()")
        record_it = "[...document.querySelectorAll('#try-2 button')][0]"
        await tab.do(f"{record_it}.click()")
        await tab.until(f"{record_it}.textContent == 'Stop recording'")
        await tab.do("new Promise(done => setTimeout(done, 300))")  # a sound has a length
        await tab.do(f"{record_it}.click()")
        await tab.until("!document.querySelector('#try-2 audio').hidden")
        await tab.do("[...document.querySelectorAll('#try-2 button')].find(one => one.textContent == 'Send').click()")
        await tab.until("document.querySelector('#try-2 pre').textContent.length")
        assert running.manager.last.request.kind == "transcription"


async def test_fifty_stages_and_500_instances_stay_readable_on_any_screen(tmp_path: Path) -> None:
    groups = {f"stage-{number:02d}": f"group-{number:02d}" for number in range(50)}
    names = list(groups)
    edges = [(source, target, "normal") for source, target in itertools.pairwise(names)]
    settings = msgspec.structs.replace(ALL, local=True)
    async with page(tmp_path, groups, edges, instances=10, settings=settings) as (running, tab):
        for look in ({**TALL}, {**TALL, "dark": True}, {"width": 390, "height": 900, "dark": True}):
            await tab.look(**look)
            await tab.open(running.url)
            await tab.until("document.body.dataset.ready")
            assert await tab.do("document.querySelectorAll('.node').length") == 51
            assert await tab.do("document.documentElement.scrollWidth") <= look["width"]
            assert await tab.do(OVERLAPS) == 0
            assert "200 of 500" in await tab.do("document.getElementById('instance-count').textContent")
            assert await tab.do(CONTRAST) >= 4.5
        await tab.do("document.getElementById('instance-filter').value = 'group-07'")
        await tab.do("document.getElementById('instance-filter').oninput()")
        assert await tab.do("document.querySelectorAll('#instances tbody tr').length") == 10


async def test_the_share_of_a_loading_instance_is_shown_and_follows(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(ALL, local=True)
    async with page(tmp_path, {"llm": "llm", "voice": "voice"}, [], instances=2, settings=settings) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.body.dataset.ready")
        row = "document.querySelector('#instances tbody tr')"
        await tab.until(f"{row}.cells[1].textContent === 'loading 42 %'")
        assert await tab.do(f"{row}.cells[9].textContent") == "llm has loaded 1.2 GB of 2.8 GB"
        assert await tab.do("document.querySelector('#groups tbody tr').cells[3].textContent") == "1 (42 %)"
        assert await tab.do(f"{row}.cells[1].className") == "loading"
        if folder := os.environ.get("OMNI_LOOK"):
            await tab.picture(Path(folder) / "loading.png")

        groups = {"llm": "llm", "voice": "voice"}
        further = status(groups, [], instances=2, loading=1)
        further["instances"][0]["loading"] = [
            {**LOADING, "done": 2.1e9},
            {"stage": "b", "done": 7, "total": 0, "unit": ""},
        ]
        running.manager.shown = further  # live: no reload
        await tab.until(f"{row}.cells[1].textContent === 'loading 75 %'")
        assert "b has loaded 7" in await tab.do(f"{row}.cells[9].textContent")

        running.manager.shown = status(groups, [], instances=2)
        await tab.until(f"{row}.cells[1].textContent === 'ready' && {row}.cells[9].textContent === ''")


async def test_edges_of_one_pair_run_beside_each_other(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(ALL, local=True)
    edges: list[Edge] = [("a", "b", "normal"), ("a", "b", "stream")]
    async with page(tmp_path, {"a": "left", "b": "right"}, edges, settings=settings) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.body.dataset.ready")
        ways = "new Set([...document.querySelectorAll('path.edge')].map(one => one.getAttribute('d'))).size"
        assert await tab.do(ways) == 3, "one of them from the coordinator"


async def test_the_graph_and_the_requests_are_reached_by_the_keyboard(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(ALL, local=True)
    async with page(tmp_path, {"a": "left", "b": "right"}, [("a", "b", "normal")], settings=settings) as (running, tab):
        running.manager.records = [record("one", ["a", "b"])]
        await tab.open(running.url)
        await tab.until("document.body.dataset.ready")
        seen = []
        for _ in range(40):
            await tab.press("Tab", code=9)
            seen.append(await tab.do("document.activeElement.getAttribute('aria-label') || document.activeElement.id"))
            if str(seen[-1]).startswith("b:"):
                break
        await tab.press("Enter", code=13, text="\r")
        assert await tab.do("document.getElementById('instance-filter').value") == "right"
        await tab.do("document.querySelector('#requests button').focus()")
        await tab.press("Enter", code=13, text="\r")
        await tab.until("document.querySelectorAll('#waterfall g').length")


async def test_the_routes_are_documented_by_a_page(tmp_path: Path) -> None:
    async with page(tmp_path, {"a": "a"}, [], settings=msgspec.structs.replace(ALL, local=True)) as (running, tab):
        await tab.open(f"{running.url}/docs")
        await tab.until("document.body.dataset.ready")
        assert "POST /v1/chat/completions" in await tab.do("document.getElementById('routes').textContent")


#: A picture of one pixel, chosen as a file.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
CHOOSE = f"""(() => {{
  const chosen = new DataTransfer(), bytes = Uint8Array.from({list(PICTURE)});
  chosen.items.add(new File([bytes], 'pixel.png', {{type: 'image/png'}}));
  document.querySelector('#try-0 input[accept^=image]').files = chosen.files;
}})()"""

#: Pairs of nodes that cover each other.
OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll('.node .box')].map(one => one.getBoundingClientRect());
  const cover = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && cover(a, b))).length;
})()"""

#: The least contrast (WCAG) of a text's colour with the page's ground.
CONTRAST = """(() => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll('main p, main td, main th, main b, main label, main a')].map(one => {
    const own = light(getComputedStyle(one).color);
    return (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
  }));
})()"""

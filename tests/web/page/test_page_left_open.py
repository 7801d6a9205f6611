"""The page in a tab that stays open: over losses of its connection, other pipelines, keys, and what its user does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stage_runtime.coordinator.events import ResultEvent
from stage_runtime.wire.values import Audio, Text
from tests.web.page.browser import chromium
from tests.web.page.opened import KEYED, LOCAL, page
from tests.web.page.page_pipelines import record, samples, status
from tests.web.running import start
from tests.web.scripted_manager import Event, ScriptedHandle, chunk, play

pytestmark = [pytest.mark.browser, pytest.mark.debian("chromium"), pytest.mark.timeout(300)]

ONE = {"a": "a"}
FREE = "[...document.querySelectorAll('#try-0 button')].some(one => one.textContent == 'Send' && !one.disabled)"
READY = "document.body.dataset.ready"
LIVE = "document.getElementById('live').textContent"
CARDS = "[...document.querySelectorAll('.card')].filter(one => !one.hidden).map(one => one.dataset.name)"


def pressed(panel: int, text: str) -> str:
    """The script that presses a button of a panel of the place to try."""
    return f"[...document.querySelectorAll('#try-{panel} button')].find(one => one.textContent == '{text}').click()"


async def test_what_is_over_is_not_shown_any_more(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=LOCAL) as (running, tab):
        running.manager.shown = {**running.manager.shown, "awaiting_instance": 3}
        await tab.open(running.url)
        await tab.until(f"{CARDS}.includes('wait for an instance')")
        running.manager.shown = {**running.manager.shown, "awaiting_instance": 0}
        await tab.until(f"!{CARDS}.includes('wait for an instance')")
        running.manager.shown = {**running.manager.shown, "awaiting_instance": 1}
        await tab.until(f"{CARDS}.includes('wait for an instance')")


async def test_a_picked_request_is_followed_to_its_end_and_another_one_shows_nothing_of_it(tmp_path: Path) -> None:
    facts = "document.getElementById('request-facts').textContent"
    async with page(tmp_path, {"a": "a", "b": "b"}, [], settings=LOCAL, refused="404") as (running, tab):
        known = record("known", ["a"], state="running", total_ms=None)
        running.manager.records = [known, record("forgotten", ["a"], admitted_at=1.0)]
        await tab.open(running.url)
        await tab.until("document.querySelectorAll('#requests button').length == 2")
        await tab.do("document.querySelectorAll('#requests button')[0].click()")
        await tab.until(f"{facts}.includes('running')")
        running.manager.records = [record("known", ["a", "b"]), running.manager.records[1]]
        await tab.until(f"{facts}.includes('completed') && document.querySelectorAll('#waterfall g').length == 5")

        running.manager.forgotten = {"forgotten"}
        await tab.do("document.querySelectorAll('#requests button')[1].click()")
        await tab.until("document.getElementById('request-error').textContent.includes('not known')")
        assert await tab.do("document.getElementById('waterfall-title').textContent") == "Waterfall of forgotten"
        assert await tab.do("document.querySelectorAll('#waterfall g').length") == 0
        assert await tab.do(facts) == ""


async def test_a_window_that_is_resized_asks_for_nothing(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=LOCAL) as (running, tab):
        running.manager.records = [record("one", ["a"])]
        await tab.open(running.url)
        await tab.until("document.querySelector('#requests button')")
        await tab.do("document.querySelector('#requests button').click()")
        await tab.until("document.querySelectorAll('#waterfall g').length")
        before = len(tab.asked)
        await tab.look(width=700, height=1600)
        await tab.until("document.getElementById('waterfall').getAttribute('viewBox').split(' ')[2] < 700")
        assert [url for url in tab.asked[before:] if "/page/requests/" in url] == []


async def test_a_stage_that_is_chosen_shows_the_instances_of_its_own_group_alone(tmp_path: Path) -> None:
    groups = {"say": "talk", "shout": "talker", "rest": "alk"}
    async with page(tmp_path, groups, [], settings=LOCAL) as (running, tab):
        await tab.open(running.url)
        await tab.until(READY)
        choose = "[...document.querySelectorAll('.node')].find(one => one.ariaLabel?.startsWith('%s:'))"
        shown = "[...document.querySelectorAll('#instances tbody tr')].map(one => one.cells[0].textContent)"
        for stage, group in groups.items():
            await tab.do(f"{choose % stage}.dispatchEvent(new MouseEvent('click'))")
            assert await tab.do(shown) == [group] * 2


async def test_another_pipeline_at_the_same_address_is_tried_under_its_own_name(tmp_path: Path) -> None:
    first, second = (msgspec.structs.replace(LOCAL, model=name, serves=serves) for name, serves in SERVED)
    async with start(HELLO, first) as one, start(HELLO, second) as two, relay(one.url) as line:
        for running in (one, two):
            running.manager.shown, running.manager.samples = status(ONE, []), samples(ONE)
        async with chromium(tmp_path) as tab:
            await tab.open(line.url)
            await tab.until("document.querySelectorAll('[role=tab]').length == 2")
            line.move(two.url)
            await tab.until("document.querySelectorAll('[role=tab]').length == 3")
            await tab.do("document.querySelector('#try-0 textarea').value = 'hi'")
            await tab.do(pressed(0, "Send"))
            await tab.until("document.querySelector('#try-0 .assistant')?.textContent == 'hello'")
            assert two.manager.last.request.kind == "chat"


async def test_a_connection_that_says_nothing_is_made_anew(tmp_path: Path) -> None:
    async with start(HELLO, LOCAL) as running, relay(running.url) as line, chromium(tmp_path) as tab:
        running.manager.shown, running.manager.samples = status(ONE, []), samples(ONE)
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=HURRIED)
        await tab.open(line.url)
        await tab.until(READY)
        line.freeze()
        running.manager.shown = status({"a": "a", "b": "b"}, [])
        await tab.until("document.querySelectorAll('.node').length == 3")
        assert await tab.do(LIVE) == "live"


async def test_a_tab_that_nobody_sees_lets_go_of_its_stream(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=LOCAL) as (running, tab):
        for script in (HURRIED, KEEP_SIGNALS, HIDDEN):
            await tab.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        await tab.open(running.url)
        await tab.until(READY)
        await tab.do("window.hide(true)")
        await tab.until("window.signals[0].aborted")
        running.manager.shown = status({"a": "a", "b": "b"}, [])
        await tab.do("window.hide(false)")
        await tab.until(f"document.querySelectorAll('.node').length == 3 && {LIVE} == 'live'")
        assert await tab.do("window.signals.length") == 2


async def test_a_key_that_no_request_can_carry_is_asked_for_again(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=KEYED) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.activeElement.id == 'key'")
        await tab.call("Input.insertText", text="se&cret\u200b #1")
        await tab.press("Enter", code=13, text="\r")
        await tab.until("document.getElementById('login-why').textContent.includes('no request can carry')")
        assert not await tab.do("document.getElementById('login').hidden")
        assert await tab.do("sessionStorage.length") == 0
        await tab.call("Input.insertText", text="se&cret #1")
        await tab.press("Enter", code=13, text="\r")
        await tab.until(READY)


async def test_a_key_in_the_fragment_is_taken_as_it_is_written_and_whenever_it_comes(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=KEYED, refused="401") as (running, tab):
        await tab.open(f"{running.url}/#key=100%")
        await tab.until(f"{LIVE} == 'locked'")
        assert await tab.do("location.href") == f"{running.url}/"
        await tab.do("location.hash = '#key=se%26cret%20%231'")  # the same page, in the same tab
        await tab.until(READY)
        assert await tab.do("location.href") == f"{running.url}/"


async def test_a_key_that_is_sent_twice_opens_one_stream(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=KEYED) as (running, tab):
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=KEEP_SIGNALS)
        await tab.open(running.url)
        await tab.until("document.activeElement.id == 'key'")
        await tab.do(
            "for (const _ of [1, 2]) { document.getElementById('key').value = 'se&cret #1';"
            " document.getElementById('login').requestSubmit(); }"
        )
        await tab.until(READY)
        assert await tab.do("window.signals.filter(one => !one.aborted).length") == 1


async def test_a_page_of_routes_keeps_the_key_while_the_server_is_away(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=KEYED) as (running, tab):
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=AWAY)
        await tab.open(f"{running.url}/docs#key=se%26cret%20%231")
        await tab.until("document.getElementById('routes').textContent.includes('away')")
        assert await tab.do("document.getElementById('login').hidden")
        assert await tab.do("sessionStorage.length") == 1


async def test_a_message_may_be_written_while_the_last_one_is_answered(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def slow(handle: ScriptedHandle) -> AsyncIterator[Event]:
        yield chunk(Text("hel"))
        await more.wait()
        yield chunk(Text("lo"), index=1)
        yield ResultEvent(stage="talk", data=Text("hello"))

    said = "document.querySelector('#try-0 .assistant')?.textContent"
    text = "document.querySelector('#try-0 textarea')"
    async with page(tmp_path, ONE, [], settings=LOCAL, script=slow, refused="429") as (running, tab):
        await tab.open(running.url)
        await tab.until(text)
        await tab.do(f"{text}.value = 'first'")
        await tab.do(pressed(0, "Send"))
        await tab.until(f"{said} == 'hel'")
        assert await tab.do(f"{text}.value") == ""
        await tab.do(f"{text}.value = 'second'")
        more.set()
        await tab.until(
            f"{said} == 'hello' && document.querySelector('#try-0 [role=status]').textContent.includes('whole')"
        )
        assert await tab.do(f"{text}.value") == "second"

        running.manager.cap = 0  # a message that was refused is there to be sent again
        await tab.do(pressed(0, "Send"))
        await tab.until("document.querySelector('#try-0 .error').textContent.includes('rate_limited')")
        assert await tab.do(f"{text}.value") == "second"


async def test_a_new_conversation_has_nothing_of_an_answer_that_was_under_way(tmp_path: Path) -> None:
    async def endless(handle: ScriptedHandle) -> AsyncIterator[Event]:
        yield chunk(Text("hel"))
        if len(handle.request.inputs["messages"]) == 1 and handle.request.last_text() == "first":
            await handle.ended.wait()
        yield ResultEvent(stage="talk", data=Text("hel"))

    said = "[...document.querySelectorAll('#try-0 .assistant')].map(one => one.textContent)"
    text = "document.querySelector('#try-0 textarea')"
    async with page(tmp_path, ONE, [], settings=LOCAL, script=endless) as (running, tab):
        await tab.open(running.url)
        await tab.until(text)
        await tab.do(f"{text}.value = 'first'")
        await tab.do(pressed(0, "Send"))
        await tab.until(f"{said}[0] == 'hel'")
        await tab.do(pressed(0, "New conversation"))
        await tab.until(FREE)
        await tab.do(f"{text}.value = 'second'")
        await tab.do(pressed(0, "Send"))
        await tab.until(f"{said}[0] == 'hel'")
        assert [one["content"][0]["text"] for one in running.manager.last.request.inputs["messages"]] == ["second"]


async def test_sounds_of_a_conversation_that_is_over_take_no_memory(tmp_path: Path) -> None:
    spoken = play(*SPOKEN)
    async with page(tmp_path, ONE, [], settings=LOCAL, script=spoken) as (running, tab):
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=COUNT_URLS)
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-0 textarea')")
        await tab.do(ALOUD)
        await tab.do("document.querySelector('#try-0 textarea').value = 'sing'")
        await tab.do(pressed(0, "Send"))
        await tab.until("document.querySelector('#try-0 .assistant audio')")
        assert "voice" not in running.manager.last.request.params  # which of them there are, the page does not know
        assert await tab.do("window.urls.size") == 1
        await tab.do(pressed(0, "New conversation"))
        assert await tab.do("window.urls.size") == 0


async def test_a_sound_file_is_sent_under_its_own_format(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=LOCAL) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-0 input[accept^=audio]')")
        for given, mime in {"audio/ogg": "audio/ogg", "audio/x-wav": "audio/wav", "audio/mpeg": "audio/mpeg"}.items():
            await tab.do(CHOOSE % json.dumps(given))
            await tab.do(pressed(0, "Send"))
            await tab.until("document.querySelector('#try-0 input[accept^=audio]').files.length == 0")
            await tab.until(FREE)
            assert running.manager.last.request.media("audio")[-1].mime == mime


async def test_the_microphone_is_let_go_of_whatever_happens(tmp_path: Path) -> None:
    async with page(tmp_path, ONE, [], settings=KEYED) as (running, tab):
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=KEEP_STREAMS)
        await tab.open(f"{running.url}/#key=se%26cret%20%231")
        await tab.until("document.querySelector('#try-2 button')")
        record_it = "[...document.querySelectorAll('#try-2 button')][0]"
        await tab.do(f"{record_it}.click(); {record_it}.click()")  # the second one while the browser asks its user
        await tab.until(f"{record_it}.textContent == 'Stop recording'")
        assert await tab.do("window.streams.length") == 1
        assert await tab.do("document.querySelector('#try-2 .error').textContent") == ""

        await tab.do("window.streams[0].getTracks().forEach(one => one.stop())")  # pulled out
        await tab.do("new Promise(done => setTimeout(done, 300))")
        await tab.do(f"{record_it}.click()")
        await tab.until(f"!{record_it}.disabled")
        assert await tab.do(f"{record_it}.textContent") == "Record"

        await tab.do(f"{record_it}.click()")
        await tab.until(f"{record_it}.textContent == 'Stop recording'")
        await tab.do("document.getElementById('logout').click()")
        await tab.until("window.streams[1].getTracks().every(one => one.readyState == 'ended')")


async def test_numbers_are_shown_as_they_came(tmp_path: Path) -> None:
    counted = play(ResultEvent(stage="talk", data={"big": 9007199254740993, "none": [], "deep": [{"a": '{"'}, None]}))
    async with page(tmp_path, ONE, [], settings=LOCAL, script=counted) as (running, tab):
        await tab.open(running.url)
        await tab.until("document.querySelector('#try-3 textarea')")
        await tab.do(pressed(3, "Send"))
        shown = "document.querySelector('#try-3 pre').textContent"
        await tab.until(f"{shown}.includes('\\n')")
        made = json.loads(await tab.do(shown))
        assert made["results"]["talk"]["big"] == 9007199254740993
        assert await tab.do(shown) == json.dumps(made, indent=2)


SERVED: list[tuple[str, Any]] = [("one", ("chat",)), ("two", ("chat", "speech"))]
SPOKEN = (chunk(Audio(np.zeros(2_400, np.float32), 24_000)), ResultEvent(stage="talk", data=Text("la")))
HELLO = play(chunk(Text("hello")), ResultEvent(stage="talk", data=Text("hello")))
#: Long waits of the page's are shorter, not the tests'.
HURRIED = """const later = setTimeout;
window.setTimeout = (work, ms, ...rest) => later(work, ms >= 10000 ? 4000 : ms, ...rest);"""
HIDDEN = """let away = false;
Object.defineProperty(document, 'hidden', {get: () => away});
window.hide = wanted => { away = wanted; document.dispatchEvent(new Event('visibilitychange')); };"""
AWAY = """const get = fetch;
window.fetch = (path, given) => path === '/openapi.json' ? Promise.reject(new TypeError('away')) : get(path, given);"""
KEEP_STREAMS = """window.streams = [];
const media = navigator.mediaDevices, ask = media?.getUserMedia.bind(media);
if (media) media.getUserMedia = async asked => {
  const found = await ask(asked);
  window.streams.push(found);
  return found;
};"""
ALOUD = """[...document.querySelectorAll('#try-0 label')]
  .find(one => one.textContent.startsWith('answer aloud')).control.checked = true"""
COUNT_URLS = """window.urls = new Set();
const make = URL.createObjectURL, take = URL.revokeObjectURL;
URL.createObjectURL = blob => { const made = make(blob); window.urls.add(made); return made; };
URL.revokeObjectURL = url => { window.urls.delete(url); take(url); };"""
KEEP_SIGNALS = """window.signals = [];
const get = fetch;
window.fetch = (path, given) => {
  if (path === '/page/events') window.signals.push(given.signal);
  return get(path, given);
};"""
CHOOSE = """(() => {
  const chosen = new DataTransfer();
  chosen.items.add(new File([new Uint8Array(8)], 'sound', {type: %s}));
  document.querySelector('#try-0 input[accept^=audio]').files = chosen.files;
})()"""


class Relay:
    """A line to a server that may be moved to another one, or freeze: its connections stay open and say nothing."""

    def __init__(self) -> None:
        self.url = ""
        self._target = ""
        self._pairs: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.removeprefix("http://").rpartition(":")
        back, forth = await asyncio.open_connection(host, int(port))
        tasks = [asyncio.create_task(_carry(reader, forth)), asyncio.create_task(_carry(back, writer))]
        self._pairs += [(tasks[0], forth), (tasks[1], writer)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def freeze(self) -> None:
        """The connections that there are carry nothing more."""
        for task, _writer in self._pairs:
            task.cancel()

    def move(self, url: str) -> None:
        """Cut all connections; the next ones lead to another server."""
        self.freeze()
        for _task, writer in self._pairs:
            writer.close()
        self._pairs, self._target = [], url


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[Relay]:
    line = Relay()
    line.move(url)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.move("")

"""Debian's Chromium, driven by the DevTools protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.asyncio.client import ClientConnection, connect

from tests import debian

PATIENCE_S: Final = 60.0
LOOK_AGAIN_S: Final = 0.05


class Tab:
    """One tab. ``problems``: what its console has said, exceptions, violations of the page's policy."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []  #: URLs of its requests.
        self._socket = socket
        self._loaded = asyncio.Event()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(PATIENCE_S):
            return await self._waiting[number]

    async def read(self) -> None:
        async for message in self._socket:
            self._take(json.loads(message))

    def _take(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        match said.get("method"):
            case None:
                self._waiting.pop(said["id"]).set_result(said.get("result") or {"error": said.get("error")})
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:800])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:800])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    async def do(self, script: str) -> Any:
        """The value of an expression; of a promise what it becomes."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is truthy."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self.do(f"!!({condition})"):
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise AssertionError(f"never: {condition}; {self.problems}") from None

    async def open(self, url: str) -> None:
        """Go away from what is shown, then there: also to an address that differs in its fragment only."""
        for place in ("about:blank", url):
            self._loaded.clear()
            await self.call("Page.navigate", url=place)
            async with asyncio.timeout(PATIENCE_S):
                await self._loaded.wait()

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """The size of its window and the theme of its user."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[theme])

    async def press(self, key: str, *, code: int = 0, text: str = "") -> None:
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def picture(self, path: Path, *, whole: bool = False) -> bytes:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(data := base64.b64decode(answer["data"]))
        return data


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, whose profile is in ``folder``."""
    program = debian.program("chromium")
    assert program is not None
    process = await asyncio.create_subprocess_exec(
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--user-data-dir={folder / 'chromium'}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        socket = await _socket_of(folder / "chromium" / "DevToolsActivePort", process)
        async with connect(socket, max_size=None, proxy=None) as connection:
            tab = Tab(connection)
            reading = asyncio.create_task(tab.read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            try:
                yield tab
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _socket_of(port_file: Path, process: asyncio.subprocess.Process) -> str:
    """The address of its first tab."""
    async with asyncio.timeout(PATIENCE_S):
        while not port_file.exists() or not port_file.read_text().strip():
            assert process.returncode is None, "chromium has ended"
            await asyncio.sleep(LOOK_AGAIN_S)
        port = port_file.read_text().splitlines()[0]
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                tabs = (await client.get(f"http://127.0.0.1:{port}/json")).json()
                found = [one["webSocketDebuggerUrl"] for one in tabs if one["type"] == "page"]
                if found:
                    return str(found[0])
                await asyncio.sleep(LOOK_AGAIN_S)

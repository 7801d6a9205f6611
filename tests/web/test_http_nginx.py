"""A chat behind Debian's nginx with its own configuration: the first token is not held back, a client that leaves is
noticed.

Missing nginx is a failure under CI and a skip elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from stage_runtime.wire.values import Text
from tests import debian
from tests.ports import free_port
from tests.web.running import PATIENCE_S, start
from tests.web.scripted_manager import chunk, play

pytestmark = [pytest.mark.nginx, pytest.mark.debian("nginx-light")]
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
SITE = """
server {
    listen 127.0.0.1:%(port)d;
    location / { proxy_pass %(url)s; include /etc/nginx/proxy_params; }
}
"""


@asynccontextmanager
async def nginx(folder: Path, url: str) -> AsyncIterator[str]:
    """Debian's nginx.conf as it is, but for where it logs, listens and runs."""
    binary = debian.program("nginx")
    assert binary is not None
    port = free_port()
    (folder / "site.conf").write_text(SITE % {"port": port, "url": url})
    text = Path("/etc/nginx/nginx.conf").read_text()
    changes = {
        "/run/nginx.pid": f"{folder}/nginx.pid",
        "/var/log/nginx/": f"{folder}/",
        "include /etc/nginx/sites-enabled/*;": f"include {folder}/site.conf;",
    }
    for old, new in changes.items():
        assert old in text, f"Debian's nginx.conf has changed: no {old}"
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        binary, "-c", f"{folder}/nginx.conf", "-g", "daemon off;", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await listening(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def test_each_token_passes_before_the_next_is_made(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script = play(chunk(Text("first")), gate, chunk(Text("second"), index=1), asyncio.Event())
    async with start(script) as running, nginx(tmp_path, running.url) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
                pieces = answer.aiter_text()
                assert "first" in await asyncio.wait_for(anext(pieces), PATIENCE_S)
                gate.set()
                assert "second" in await asyncio.wait_for(anext(pieces), PATIENCE_S)


@pytest.mark.parametrize(("head", "passes"), [(b"", False), (b"x-accel-buffering: no\r\n", True)])
async def test_nginx_buffers_an_answer_unless_a_header_forbids_it(head: bytes, passes: bool, tmp_path: Path) -> None:
    """The control: what this set-up does to an answer that is not chunked, with and without the header we send."""
    gate = asyncio.Event()
    apart_s = 0.0

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n" + head + b"\r\n")
        await writer.drain()
        await asyncio.sleep(apart_s)  # a packet of its own: nginx passes on what came with the head
        writer.write(b"first")
        await gate.wait()
        writer.close()

    async def first_bytes(client: httpx.AsyncClient) -> str:
        async with client.stream("GET", "/") as answer:
            return await anext(answer.aiter_text())

    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        nginx(tmp_path, f"http://127.0.0.1:{port}") as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for apart_s in (0.05, 0.5, 2.0, 5.0):
            gate.clear()
            reading = asyncio.ensure_future(first_bytes(client))
            came, _ = await asyncio.wait({reading}, timeout=PATIENCE_S if passes else 2 * apart_s)
            gate.set()
            assert await asyncio.wait_for(reading, PATIENCE_S) == "first"
            if bool(came) is passes:
                break
    assert bool(came) is passes


async def test_a_client_that_leaves_nginx_ends_its_request(tmp_path: Path) -> None:
    async with start(play(chunk(Text("first")), asyncio.Event())) as running, nginx(tmp_path, running.url) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
                await anext(answer.aiter_text())
        async with asyncio.timeout(PATIENCE_S):
            await running.manager.last.ended.wait()
    assert running.manager.last.outcome == "cancelled"


async def listening(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

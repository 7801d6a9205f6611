"""Fetching media by URL: from allowed hosts, bounded, and never from inside the network. A real little server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.web.reading.fetching import MAX_FETCHES, Fetcher, is_public
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.translating.media import MediaUrl
from stage_runtime.wire.values import Media

PNG = b"\x89PNG" + b"x" * 2000


class Site:
    """Answers GET by path; remembers the Host headers."""

    def __init__(self) -> None:
        self.port = 0
        self.hosts: list[str] = []
        self.here = self.most = 0  #: Connections now, and at most.
        self.idle = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            await self._answer(reader, writer)
        finally:
            self.here -= 1
            if not self.here:
                self.idle.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.hosts.append(next(line[6:] for line in head.split("\r\n") if line.lower().startswith("host: ")))
        match head.split(" ")[1].partition("?")[0]:
            case "/a.png":
                answer = b"200 OK\r\ncontent-type: image/png\r\ncontent-length: %d\r\n\r\n" % len(PNG) + PNG
            case "/moved":
                answer = b"302 Found\r\nlocation: /a.png\r\ncontent-length: 0\r\n\r\n"
            case "/away":
                answer = b"302 Found\r\nlocation: http://127.0.0.2:%d/a.png\r\ncontent-length: 0\r\n\r\n" % self.port
            case "/moved-nowhere":
                answer = b"302 Found\r\ncontent-length: 0\r\n\r\n"
            case "/moved-badly":
                answer = b"302 Found\r\nlocation: http:////]x\r\ncontent-length: 0\r\n\r\n"
            case "/unchanged":
                answer = b"304 Not Modified\r\nlocation: /a.png\r\n\r\n"
            case "/round":
                answer = b"302 Found\r\nlocation: /round\r\ncontent-length: 0\r\n\r\n"
            case "/page":
                answer = b"200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi"
            case "/odd-type":
                answer = b"200 OK\r\ncontent-type: image/p n\xffg\r\ncontent-length: 2\r\n\r\nhi"
            case "/long-type":
                answer = b"200 OK\r\ncontent-type: image/%s\r\ncontent-length: 2\r\n\r\nhi" % (b"x" * 9000)
            case "/endless":
                answer = b"200 OK\r\ncontent-type: image/png\r\n\r\n" + b"x" * 9000
            case "/slow":
                await reader.read()
                writer.close()
                return
            case _:
                answer = b"404 Not Found\r\ncontent-length: 0\r\n\r\n"
        writer.write(b"HTTP/1.1 " + answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def fetcher(*hosts: str, timeout_s: float = 5.0) -> Fetcher:
    return Fetcher(WebSettings(model="m", media_hosts=hosts, media_timeout_s=timeout_s, max_body_bytes=4000))


def unheld(nbytes: int) -> None:
    """Bytes that count nowhere."""


def place(url: str, type: str = "image") -> MediaUrl:
    return MediaUrl(url, type, "messages[0].content[0].image_url.url")


@pytest.mark.parametrize("path", ["a.png", "moved"])
async def test_an_image_of_an_allowed_host_is_fetched_redirects_on_it_too(path: str) -> None:
    held: list[int] = []
    async with site() as there:
        url = f"http://127.0.0.1:{there.port}/{path}"
        found = await fetcher(f"127.0.0.1:{there.port}").fetch([place(url)], held.append)
    assert found == {url: Media("image", "image/png", PNG)}
    assert sum(held) == len(PNG)
    assert set(there.hosts) == {f"127.0.0.1:{there.port}"}
    assert len(there.hosts) == (1 if path == "a.png" else 2)


async def test_a_url_that_is_fetched_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as there:
        fetching = fetcher(f"127.0.0.1:{there.port}")
        with caplog.at_level(logging.INFO):
            await fetching.fetch([place(f"http://127.0.0.1:{there.port}/a.png?signature=secret")], unheld)
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("away", "it redirects to another host"),
        ("round", "more than 3 redirects"),
        ("page", "it is text/html, not image/…"),
        ("odd-type", "its host names no media type"),
        ("long-type", "its host names no media type"),
        ("endless", "the request's media are larger than 4000 bytes"),
        ("slow", "not fetched within 0.3 s"),
        ("nothing", "its host answered 404"),
        ("moved-nowhere", "its host answered 302"),
        ("moved-badly", "not fetched: ValueError"),
        ("unchanged", "its host answered 304"),
    ],
)
async def test_what_is_no_image_in_time_and_size_is_refused(path: str, problem: str) -> None:
    async with site() as there:
        with pytest.raises(InvalidRequest) as caught:
            url = f"http://127.0.0.1:{there.port}/{path}"
            await fetcher(f"127.0.0.1:{there.port}", timeout_s=0.3 if path == "slow" else 5.0).fetch(
                [place(url)], unheld
            )
    assert caught.value.message == f"messages[0].content[0].image_url.url: {problem}"
    assert caught.value.param == "messages[0].content[0].image_url.url"


async def test_media_count_as_often_as_a_request_names_them_and_are_fetched_once() -> None:
    """Each use is a copy of its own on the way to a stage."""
    held: list[int] = []
    async with site() as there:
        url = f"http://127.0.0.1:{there.port}/a.png"
        settings = WebSettings(model="m", media_hosts=(f"127.0.0.1:{there.port}",), max_body_bytes=3 * len(PNG))
        one = Fetcher(settings)
        found = await one.fetch([place(url)] * 3, held.append)
        with pytest.raises(InvalidRequest, match="the request's media are larger than"):
            await one.fetch([place(url)] * 4, unheld)
    assert found == {url: Media("image", "image/png", PNG)}
    assert sum(held) == 3 * len(PNG)
    assert len(there.hosts) == 2


@pytest.mark.proves("abusive-client")
async def test_media_of_one_request_are_bounded_as_a_sum_and_in_number() -> None:
    async with site() as there:
        urls = [f"http://127.0.0.1:{there.port}/a.png?{number}" for number in range(33)]
        one = fetcher(f"127.0.0.1:{there.port}")
        with pytest.raises(InvalidRequest, match="the request's media are larger than 4000 bytes"):
            await one.fetch(map(place, urls[:2]), unheld)  # 2,004 bytes each
        with pytest.raises(InvalidRequest, match="a request may name 32 URLs"):
            await one.fetch(map(place, urls), unheld)


async def test_media_count_as_what_is_in_flight_and_when_one_fails_the_others_end() -> None:
    def full(nbytes: int) -> None:
        raise RequestError("rate_limited", "full")

    async with site() as there:
        urls = [f"http://127.0.0.1:{there.port}/{path}" for path in ("slow", "a.png", "slow?2")]
        with pytest.raises(RequestError) as caught:
            await fetcher(f"127.0.0.1:{there.port}", timeout_s=60).fetch(map(place, urls), full)
        assert caught.value.code == "rate_limited"
        async with asyncio.timeout(60):
            await there.idle.wait()  # nobody is connected any more


async def test_fetches_of_all_requests_take_turns() -> None:
    async with site() as there:
        one = fetcher(f"127.0.0.1:{there.port}", timeout_s=60.0)  # of a busy machine: those that wait are many
        url = f"http://127.0.0.1:{there.port}/a.png"
        await asyncio.gather(*(one.fetch([place(f"{url}?{number}")], unheld) for number in range(100)))
    assert there.most <= MAX_FETCHES
    assert len(there.hosts) == 100


@pytest.mark.parametrize(
    ("allowed", "host", "problem"),
    [
        ((), "127.0.0.1", "is not one of the pipeline's mediaHosts"),
        (("example.com",), "127.0.0.1", "is not one of the pipeline's mediaHosts"),
        (("127.0.0.1",), "127.0.0.1", "is not one of the pipeline's mediaHosts"),  # without the port: only 80 and 443
        (("example.com",), "example.com@127.0.0.1", "is not one of the pipeline's mediaHosts"),
        (("localhost:{port}",), "localhost", "its host is not on the public Internet"),
    ],
)
async def test_no_host_is_reached_that_is_not_named_or_is_inside(
    allowed: tuple[str, ...], host: str, problem: str
) -> None:
    async with site() as there:
        names = [name.format(port=there.port) for name in allowed]
        with pytest.raises(InvalidRequest, match=problem):
            await fetcher(*names).fetch([place(f"http://{host}:{there.port}/a.png")], unheld)
    assert there.hosts == []


@pytest.mark.parametrize("allowed", [False, True])
async def test_certificates_are_read_once_off_the_loop_and_not_for_a_host_that_is_refused(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        made.append(threading.get_ident())
        return make(*args, **options)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    async with site() as there:
        places = [place(f"http://127.0.0.1:{there.port}/a.png?{number}") for number in range(4)]
        one = fetcher(*([f"127.0.0.1:{there.port}"] if allowed else []))
        for _ in range(2):
            with contextlib.suppress(InvalidRequest):
                await one.fetch(places[:1], unheld)
                await asyncio.gather(*(one.fetch([each], unheld) for each in places))
    assert len(made) == (1 if allowed else 0)
    assert threading.get_ident() not in made


@pytest.mark.parametrize(
    "url", ["ftp://h/a", "file:///etc/passwd", "//h/a", "a.png", "http://", "http://[::", "http://h\x00/"]
)
async def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        await fetcher("h").fetch([place(url)], unheld)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_addresses_inside_the_network_are_not_public_however_they_are_written(address: str, public: bool) -> None:
    assert is_public(address) is public

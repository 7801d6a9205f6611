"""HTTPS with real certificates: over the sockets of a real server, which changes its certificate as it serves."""

from __future__ import annotations

import asyncio
import gc
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from stage_runtime.errors import ConfigurationError
from stage_runtime.web.app import make_app
from stage_runtime.web.listening import certificates
from stage_runtime.web.listening.certificates import CertificatePair, Certificates
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.server import Server
from stage_runtime.web.sound.pool import CodecPool
from stage_runtime.wire.values import Text
from tests.web.certificate_authority import Authority, shown, write
from tests.web.running import ALL, PATIENCE_S
from tests.web.scripted_manager import Script, ScriptedManager, chunk, play

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
CA = Authority()
FIRST = CA.issue("first")


class Secured:
    """A server with a certificate, and what a client needs."""

    def __init__(self, manager: ScriptedManager, server: Server, tls: Certificates) -> None:
        self.manager, self.server, self.tls = manager, server, tls

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE_S, verify=CA.trusted())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.server.port, ssl=CA.trusted(), server_hostname="localhost"
        )


@asynccontextmanager
async def secured(script: Script, *, pair: CertificatePair = FIRST, **limits: Any) -> AsyncIterator[Secured]:
    manager, tls = ScriptedManager(script), Certificates(pair)
    async with CodecPool() as codecs:
        app = make_app(manager, ALL, codecs=codecs)
        given = ConnectionLimits(**limits) if limits else None
        async with Server(app, port=0, drain_s=5.0, certificates=tls, limits=given) as server:
            yield Secured(manager, server, tls)


@pytest.mark.parametrize("kind", ["ec", "rsa"])
async def test_answers_and_streams_come_over_tls(kind: str) -> None:
    words = [chunk(Text("word " * 2000), index=at) for at in range(50)]
    async with secured(play(*words), pair=CA.issue("one", kind=kind)) as running, running.client() as http:
        assert running.server.url.startswith("https://")
        whole = (await http.post("/v1/chat/completions", json=STREAM | {"stream": False})).json()
        streamed = (await http.post("/v1/chat/completions", json=STREAM)).text
    assert whole["choices"][0]["message"]["content"] == "word " * 100_000
    assert streamed.endswith("data: [DONE]\n\n") and streamed.count("word ") == 100_000


@pytest.mark.parametrize(("old", "new"), [("ec", "rsa"), ("rsa", "ec"), ("ec", "ec")])
async def test_a_new_certificate_is_shown_to_new_connections_and_cuts_no_stream(old: str, new: str) -> None:
    gate = asyncio.Event()
    script = play(chunk(Text("a")), gate, chunk(Text("b"), index=1))
    async with secured(script, pair=CA.issue("old", kind=old)) as running, running.client() as http:
        async with http.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_text()
            begun = await anext(pieces)
            _, before = await running.connect()
            running.tls.replace(CA.issue("new", kind=new))
            _, after = await running.connect()
            assert (shown(before), shown(after)) == ("old", "new")
            gate.set()
            text = begun + "".join([piece async for piece in pieces])
        for writer in (before, after):
            writer.close()
    assert text.endswith("data: [DONE]\n\n") and '"a"' in text and '"b"' in text


async def test_a_wrong_certificate_replaces_nothing() -> None:
    other = CA.issue("other")
    wrong = [
        CertificatePair(other.chain, FIRST.key),
        CertificatePair(b"", other.key),
        CertificatePair(other.chain, b"not PEM"),
        CA.issue("hidden", password=b"secret"),
    ]
    async with secured(play()) as running:
        for pair in wrong:
            with pytest.raises(ConfigurationError):
                running.tls.replace(pair)
            _, writer = await running.connect()
            assert shown(writer) == "first"
            writer.close()


def test_what_is_wrong_with_a_certificate_is_said() -> None:
    with pytest.raises(ConfigurationError, match="not a certificate and its private key, as PEM: key values mismatch"):
        certificates.context(CertificatePair(FIRST.chain, CA.issue("other").key))
    for pair, cause in (
        (CertificatePair(b"garbage", FIRST.key), "the certificate is not PEM"),
        (CertificatePair(b"\n", FIRST.key), "the certificate is empty"),
        (CertificatePair(FIRST.chain, FIRST.chain), "the private key is not PEM"),
        (CertificatePair(FIRST.chain, b""), "the private key is empty"),
    ):
        with pytest.raises(ConfigurationError, match=f"not a certificate and its private key, as PEM: {cause}"):
            certificates.context(pair)
    with pytest.raises(ConfigurationError, match="protected by a password"):
        certificates.context(CA.issue("hidden", password=b"secret"))


def test_the_life_of_a_chain_is_that_of_its_first_certificate() -> None:
    leaf = x509.load_pem_x509_certificate(FIRST.chain)
    found = certificates.life(b"a comment\n" + FIRST.chain)
    assert found == (leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())
    assert certificates.life(b"not PEM") is None


@pytest.mark.parametrize(
    ("place", "odd"),
    [
        pytest.param(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x01", id="version 2"),
        pytest.param(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", id="version 8"),
        pytest.param(rb"\x17\x0d\d{12}Z", b"\x17\x0d" + b"9" * 12 + b"Z", id="month 99"),
    ],
)
async def test_a_certificate_that_openssl_alone_can_read_is_served_without_a_life(place: bytes, odd: bytes) -> None:
    leaf = x509.load_pem_x509_certificate(FIRST.chain).public_bytes(serialization.Encoding.DER)
    changed = re.sub(place, lambda _: odd, leaf, count=1)
    assert changed != leaf
    pair = CertificatePair(ssl.DER_cert_to_PEM_cert(changed).encode(), FIRST.key)
    async with secured(play()) as running:
        running.tls.replace(pair)
        assert running.tls.life is None
        unverified = ssl._create_unverified_context()
        _, writer = await asyncio.open_connection("127.0.0.1", running.server.port, ssl=unverified)
        assert writer.get_extra_info("ssl_object").getpeercert(binary_form=True) == changed
        writer.close()


def test_a_pair_is_read_as_one_while_a_kubelet_replaces_it(tmp_path: Path) -> None:
    second = CA.issue("second")
    chain, key = write(FIRST, tmp_path)
    assert certificates.read(chain, key) == FIRST
    reads: list[Path] = []

    def replaced_after_the_first_read(file: Path) -> bytes:
        content = file.read_bytes()
        reads.append(file)
        if len(reads) == 1:
            write(second, tmp_path)
        return content

    assert certificates.read(chain, key, content=replaced_after_the_first_read) == second


async def test_clients_that_finish_no_handshake_are_bounded_and_cut_off() -> None:
    async with secured(play(), head_s=0.5, connections=32) as running:
        idle = [await asyncio.open_connection("127.0.0.1", running.server.port) for _ in range(16)]
        reader, beyond = await asyncio.open_connection("127.0.0.1", running.server.port)
        assert await ended(reader)
        for each, _ in idle:
            assert await ended(each), "within the time for a handshake"
        await served(running)
        for one in (beyond, *(writer for _, writer in idle)):
            one.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01" + b"\0" * 300, b"x"])
async def test_who_speaks_no_tls_is_cut_off_and_the_next_one_is_served(said: bytes) -> None:
    async with secured(play(), head_s=0.5) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(said)
        assert await ended(reader)
        writer.close()
        await served(running)


async def test_a_client_that_ends_its_connection_ends_its_request() -> None:
    async with secured(play(asyncio.Event())) as running:
        _, writer = await running.connect()
        body = b'{"inputs": 1}'
        head = b"POST /v1/pipeline HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        while not running.manager.in_flight:
            await asyncio.sleep(0.001)
        writer.close()
        await asyncio.wait_for(running.manager.last.ended.wait(), PATIENCE_S)
    assert running.manager.last.outcome == "cancelled"


async def test_a_refusal_arrives_whole_and_the_connection_ends() -> None:
    async with secured(play()) as running:
        reader, writer = await running.connect()
        writer.write(b"nonsense\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"invalid_request" in answer


async def test_a_drain_waits_for_streams_and_leaves_nothing() -> None:
    gate = asyncio.Event()
    async with secured(play(chunk(Text("a")), gate)) as running, running.client() as http:
        async with http.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            silent, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
            stopping = asyncio.create_task(running.server.stop())
            assert await ended(silent)
            gate.set()
            assert "".join([piece async for piece in pieces]).endswith("data: [DONE]\n\n")
        await asyncio.wait_for(stopping, PATIENCE_S)
        writer.close()
    assert running.server.open_connections == 0
    gc.collect()


async def served(running: Secured) -> None:
    """The next client is served, when its handshake is fast enough: the limit of these tests is short."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with running.client() as http:
                    assert (await http.get("/v1/models")).status_code == 200
                    return
            except httpx.TransportError:
                continue


async def ended(reader: asyncio.StreamReader) -> bool:
    """The server closes the connection; an alert of TLS may come first."""
    try:
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        pass
    return True

"""A real S3 server (moto's, in an environment of its own), and a proxy whose answers a test counts and damages.

Here: both, and faults of answers. Not here: what is tested. `make` installs the server into ``.venv/s3``, from
constraints-s3.txt: it needs another python-dateutil than the operator.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import pytest
from obstore import put
from obstore.store import S3Store

from tests.patience import patience
from tests.ports import free_port

PYTHON: Final = Path(sys.prefix) / "s3" / "bin" / "python"
BUCKET: Final = "models"
PIECE: Final = 64 << 10
ETAG: Final = re.compile(rb"<ETag>(?:&quot;|\")?([^<&\"]*)(?:&quot;|\")?</ETag>")
#: moto reads the region of it and checks no signature.
SIGNED: Final = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00"


@dataclass
class S3:
    """The server behind its proxy. Faults are given by the path of an object, as in ``/models/tiny/weights.bin``."""

    port: int  #: The proxy's.
    behind: int  #: The server's.
    asked: list[tuple[str, str]] = field(default_factory=list)  #: (path, Range) of each GET of an object.
    sent: dict[str, int] = field(default_factory=dict)  #: Path -> bytes of bodies that were sent.
    #: Path -> called with each piece before it is sent: it may wait, change it, or raise (the connection breaks).
    between: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    #: Path -> made of the request's headers, the status and body that are sent instead of the server's.
    answers: dict[str, Callable[[Mapping[str, str]], tuple[int, bytes]]] = field(default_factory=dict)
    #: The store's way to write an ETag, as in ``W/"{}"``: listed, shown, and compared by ``If-Match`` as it stands.
    etag: Callable[[str], str] | None = None

    def environment(self, host: str = "127.0.0.1") -> dict[str, str]:
        """The variables by which AWS' tools, and ours, reach it."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": f"http://{host}:{self.port}", **keys}

    def clear(self) -> None:
        """Leave one empty bucket, no fault and no count."""
        ask(self.behind, "POST", "/moto-api/reset")
        ask(self.behind, "PUT", f"/{BUCKET}")
        for each in (self.asked, self.sent, self.between, self.answers):
            each.clear()
        self.etag = None

    def put(self, path: str, content: bytes) -> None:
        put(self._store(), path, content, use_multipart=False)

    def put_in_parts(self, path: str, content: bytes, size: int) -> None:
        """Upload as clients do with large files: the ETag is then not the MD5 of the content."""
        put(self._store(), path, content, use_multipart=True, chunk_size=size)

    def ranges(self, path: str) -> list[str]:
        """The ranges of an object that were asked for."""
        return [asked for of, asked in self.asked if of == f"/{BUCKET}/{path}"]

    def _store(self) -> S3Store:
        settings: Any = {
            "aws_endpoint": f"http://127.0.0.1:{self.behind}",
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
        }
        return S3Store(BUCKET, config=settings, client_options={"allow_http": True})


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[S3]:
    """A server, to be cleared before use; its proxy listens on a free port of ``host``, until the block ends."""
    if not PYTHON.exists():
        missing = f"{PYTHON} is not there: `make` installs the S3 server"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    behind = free_port()
    command = [str(PYTHON), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(behind)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as moto:
        try:
            _await_server(behind)
            with _proxied(host, behind) as s3:
                yield s3
        finally:
            moto.kill()


def ask(port: int, method: str, path: str) -> None:
    """Ask the server for something that succeeds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(10))
    try:
        connection.request(method, path, headers={"Authorization": SIGNED})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
    finally:
        connection.close()


def _await_server(port: int) -> None:
    clock = threading.Event()
    for _ in range(int(patience(60) / 0.1)):
        try:
            ask(port, "GET", "/moto-api/data.json")
            return
        except ConnectionRefusedError:
            clock.wait(0.1)
    raise AssertionError("the S3 server does not listen")


@contextmanager
def _proxied(host: str, behind: int) -> Iterator[S3]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=patience(60))
            headers, write = dict(self.headers), s3.etag
            wanted = headers.pop("if-match", None) if write is not None else None
            try:
                connection.request(self.command, self.path, headers=headers)
                answer = connection.getresponse()
                body = answer.read()
            finally:
                connection.close()
            path, _, query = self.path.partition("?")
            if path in s3.answers:
                status, body = s3.answers[path](dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            shown = answer.getheaders()
            if write is not None:
                body = ETAG.sub(lambda found: f"<ETag>{escape(write(found[1].decode()))}</ETag>".encode(), body)
                shown = [(name, write(value.strip('"')) if name == "ETag" else value) for name, value in shown]
                own = dict(shown).get("ETag", "")
                if wanted is not None and (wanted != own or own.startswith("W/")):
                    self.send_error(412)
                    return
            self.send_response(answer.status)
            for name, value in shown:
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            nbytes = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", nbytes or str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            is_object = not query and path.count("/") > 1
            if is_object:
                s3.asked.append((path, self.headers.get("Range", "")))
            self._send(path if is_object else "", body)

        do_HEAD = do_GET

        def _send(self, path: str, body: bytes) -> None:
            try:
                for start in range(0, len(body), PIECE):
                    piece, change = body[start : start + PIECE], s3.between.get(path)
                    self.wfile.write(piece if change is None else change(piece))
                    s3.sent[path] = s3.sent.get(path, 0) + len(piece)
            except OSError:  # the client has gone, or the test breaks the connection
                self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer((host, 0), Proxy) as server:
        server.daemon_threads = True
        s3 = S3(port=server.server_address[1], behind=behind)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield s3
        finally:
            server.shutdown()
            thread.join()

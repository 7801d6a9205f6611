"""A model hub with one tiny model, as the hub's client asks for it: for tests without the internet.

Here: the three requests of a snapshot's download. Not here: authentication, large files, everything else.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "someone/tiny"
REVISION = "v1"
COMMIT = hashlib.sha1(b"tiny").hexdigest()
FILES = {"weights.txt": b"forty two", "config.json": b"{}"}
PIECE = 1 << 20  # a larger file comes in several


class Hub:
    """``url`` may be reached from pods when ``host`` is an address of the node. It begins without the model."""

    def __init__(self, server: ThreadingHTTPServer, host: str) -> None:
        self.url = f"http://{host}:{server.server_address[1]}"
        self.has_model = False
        self.files = dict(FILES)
        self.downloads: list[str] = []  #: Files that were fetched.
        self.before_piece: Callable[[int], None] = lambda start: None  #: Called with its offset; it may wait.


@contextmanager
def serving(host: str) -> Iterator[Hub]:
    """A hub on a free port of all addresses, until the block ends."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), _Answers)
    server.daemon_threads = True
    server.hub = hub = Hub(server, host)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if not hub.has_model or MODEL not in path:
            self._answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            files = [
                {"type": "file", "path": each, "size": len(found), "oid": _etag(found)}
                for each, found in hub.files.items()
            ]
            self._answer(200, json.dumps(files).encode(), {})
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": each} for each in hub.files]
            self._answer(200, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif name in hub.files:
            if self.command == "GET":
                hub.downloads.append(name)
            self._answer(200, hub.files[name], {"ETag": f'"{_etag(hub.files[name])}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(body), PIECE):
                self.server.hub.before_piece(start)  # type: ignore[attr-defined]
                self.wfile.write(body[start : start + PIECE])

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

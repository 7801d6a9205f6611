"""``kubectl omni ui``: what is opened, and for how long."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from omnipipeline_operator.kubectl import page
from omnipipeline_operator.kubectl.access import KubectlError
from omnipipeline_operator.kubectl.admin_routes import AdminRoutes


class Alive(BaseHTTPRequestHandler):
    """Answers /livez."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def coordinator() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Alive) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


def test_without_a_key_the_page_itself_is_opened() -> None:
    opened: list[str] = []
    said: list[str] = []

    def browse(address: str) -> bool:
        opened.append(address)
        return True

    with coordinator() as url:
        page.show(AdminRoutes(url, None), browse=browse, wait=interrupted, report=said.append)
    assert opened == [f"{url}/"]
    assert said == [f"{url}/ until Ctrl+C"]


def test_a_key_is_handed_over_by_a_file_for_its_owner_alone_that_is_gone_at_the_end() -> None:
    key, seen = 'k</script>"&#1', []

    def browse(address: str) -> bool:
        file = Path(unquote(urlsplit(address).path))
        seen.append(
            (file, stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode), file.read_text())
        )
        return True

    said: list[str] = []
    with coordinator() as url:
        page.show(AdminRoutes(url, key), browse=browse, wait=interrupted, report=said.append)
    [(file, mode, folder_mode, text)] = seen
    assert (mode, folder_mode, file.exists()) == (0o600, 0o700, False)
    assert text.count("</script>") == 1
    assert f'location.replace("{url}/#key=k%3C%2Fscript%3E%22%26%231")' in text
    assert key not in "".join(said)


@pytest.mark.parametrize(("key", "asks"), [(None, ""), ("k", "; it asks for an API key of the pipeline")])
def test_where_no_browser_opens_the_address_is_printed_without_the_key(key: str | None, asks: str) -> None:
    said: list[str] = []
    with coordinator() as url:
        page.show(AdminRoutes(url, key), browse=None, wait=interrupted, report=said.append)
    assert said == [f"{url}/ until Ctrl+C", f"open it in a browser{asks}"]


def test_it_ends_with_a_reason_when_the_coordinator_is_gone() -> None:
    with coordinator() as url:
        pass
    with pytest.raises(KubectlError, match="the connection to the coordinator broke"):
        page.show(AdminRoutes(url, None), browse=None, wait=interrupted, report=lambda _: None)

"""``kubectl omni ui``: a pipeline's page in the user's browser, over a port-forward.

Here: opening it, with the key, until the user ends it. Not here: the port-forward (`admin_routes`), the page.
"""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from omnipipeline_operator.kubectl.admin_routes import AdminRoutes

ALIVE_EVERY_S: Final = 5.0


def show(
    admin: AdminRoutes,
    *,
    browse: Callable[[str], bool] | None,
    wait: Callable[[float], object],
    report: Callable[[str], object],
) -> None:
    """Open the page and stay until the coordinator is gone, or the user interrupts.

    browse: opens an address in a browser, if it can; None: nothing is opened. wait: sleeps for some seconds.
    Raises: KubectlError: the connection to the coordinator broke.
    """
    admin.get("/livez")
    report(f"{admin.url}/ until Ctrl+C")
    with _address(admin.url, admin.api_key) as address:
        if browse is None or not browse(address):
            report("open it in a browser" + ("; it asks for an API key of the pipeline" if admin.api_key else ""))
        try:
            while True:
                wait(ALIVE_EVERY_S)
                admin.get("/livez")
        except KeyboardInterrupt:
            return


@contextmanager
def _address(url: str, key: str | None) -> Iterator[str]:
    """The address that a browser opens. It is a file that leads to the page if there is a key, for its owner alone: all
    users of a machine see the arguments of its programs. The page's fragment has the key, which is sent to no server.
    """
    if key is None:
        yield f"{url}/"
        return
    with tempfile.TemporaryDirectory(prefix="omni-ui-") as folder:
        file = Path(folder) / "open.html"
        file.touch(mode=0o600)
        file.write_text(leading(f"{url}/#key={quote(key, safe='')}"), encoding="utf-8")
        yield file.as_uri()


def leading(url: str) -> str:
    """A document that leads a browser to ``url``, and does not stay in its history."""
    script = json.dumps(url).replace("<", "\\u003c")
    title = html.escape(url.partition("#")[0])
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><script>location.replace({script})</script>\n"

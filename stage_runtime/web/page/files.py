"""The files of the page, with the headers that keep a browser to them. They hold nothing of a pipeline, so no key opens
them; a browser could not send one with its first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Final

from stage_runtime.web.answers import ResponseType
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.routing import Route

_HTML, _SCRIPT, _STYLE = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_OURS: Final = "stage_runtime.web.page.assets"

#: path → package, file, content type. The waterfall is drawn by the profiler's script.
_PAGE: Final = {
    "/": (_OURS, "page.html", _HTML),
    "/page/page.css": (_OURS, "page.css", _STYLE),
    "/page/page.js": (_OURS, "page.js", _SCRIPT),
    "/page/stream.js": (_OURS, "stream.js", _SCRIPT),
    "/page/graph.js": (_OURS, "graph.js", _SCRIPT),
    "/page/tables.js": (_OURS, "tables.js", _SCRIPT),
    "/page/trying.js": (_OURS, "trying.js", _SCRIPT),
    "/page/recording.js": (_OURS, "recording.js", _SCRIPT),
    "/page/profiles.js": (_OURS, "profiles.js", _SCRIPT),
    "/page/drawing.js": ("stage_runtime.profiler.formats", "drawing.js", _SCRIPT),
}
_DOCS: Final = {
    "/docs": (_OURS, "docs.html", _HTML),
    "/docs/docs.js": (_OURS, "docs.js", _SCRIPT),
    "/docs/docs.css": (_OURS, "page.css", _STYLE),
    "/docs/stream.js": (_OURS, "stream.js", _SCRIPT),
    "/docs/drawing.js": ("stage_runtime.profiler.formats", "drawing.js", _SCRIPT),
}

#: Paths that need no key.
PATHS: Final = frozenset({*_PAGE, *_DOCS})

#: No other host, no script or style inside of a document, no string as markup, in no frame.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src blob:",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(self), microphone=(self)"),
    (b"cache-control", b"no-cache"),
]


def page(*, keyed: bool) -> tuple[Route, ...]:
    """`/` and what it loads. keyed: a key is needed, so the page asks its user before it asks the server."""
    return tuple(_routes(_PAGE, keyed))


def documentation(*, keyed: bool) -> tuple[Route, ...]:
    """`/docs`: the routes of `/openapi.json`, for people."""
    return tuple(_routes(_DOCS, keyed))


def _routes(files: dict[str, tuple[str, str, str]], keyed: bool) -> Iterator[Route]:
    for path, (package, name, content_type) in files.items():
        content = resources.files(package).joinpath(name).read_bytes()
        if keyed and content_type == _HTML:
            content = content.replace(b'data-keyed="no"', b'data-keyed="yes"', 1)
        media = content_type.partition(";")[0]
        made = _File(content, content_type.encode())
        yield Route("GET", path, f"The file {name}", made.show, answers=(ResponseType(media=media),))


class _File:
    def __init__(self, content: bytes, content_type: bytes) -> None:
        self._content = content
        self._content_type = content_type

    async def show(self, exchange: Exchange) -> None:
        await exchange.reply(self._content, content_type=self._content_type, headers=_HEADERS)

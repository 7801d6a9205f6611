"""Whether a browser asks on behalf of a page that it should not: cross-site requests and DNS rebinding.

Everybody who reaches the port may use it where no key is required, and a browser on this machine reaches it for every
page that it shows. Pages of other origins are refused by headers that browsers always send: Origin or Sec-Fetch-Site. A
page whose own name was made to point here afterwards is of our origin to its browser; its name is in Host.

Pages of named hosts may ask, with a key or without. Their browsers first ask whether they may (a preflight, without a
key), and show them no answer without the headers of the Fetch standard (CORS). Called by `middleware`.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Sequence
from typing import Final

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges.errors import Headers, RequestRefused
from stage_runtime.web.exchanges.exchange import Exchange

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
_PORTS: Final = {"http": 80, "https": 443}
_READABLE: Final = b"x-request-id, retry-after, x-should-retry, idempotent-replayed"  # the official client follows two
_METHODS: Final = b"GET, POST, DELETE"
_SENT: Final = (
    "authorization",
    "content-type",
    "x-request-id",
    "x-request-timeout",
    "idempotency-key",
    "traceparent",
    "tracestate",
)
#: The official client's own. The set of them that it sends changes with its version; Firefox asks for its User-Agent,
#: too.
_CLIENTS: Final = re.compile(r"(?:x-stainless-|openai-)[a-z0-9-]{1,64}|user-agent")
_PREFLIGHT_S: Final = b"7200"  # browsers keep an answer for two hours at most


class Origins:
    """local: served at a loopback address, so that Host must be a name of it. hosts: more names that are ours."""

    def __init__(self, *, local: bool, hosts: Sequence[str] = ()) -> None:
        self._local = local
        self._hosts = frozenset(host.lower() for host in hosts)

    def check(self, exchange: Exchange) -> None:
        """Raises: RequestError: unauthorized (403): another site's page asks; invalid_request: no one Host."""
        host = exchange.only_header(b"host")
        if host is None and exchange.scope["http_version"] != "1.0":
            raise InvalidRequest("host: required", param="host")
        if self._local and host is not None and not self._is_ours(_name(host)):
            problem = "no name of this server; others are allowed by OMNI_HTTP_HOSTS"
            raise RequestRefused(403, "unauthorized", f"host: {host!r} is {problem}", param="host")
        if exchange.method not in _SAFE or exchange.is_socket:
            self._check_origin(exchange, host)

    def cors(self, exchange: Exchange) -> Headers:
        """Headers of every answer to a page of a named host; none: it is not such a page."""
        origin = exchange.header(b"origin")
        if origin is None or _origin(origin)[0] not in self._hosts:
            return []
        allowed = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [allowed, (b"access-control-expose-headers", _READABLE), (b"vary", b"Origin")]

    def preflight(self, exchange: Exchange) -> Headers | None:
        """The answer's headers, beside `cors`, where a browser asks what such a page may send; else None.

        It does not depend on the route: each route checks the request itself.
        """
        asks = exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
        if not asks or not self.cors(exchange):
            return None
        wanted = (exchange.header(b"access-control-request-headers") or "").lower().split(",")
        clients = [name.strip() for name in wanted if _CLIENTS.fullmatch(name.strip())]
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", ", ".join((*_SENT, *clients)).encode()),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]

    def _check_origin(self, exchange: Exchange, host: str | None) -> None:
        origin = exchange.header(b"origin")
        if origin is None:
            foreign = exchange.header(b"sec-fetch-site") in _FOREIGN
        else:
            name, port = _origin(origin)
            foreign = name not in self._hosts and (host is None or (name, port) != (_name(host), _port(host, origin)))
        if foreign:
            problem = "a page of another site made the request, and no key is required; OMNI_HTTP_HOSTS allows sites"
            raise RequestRefused(403, "unauthorized", f"origin: {problem}", param="origin")

    def _is_ours(self, name: str) -> bool:
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _name(host: str) -> str:
    """Host's name without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _port(host: str, origin: str) -> int | None:
    """Host's port; one that is not written is that of the origin's scheme."""
    written = host.rpartition(":")[2] if ":" in host and not host.endswith("]") else ""
    if written.isascii() and written.isdigit():
        return int(written[:6])
    return _PORTS.get(origin.partition(":")[0])


def _origin(origin: str) -> tuple[str | None, int | None]:
    """Name and port of an Origin header; (None, None) of ``null`` and of a value that is not an origin."""
    try:
        parts = urllib.parse.urlsplit(origin)
        name = None if parts.hostname is None else parts.hostname.removesuffix(".")
        return name, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None, None

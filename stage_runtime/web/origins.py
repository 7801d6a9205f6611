"""Whether a browser asks on behalf of a page that it should not: cross-site requests and DNS rebinding.

Where no key is required, everybody who reaches the port may use it, and a browser on this machine reaches it for every
page that it shows. Pages of other origins are refused by headers that browsers always send: Origin or Sec-Fetch-Site. A
page whose own name was made to point here afterwards is of our origin to its browser; its name is in Host. Called by
`middleware`.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Sequence
from typing import Final

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.errors import RequestRefused
from stage_runtime.web.exchange import Exchange

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
_PORTS: Final = {"http": 80, "https": 443}


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
        if exchange.method not in _SAFE:
            self._check_origin(exchange, host)

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
    """Name and port of an Origin header; (None, None) of ``null`` and of what is none."""
    try:
        parts = urllib.parse.urlsplit(origin)
        return parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None, None

"""Media that chat messages name by http URL: fetched from allowed hosts only, bounded in size and time.

These rules prevent server-side request forgery: the host must be one of ``media_hosts``; a name must resolve to public
addresses only, and the connection goes to an address that was checked (a second look-up could answer otherwise);
redirects stay on the host. A ``media_hosts`` entry that is itself an address allows exactly that address.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from stage_runtime.errors import InvalidRequest
from stage_runtime.web.exchanges import threads
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.translating.media import MIME, MediaUrl
from stage_runtime.wire.values import Media

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS: Final = 3
MAX_MEDIA: Final = 32  # URLs of one request
MAX_FETCHES: Final = 32  # at once, of all requests; the others wait, within their time
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_PORTS: Final = {"http": 80, "https": 443}


class Fetcher:
    """Fetches what `media.to_fetch` found. Opens a client per URL: they are rare, and no cookie stays behind."""

    def __init__(self, settings: WebSettings) -> None:
        self._hosts = frozenset(host.lower() for host in settings.media_hosts)
        self._timeout_s = settings.media_timeout_s
        self._max_bytes = settings.max_body_bytes
        self._turn = asyncio.Semaphore(MAX_FETCHES)
        self._tls: ssl.SSLContext | None = None  #: The context of all clients. Reading the certificates takes 40 ms.
        self._making_tls = asyncio.Lock()
        if self._hosts:  # it takes a tenth of a coordinator's start, and most pipelines fetch nothing
            import httpx as httpx

            logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each URL whole: some are signed

    async def fetch(self, places: Iterable[MediaUrl], hold: Callable[[int], None]) -> dict[str, Media]:
        """URL -> what it holds, all fetched at once; when one fails the others end.

        hold: called with the number of bytes as they arrive; may raise.
        Raises: RequestError: a URL is not allowed, too slow, or of another type than its part; there are too many, or
                all together are too large; what ``hold`` raises.
        """
        named = list(places)
        wanted = {place.url: place for place in named}
        if len(wanted) > MAX_MEDIA:
            last = list(wanted.values())[MAX_MEDIA]
            raise _refused(last, f"a request may name {MAX_MEDIA} URLs")
        got = _Sum(self._max_bytes, hold, Counter(place.url for place in named))
        try:
            async with asyncio.TaskGroup() as group:
                found = [group.create_task(self._bounded(place, got)) for place in wanted.values()]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {url: task.result() for url, task in zip(wanted, found, strict=True)}

    async def _bounded(self, place: MediaUrl, got: _Sum) -> Media:
        import httpx

        try:
            url = httpx.URL(place.url)
            self._check_host(url, place)
            async with asyncio.timeout(self._timeout_s), self._turn:
                return await self._follow(url, place, got, await self._tls_context())
        except TimeoutError:
            raise _refused(place, f"not fetched within {self._timeout_s:g} s") from None
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            ValueError,
        ) as error:  # of a name or a Location that is not one
            raise _refused(place, f"not fetched: {type(error).__name__}") from error

    async def _follow(self, url: httpx.URL, place: MediaUrl, got: _Sum, tls: ssl.SSLContext) -> Media:
        """url: of a host that is allowed."""
        import httpx

        # trust_env: a proxy would look the name up by itself, after our check
        async with httpx.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=self._timeout_s, verify=tls
        ) as client:
            for _ in range(1 + MAX_REDIRECTS):
                address = await _address(url, place)
                request = client.build_request(
                    "GET",
                    url.copy_with(host=address),
                    headers={"host": _host_header(url), "accept-encoding": "identity"},
                    extensions={"sni_hostname": url.host},
                )
                response = await client.send(request, stream=True)
                try:
                    if not response.has_redirect_location:
                        return await self._read(response, place, got)
                    target = url.join(response.headers["location"])
                finally:
                    await response.aclose()
                if (target.host, _port(target)) != (url.host, _port(url)):
                    raise _refused(place, "it redirects to another host")
                self._check_host(target, place)  # its scheme
                url = target
        raise _refused(place, f"more than {MAX_REDIRECTS} redirects")

    async def _tls_context(self) -> ssl.SSLContext:
        import httpx

        async with self._making_tls:
            if self._tls is None:
                self._tls = await threads.call(functools.partial(httpx.create_ssl_context, trust_env=False))
            return self._tls

    def _check_host(self, url: httpx.URL, place: MediaUrl) -> None:
        """Raises: InvalidRequest: it is not one of ``media_hosts``. Its addresses: see `_address`."""
        if url.scheme not in _PORTS:
            raise _refused(place, "only data:, http: and https: URLs")
        host = url.host.lower()
        exact = f"{host}:{_port(url)}" in self._hosts
        if not exact and (host not in self._hosts or url.port is not None):
            raise _refused(place, f"its host {_host_header(url)!r} is not one of the pipeline's mediaHosts")

    async def _read(self, response: httpx.Response, place: MediaUrl, got: _Sum) -> Media:
        if response.status_code != 200:
            raise _refused(place, f"its host answered {response.status_code}")
        mime = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not mime.startswith(f"{place.type}/"):
            raise _refused(place, f"it is {mime or 'of no type'}, not {place.type}/…")
        if not MIME.fullmatch(mime):
            raise _refused(place, "its host names no media type")
        body = bytearray()
        async for piece in response.aiter_raw():
            got.add(len(piece), place)
            body += piece
        return Media(place.type, mime, bytes(body))


class _Sum:
    """Bytes of all media of one request. uses: of each URL: so many copies are sent to the entry stage."""

    def __init__(self, limit_nbytes: int, hold: Callable[[int], None], uses: Mapping[str, int]) -> None:
        self._left = limit_nbytes
        self._limit = limit_nbytes
        self._hold = hold
        self._uses = uses

    def add(self, nbytes: int, place: MediaUrl) -> None:
        nbytes *= self._uses[place.url]
        self._left -= nbytes
        if self._left < 0:
            raise _refused(place, f"the request's media are larger than {self._limit} bytes")
        self._hold(nbytes)


async def _address(url: httpx.URL, place: MediaUrl) -> str:
    """An address of the host. Raises: InvalidRequest: it has a name, and this is not only for public ones."""
    host = url.host.lower()
    if _is_address(host):
        return host
    found = await asyncio.get_running_loop().getaddrinfo(host, _port(url), type=socket.SOCK_STREAM)
    addresses = [str(item[4][0]) for item in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise _refused(place, "its host is not on the public Internet")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is reachable by everybody; an IPv4 address inside of an IPv6 one counts as itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None and not inner.is_global:
            return False
    return parsed.is_global and not parsed.is_multicast


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _port(url: httpx.URL) -> int:
    return url.port or _PORTS.get(url.scheme, 0)


def _host_header(url: httpx.URL) -> str:
    return url.netloc.decode("ascii").rpartition("@")[2]


def _refused(place: MediaUrl, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{place.param}: {problem}", param=place.param)

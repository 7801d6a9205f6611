"""The HTTPS server of the conversion webhook.

Here: one route, its bounds, the certificate that new connections get. Not here: what a review means (`reviews`), where
the certificate comes from (`publishing`). Called by `handlers.lifecycle`. API servers show no certificate of their own,
so whoever reaches the port may ask: reviews are bounded, hold no secret of ours and change nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from aiohttp import web

from omnipipeline_operator.conversion import reviews
from omnipipeline_spec.conversion.versions import Versions

if TYPE_CHECKING:
    from omnipipeline_operator.conversion.certificates import Held

PATH: Final = "/convert"
MAX_NBYTES: Final = 16 << 20  # of one review; etcd takes no object beyond 1.5 MB
ALL_NBYTES: Final = 64 << 20  # of all that are being read
READ_S: Final = 10.0  # API servers give a review 30 s
LEAVING_S: Final = 5.0  # a process that ends still answers: routes of the Service may lead to it a little longer


Leave: TypeAlias = Callable[[], Awaitable[None]]


class Server:
    """Answers reviews once it has a certificate."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._nbytes = 0  #: Bytes of the reviews that are being read. The bound is `ALL_NBYTES`.
        self._held: Held | None = None

    @property
    def serves(self) -> bool:
        """Whether it has a certificate."""
        return self._held is not None

    def show(self, held: Held) -> None:
        """Show this certificate to new connections."""
        if self._held is not None and (held.certificate, held.key) == (self._held.certificate, self._held.key):
            return
        with tempfile.TemporaryDirectory() as folder:  # ssl reads files alone; the folder is this user's
            path = Path(folder) / "tls.pem"
            path.write_bytes(held.key + held.certificate)
            self._tls.load_cert_chain(path)
        self._held = held

    @asynccontextmanager
    async def listening(self, port: int, *, leave: Leave = lambda: asyncio.sleep(0)) -> AsyncIterator[int]:
        """Listen while the block runs, and after it for as long as ``leave`` takes; yields the port."""
        app = web.Application(client_max_size=MAX_NBYTES)
        app.router.add_post(PATH, self._convert)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=READ_S)
        await runner.setup()
        site = web.TCPSite(runner, None, port, ssl_context=self._tls)
        try:
            await site.start()
            yield runner.addresses[0][1]
        finally:
            await leave()
            await runner.cleanup()

    async def _convert(self, request: web.Request) -> web.Response:
        """Answer, and end the connection with it.

        An API server does not repeat a review whose connection ends under it. It keeps connections, also to a pod that
        the Service no longer has, and may take one that is idle at the moment at which this process closes it.
        """
        response = await self._answer(request)
        response.force_close()
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        nbytes = request.content_length
        if nbytes is None:
            return web.Response(status=411, text="a review without a length\n")
        if nbytes > MAX_NBYTES:
            return web.Response(status=413, text=f"a review has at most {MAX_NBYTES} bytes\n")
        if self._nbytes + nbytes > ALL_NBYTES:
            return web.Response(status=503, text="too many reviews at once\n")
        self._nbytes += nbytes
        try:
            async with asyncio.timeout(READ_S):
                body = await request.read()
            return web.Response(body=reviews.answer(body, self._versions), content_type="application/json")
        except TimeoutError:
            return web.Response(status=408, text=f"the review did not come within {READ_S:g} s\n")
        except reviews.NotAReview as error:
            return web.Response(status=400, text=f"{error}\n")
        finally:
            self._nbytes -= nbytes

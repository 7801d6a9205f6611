"""uvicorn inside of a loop that runs already, as a task that can be drained. Called by `processes`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from omnipipeline_spec.types.pods import HTTP_PORT
from stage_runtime.errors import ConfigurationError
from stage_runtime.rules.flow import ticks
from stage_runtime.sockets.endpoints import hosts
from stage_runtime.web.listening import socket_connections
from stage_runtime.web.listening.accepting import Listener
from stage_runtime.web.listening.certificates import Certificates
from stage_runtime.web.listening.connections import HttpConnection, limited
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.limits.idle_connections import IdleConnections

BACKLOG = 2048
POLL_S = 0.005
DATE_S = 1.0  # between two looks at the clock, for the header `date`
LAST_WORDS_S = 0.2  # even a stop without a drain lets errors out that were raised just before it


class Server:
    """Serves ``app`` from `__aenter__` to `stop`.

    port: 0 takes a free one; `port` and `url` have it.
    limits: of each connection.
    certificates: given, it serves HTTPS alone.
    drain_s: how long open answers may go on once it stops; what is left then is cut off (and so aborted).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = HTTP_PORT,
        drain_s: float = 30.0,
        limits: ConnectionLimits | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._app = app
        self._limits = limits or ConnectionLimits()
        self._watch: IdleConnections | None = None
        self._protocol = limited(self._limits)
        self._certificates = certificates
        self._host = host
        self._wanted_port = port
        self._drain_s = drain_s
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = port  #: The real one, once it is started.

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._certificates is None else 'https'}://{host}:{self.port}"

    @property
    def open_connections(self) -> int:
        return 0 if self._server is None else len(self._server.server_state.connections)

    @property
    def drains(self) -> bool:
        """`drain` was called."""
        return self._protocol.drain.begun

    async def __aenter__(self) -> Server:
        """Listen and serve.

        Raises: ConfigurationError: the address cannot be bound; names it.
        """
        listener = _listen(self._host, self._wanted_port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=self._protocol,
            ws="none",  # `connections` makes the protocol of a WebSocket
            ws_max_size=socket_connections.MESSAGE_NBYTES,
            ws_per_message_deflate=False,  # base64 of sound does not get smaller
            ws_ping_interval=None,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no code needs a client's address, and each request would pay for it
            backlog=BACKLOG,
        )
        self._server = _Uvicorn(config, self._certificates, self._limits)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise ConfigurationError(f"{self.url}: the server ended before it began")
            await asyncio.sleep(POLL_S)
        self._watch = IdleConnections(self._server.server_state.connections, self._limits, self._protocol.limit)
        return self

    async def ended(self) -> None:
        """Wait until it serves no longer. Raises: what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(drain_s=0.0 if kind is not None else None)

    async def drain(self, *, quiet_s: float) -> None:
        """Serve what comes until no connection is left. The last answer on each says that the connection ends.

        New connections are taken for ``quiet_s`` seconds; one that rests for so long is closed. `stop` must follow, and
        ends it earlier.
        """
        server, watch, drain = self._server, self._watch, self._protocol.drain
        if server is None or watch is None:
            return
        loop = asyncio.get_running_loop()
        drain.begin(loop.time(), quiet_s)
        watch.announce_end()
        listening = loop.call_later(quiet_s, server.close_listeners)
        try:
            while True:
                while server.server_state.connections:
                    await drain.gone()
                server.close_listeners()
                await asyncio.sleep(POLL_S)  # what was accepted just before is a connection by then
                if not server.server_state.connections and not server.accepting:
                    return
        finally:
            listening.cancel()
            server.close_listeners()

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Take no new connection, let open answers end for ``drain_s`` seconds, then cut them off.

        May be called again while it drains, to cut it short.
        """
        if self._server is None or self._task is None:
            return
        server, task = self._server, self._task
        server.end()
        server.end_handshakes()
        limit_s = max(LAST_WORDS_S, self._drain_s if drain_s is None else drain_s)
        timer = asyncio.get_running_loop().call_later(limit_s, server.cut)
        try:
            await asyncio.wait({task})
        finally:
            timer.cancel()
        server.cut()  # what came in the moment before the listener closed
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        if self._watch is not None:
            self._watch.stop()
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        while server.server_state.connections:  # their sockets are closed in one of the loop's next turns
            await asyncio.sleep(0)
        self._server = self._task = None


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config, certificates: Certificates | None, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._certificates = certificates
        self._limits = limits
        self._listeners: list[Listener] = []
        self._ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The same as uvicorn's, with listeners of ours."""
        await self.lifespan.startup()
        protocol: type[HttpConnection] = self.config.http_protocol_class  # type: ignore[assignment]
        make = functools.partial(protocol, self.config, self.server_state, self.lifespan.state)
        self._listeners = [
            Listener(one, make, self._certificates, timeout_s=self._limits.head_s, limit=protocol.limit)
            for one in sockets or ()
        ]
        self.servers = cast(list[asyncio.base_events.Server], self._listeners)
        self.started = True

    async def main_loop(self) -> None:
        """The same as uvicorn's, which looks ten times a second whether it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ticks.next_s(time.time(), DATE_S)):
                    await self._ending.wait()
        for one in self._listeners:
            await one.wait_closed()

    def end(self) -> None:
        """Leave `main_loop`."""
        self.should_exit = True
        self._ending.set()

    def end_handshakes(self) -> None:
        """Cut off those that are under way: no request of theirs has begun."""
        for one in self._listeners:
            one.end_handshakes()

    @property
    def accepting(self) -> bool:
        """Connections are accepted that have no protocol yet."""
        return any(one.busy for one in self._listeners)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close_listeners(self) -> None:
        """Take no new connection."""
        for listener in self.servers:
            listener.close()

    def cut(self) -> None:
        """Cancel the tasks of open requests now, which aborts the requests."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return hosts.listener(host, port, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error

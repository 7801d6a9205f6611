"""Answers how far a fetch of a model is, while it runs: ``GET /status`` of a prefetch Job's pod.

Here: the server, in a thread of its own. Not here: fetching (`weights`, the hub's library). Called by
`cli.roles.prefetch` and by the script of a Job that fetches from a hub. The operator asks; a fetch never fails because
nobody can.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.containers.pod_probes import ProbeServer, Reply
from stage_runtime.sockets.endpoints import hosts

MAX_PORT: Final = 65535
DIGITS: Final = re.compile("[0-9]{1,5}")  # Python makes no number of thousands of digits
PORT: Final = "OMNI_PROGRESS_PORT"  # set by the operator in the Job; without it nothing listens


@contextlib.contextmanager
def serving(report: Callable[[], tuple[int, int]], environ: Mapping[str, str]) -> Iterator[int | None]:
    """Answer until the block ends; yields the port, or None where nothing listens.

    report: (bytes that are here, bytes of the whole model or 0 where not known yet), called by another thread.
    """
    given = environ.get(PORT, "")
    if DIGITS.fullmatch(given) is None or int(given) > MAX_PORT:
        yield None
        return
    try:
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
    except OSError:  # this process has no descriptor left
        yield None
        return
    listens: list[int] = []
    ready = threading.Event()

    def status() -> Reply:
        done, total = report()
        body = msgspec.json.encode({"bytes_done": done, "bytes_total": total}).decode()
        return Reply(body=body, content_type="application/json")

    async def serve() -> None:
        with contextlib.suppress(ConfigurationError):  # the port is taken
            async with ProbeServer({"/status": status}, host=hosts.everywhere(), port=int(given)) as server:
                listens.append(server.port)
                ready.set()
                await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            ready.set()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the machine has no thread left
        loop.close()
        yield None
        return
    ready.wait()
    try:
        yield listens[0] if listens else None
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(stop.set)
        thread.join()

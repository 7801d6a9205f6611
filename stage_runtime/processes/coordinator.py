"""Wiring of the coordinator's process: sockets, relays, desk, HTTP servers; and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from omnipipeline_spec.plan import PipelineRevision
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.engines.loading import resolve
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import logs, statuspipe, surroundings
from stage_runtime.relays.choosing import Relays
from stage_runtime.settings import CoordinatorSettings
from stage_runtime.sockets.channels import Channels
from stage_runtime.web import app as web
from stage_runtime.web import probes
from stage_runtime.web.metrics import Metrics
from stage_runtime.web.server import Server
from stage_runtime.web.settings import WebSettings

log = logging.getLogger(__name__)

REVISIONS_EVERY_S: Final = 0.5
DRAIN_S: Final = 30.0
SETTLE_S: Final = 1.0


def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM, drain, and return the exit code."""
    logs.configure(settings.log_format, name="coordinator")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: CoordinatorSettings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        coordinator = _planes(settings, stack)
        desk = coordinator.desk
        metrics = Metrics(desk)
        app = web.make_app(desk, _web_settings(settings), metrics=metrics)
        server = Server(app, host=settings.http_host, port=settings.http_port, drain_s=DRAIN_S)
        await server.__aenter__()
        if settings.probe_port:
            await stack.enter_async_context(
                Server(probes.make_probes(desk, metrics), host=settings.http_host, port=settings.probe_port, drain_s=0)
            )
        watching = asyncio.create_task(_watch_revisions(settings.revisions, coordinator.update_revisions))
        stack.callback(watching.cancel)
        statuspipe.report(settings.status_fd, statuspipe.Serving(url=server.url))
        log.info("serving %s at %s", settings.plan.pipeline, server.url)
        await stop.wait()
        statuspipe.report(settings.status_fd, statuspipe.Draining())
        stop.clear()
        desk.refuse("the coordinator is draining")
        draining = asyncio.create_task(server.stop(drain_s=DRAIN_S))
        again = asyncio.create_task(stop.wait())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        desk.fail_all("the coordinator has stopped")
        await server.stop(drain_s=0)
        again.cancel()
        desk.close()
    return 0


def _planes(settings: CoordinatorSettings, stack: contextlib.AsyncExitStack) -> Coordinator:
    """The coordinator with its sockets and relays; ``stack`` closes them."""
    loop = asyncio.get_running_loop()
    plan = settings.plan
    incarnation = secrets.token_hex(8)
    security = surroundings.security(settings.control_key)
    coordinator = Coordinator(plan, incarnation=incarnation, loop=loop)
    channels = Channels(
        coordinator, incarnation=incarnation, loop=loop, security=security, dead_after_s=plan.dead_after_s
    )
    stack.callback(channels.close)
    stack.push_async_callback(channels.settled, SETTLE_S)
    relays = Relays(
        loop=loop,
        incarnation=incarnation,
        on_release=coordinator.release,
        security=security,
        settings=surroundings.relay_settings(settings),
    )
    stack.callback(relays.close)
    publisher = channels.bind_publisher(settings.publish)
    endpoint = channels.bind(settings.listen)
    terminal_stages = None
    if plan.terminal_stages_fn:
        terminal_stages = resolve(plan.terminal_stages_fn, field="terminalStagesFn")
    coordinator.wire(
        channels,
        relays,
        endpoint=surroundings.advertised(settings.advertise, endpoint),
        publisher=surroundings.advertised(settings.publish_advertise, publisher),
        revisions=read_revisions(settings.revisions),
        terminal_stages=terminal_stages,
    )
    return coordinator


def read_revisions(path: Path) -> list[PipelineRevision]:
    """Raises: ConfigurationError: no such file, or it holds no list of revisions."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[PipelineRevision])
    except OSError as error:
        raise ConfigurationError(f"OMNI_REVISIONS: {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"OMNI_REVISIONS: {path}: {error}") from error


async def _watch_revisions(path: Path, changed: Callable[[list[PipelineRevision]], Any]) -> None:
    """Read the file again when it changes. A broken one keeps what was read before."""
    known = path.read_bytes()
    while True:
        await asyncio.sleep(REVISIONS_EVERY_S)
        try:
            content = path.read_bytes()
        except OSError:
            continue  # a ConfigMap's symlink is being swapped
        if content == known:
            continue
        known = content
        try:
            changed(msgspec.json.decode(content, type=list[PipelineRevision]))
            log.info("pipeline revisions read again from %s", path)
        except msgspec.MsgspecError as error:
            log.error("%s is no list of revisions, the one before stays: %s", path, error)


def _web_settings(settings: CoordinatorSettings) -> WebSettings:
    plan = settings.plan
    return WebSettings(
        model=plan.model,
        serves=plan.serves,
        max_body_bytes=plan.max_body_bytes,
        media_hosts=plan.media_hosts,
        api_keys=(settings.api_key,) if settings.api_key else (),
        probes=not settings.probe_port,
    )

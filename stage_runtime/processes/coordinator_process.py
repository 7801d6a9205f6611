"""Wiring of the coordinator's process: sockets, relays, request manager, HTTP servers; and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from omnipipeline_spec.types.plan import CanaryShare, PipelineRevision
from omnipipeline_spec.types.pods import CANARY_FILE, COORDINATOR, ON_DEMAND_FILE, PROFILING_FILE
from omnipipeline_spec.types.routes import ROUTES, SOCKETS
from stage_runtime.coordinator.answering.unread_answers import AnswerLimits
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.coordinator.questions.profile_runs import ProfileLimits
from stage_runtime.coordinator.reporting.tracing import RequestTracer
from stage_runtime.coordinator.request_manager import RequestManager
from stage_runtime.engines.making.resolving import resolve_hook
from stage_runtime.errors import UNDECODABLE, ConfigurationError, describe
from stage_runtime.metrics import catalog
from stage_runtime.processes import collecting, logs, loops, process_context, signals, traces
from stage_runtime.processes.supervision import statuspipe
from stage_runtime.processes.tasks import Tasks
from stage_runtime.processes.watched_files import WatchedFile
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory import pages
from stage_runtime.rules.flow import ticks
from stage_runtime.settings import CoordinatorSettings, api_keys
from stage_runtime.sockets.channels import Channels, LinkTimes
from stage_runtime.sockets.endpoints import limits
from stage_runtime.sockets.endpoints.doors import Doors
from stage_runtime.web import app as web
from stage_runtime.web import routes
from stage_runtime.web.exchanges.apikeys import ApiKeys
from stage_runtime.web.exchanges.memory_budget import MemoryBudget
from stage_runtime.web.exchanges.metrics import CoordinatorMetrics
from stage_runtime.web.listening import certificates, pinning
from stage_runtime.web.listening.certificates import CertificatePair, Certificates
from stage_runtime.web.listening.limits.connection_limits import ConnectionLimits
from stage_runtime.web.listening.server import Server
from stage_runtime.web.settings import WebSettings
from stage_runtime.web.sound.pool import CodecPool

T = TypeVar("T")

log = logging.getLogger(__name__)

REREAD_EVERY_S: Final = 0.5
ADMIN_HOST: Final = "127.0.0.1"  # `kubectl port-forward` reaches it, a Service does not
LAST_WORDS_S: Final = 1.0  # of the time to drain, for answers to clients that still wait; SIGKILL comes at its end
ASIDE: Final = "aside.json"
SETTLE_S: Final = 1.0
ANSWERS_SHARE: Final = 0.125  # of the memory, for answers that are not read yet
MAX_ANSWERS: Final = 1 << 30
ONE_ANSWER_SHARE: Final = 0.25  # of that, for one answer that is not streamed
REST_MOST_S: Final = 16  # seconds without an ended request after which memory is given back once more


def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM, drain, and return the exit code."""
    logs.configure(settings.log_format, name=COORDINATOR, level=settings.log_level)
    limits.raise_limits()
    pages.limit_heaps()
    return loops.run(_serve(process_context.listening(settings)))


async def _serve(settings: CoordinatorSettings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals.handle(lambda _: stop.set(), signal.SIGTERM, signal.SIGINT)
    crashed: asyncio.Future[BaseException] = loop.create_future()

    def ended(name: str, error: BaseException) -> None:
        log.error("the task %r has ended: %s", name, describe(error))
        if not crashed.done():
            crashed.set_result(error)

    async with contextlib.AsyncExitStack() as stack:
        coordinator = _planes(settings, stack)
        logs.protect()
        manager = coordinator.manager
        shown = _web_settings(settings)
        drain_s = drain_seconds(settings.plan.drain_timeout_s)
        tls = None if settings.certificate is None else _certificates(*settings.certificate, settings.shown_certificate)
        serving, tasks = Tasks(ended), stack.enter_context(Tasks(ended))
        server = await _servers(settings, coordinator, shown, tls, stack, serving, drain_s)
        _watch_files(settings, coordinator, shown.api_keys, tls, tasks)
        tasks.start("profiles", _beat(coordinator.profiling.beat))
        tasks.start("memory", _give_memory_back(lambda: manager.stats.outcomes.total()))
        collecting.settle()
        statuspipe.report(settings.status_fd, statuspipe.Serving(url=server.url))
        log.info("serving %s at %s", settings.plan.pipeline, server.url)
        stopping = asyncio.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, crashed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()  # it is we who stop the servers
        if crashed.done():
            stopping.cancel()
            manager.fail_all("the coordinator has crashed")
            await server.stop(drain_s=0)
            raise crashed.result()
        stop.clear()
        await _drain(settings, manager, server, stop, drain_s)
    return 0


async def _servers(
    settings: CoordinatorSettings,
    coordinator: Coordinator,
    shown: WebSettings,
    tls: Certificates | None,
    stack: contextlib.AsyncExitStack,
    serving: Tasks,
    drain_s: float,
) -> Server:
    """Start the HTTP servers. ``stack`` closes those of probes and administration, the caller stops the clients'.

    Returns: the clients' server. serving: watches all of them.
    """
    manager, host = coordinator.manager, settings.http_host
    metrics = CoordinatorMetrics(manager, of_members=not settings.probe_port)
    if tls is not None:
        _count_certificate(metrics, tls)
    codecs = await stack.enter_async_context(CodecPool())
    speaks = {one.serves for one in ROUTES if one.sound} | {one.serves for one in SOCKETS}
    if speaks & set(settings.plan.serves):  # a chat may never ask for sound
        codecs.warm()
    admin = routes.admin(coordinator.profiling, coordinator.operations, coordinator.adapters, model=shown.model)
    budget = MemoryBudget(shown.max_held_bytes, grace_s=shown.body_grace_s)
    of_client = [] if settings.admin_port else admin
    app = web.make_app(manager, shown, codecs=codecs, metrics=metrics, admin=of_client, budget=budget)
    limits = ConnectionLimits(unread_nbytes=shown.max_held_bytes)
    server = Server(app, host=host, port=settings.http_port, drain_s=drain_s, limits=limits, certificates=tls)
    await server.__aenter__()
    serving.start("HTTP server", server.ended())
    if settings.probe_port:
        probing = Server(web.make_probes(manager, metrics), host=host, port=settings.probe_port, drain_s=0)
        await stack.enter_async_context(probing)
        serving.start("probe server", probing.ended())
    if settings.admin_port:
        own = web.make_admin(manager, shown, codecs=codecs, metrics=metrics, admin=admin, budget=budget)
        administration = Server(own, host=ADMIN_HOST, port=settings.admin_port, drain_s=0)
        await stack.enter_async_context(administration)
        serving.start("admin server", administration.ended())
    return server


async def _drain(
    settings: CoordinatorSettings, manager: RequestManager, server: Server, stop: asyncio.Event, drain_s: float
) -> None:
    """Finish the requests that are in flight, for so long at most. stop: set when the process is asked to end again."""
    statuspipe.report(settings.status_fd, statuspipe.Draining())
    manager.drain()
    if not settings.http_quiet_s:  # nothing else will serve, so a client gains nothing by another request here
        manager.refuse("the coordinator is draining")
    draining = asyncio.create_task(server.drain(quiet_s=settings.http_quiet_s))
    again = asyncio.create_task(stop.wait())
    await asyncio.wait([draining, again], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    manager.refuse("the coordinator has stopped")
    manager.fail_all("the coordinator has stopped")
    await server.stop(drain_s=0)
    again.cancel()
    await draining
    manager.close()


def _watch_files(
    settings: CoordinatorSettings, coordinator: Coordinator, keys: ApiKeys, tls: Certificates | None, tasks: Tasks
) -> None:
    """Obey the files that the supervisor or the operator changes while the process runs."""
    _watch(settings.revisions.with_name(PROFILING_FILE), _limits, coordinator.profiling.limit, tasks, known=b"{}")
    # The share is watched before the list of revisions: a new one is never served without the share that it may
    # have.
    _watch(settings.revisions.with_name(CANARY_FILE), _canary, coordinator.share_requests, tasks, known=b"null")
    _watch(settings.revisions, _revisions, coordinator.update_revisions, tasks)
    if settings.api_key_file is not None:
        _watch(settings.api_key_file, _keys, keys.replace, tasks)
    if tls is not None and settings.certificate is not None:
        tasks.start("watch of the certificate", _watch_certificate(*settings.certificate, tls))
    _watch(settings.revisions.with_name(ASIDE), _hosts, coordinator.set_aside, tasks, known=b"[]")
    on_demand = settings.revisions.with_name(ON_DEMAND_FILE)
    _watch(on_demand, _groups, coordinator.start_on_demand, tasks, known=b"[]")


def drain_seconds(timeout_s: float) -> float:
    """How long open answers may go on after SIGTERM, of the time until SIGKILL."""
    return max(timeout_s - LAST_WORDS_S, timeout_s / 2)


def _planes(settings: CoordinatorSettings, stack: contextlib.AsyncExitStack) -> Coordinator:
    """The coordinator with its sockets and relays; ``stack`` closes them."""
    loop = asyncio.get_running_loop()
    plan = settings.plan
    incarnation = secrets.token_hex(8)
    security = process_context.security(settings.control_key)
    coordinator = Coordinator(
        plan,
        incarnation=incarnation,
        loop=loop,
        answer_limits=answer_limits(settings.answers_nbytes, plan.max_body_bytes),
    )
    channels = Channels(
        coordinator, incarnation=incarnation, loop=loop, security=security, times=LinkTimes(plan.dead_after_s)
    )
    stack.callback(channels.close)
    stack.push_async_callback(channels.settled, SETTLE_S)
    relays = Relays(
        loop=loop,
        incarnation=incarnation,
        on_release=coordinator.release,
        on_failed=coordinator.relay_failed,
        security=security,
        doors=Doors(loop, at=" by the tcp relay"),
        settings=process_context.relay_settings(settings),
    )
    stack.callback(relays.close)
    publisher = channels.bind_publisher(settings.publish)
    endpoint = channels.bind(settings.listen)
    terminal_stages = None
    if plan.terminal_stages_fn:
        terminal_stages = resolve_hook(plan.terminal_stages_fn, "terminalStagesFn", field="terminalStagesFn")
    profiles = process_context.profiles(settings, lambda: incarnation)
    stack.callback(profiles.close)
    tracing = _tracing(plan.pipeline, incarnation, stack)
    coordinator.wire(
        channels,
        relays,
        profiles=profiles,
        endpoint=process_context.advertised(settings.advertise, endpoint),
        publisher=process_context.advertised(settings.publish_advertise, publisher),
        revisions=read_revisions(settings.revisions),
        terminal_stages=terminal_stages,
        tracing=tracing,
    )
    return coordinator


def answer_limits(asked_nbytes: int | None, largest_body: int) -> AnswerLimits:
    """How much of answers may wait for their clients. An answer of the size of the largest body always may."""
    of_all = asked_nbytes or max(largest_body, min(MAX_ANSWERS, int(process_context.memory_limit() * ANSWERS_SHARE)))
    return AnswerLimits(of_one=min(of_all, max(largest_body, int(of_all * ONE_ANSWER_SHARE))), of_all=of_all)


def _tracing(pipeline: str, incarnation: str, stack: contextlib.AsyncExitStack) -> RequestTracer | None:
    """None: no variable asks for traces, or they cannot be sent: that is logged, and requests are served."""
    try:
        found = traces.exporter(pipeline, incarnation, stack)
    except ConfigurationError as error:
        log.error("no traces are sent: %s", error)
        return None
    if found is None:
        return None
    exporter, settings = found
    log.info("traces of %g of all requests go to %s", settings.ratio, settings.endpoint)
    return RequestTracer(exporter, ratio=settings.ratio)


def read_revisions(path: Path) -> list[PipelineRevision]:
    """Raises: ConfigurationError: no such file, or it holds no list of revisions."""
    try:
        return _revisions(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"OMNI_REVISIONS: {path}: {error.strerror}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"OMNI_REVISIONS: {path}: {error}") from error


def _revisions(content: bytes) -> list[PipelineRevision]:
    try:
        return msgspec.json.decode(content, type=list[PipelineRevision])
    except UNDECODABLE as error:
        raise ConfigurationError(f"no list of revisions: {error}") from error


def _keys(content: bytes) -> tuple[str, ...]:
    return api_keys(content, "API keys")


def _hosts(content: bytes) -> list[str]:
    """Addresses of pods that were taken out of their units. Raises: ConfigurationError."""
    try:
        return msgspec.json.decode(content, type=list[str])
    except UNDECODABLE as error:
        raise ConfigurationError(f"no list of addresses: {error}") from error


def _groups(content: bytes) -> list[str]:
    """Process groups that start on demand. Raises: ConfigurationError."""
    try:
        return msgspec.json.decode(content, type=list[str])
    except UNDECODABLE as error:
        raise ConfigurationError(f"no list of process groups: {error}") from error


def _canary(content: bytes) -> CanaryShare | None:
    """The share of a revision that is tried. Raises: ConfigurationError."""
    try:
        return msgspec.json.decode(content, type=CanaryShare | None)
    except UNDECODABLE as error:
        raise ConfigurationError(f"no share of a revision: {error}") from error


def _limits(content: bytes) -> ProfileLimits:
    """``profiling`` of the resource. Raises: ConfigurationError."""
    try:
        return msgspec.json.decode(content, type=ProfileLimits)
    except UNDECODABLE as error:
        raise ConfigurationError(f"no profiling settings: {error}") from error


def _watch(
    path: Path,
    read: Callable[[bytes], T],
    changed: Callable[[T], Any],
    tasks: Tasks,
    *,
    known: bytes | None = None,
) -> None:
    """Read the file again when it changes, as one of ``tasks``. A broken one keeps what was read before.

    known: what was read of it before; None: what is in it now.
    """
    watched = WatchedFile(path, known)
    tasks.start(f"watch of {path.name}", _watch_file(watched, read, changed))


async def _watch_file(watched: WatchedFile, read: Callable[[bytes], T], changed: Callable[[T], Any]) -> None:
    while True:
        content = watched.changed()
        if content is not None:
            try:
                changed(read(content))
                log.debug("%s has changed and was read again", watched.path)
            except ConfigurationError as error:
                log.error("%s: %s; the values read before stay in use", watched.path, error)
        await asyncio.sleep(ticks.next_s(time.time(), REREAD_EVERY_S))


def _pair(chain: Path, key: Path) -> CertificatePair:
    """Raises: ConfigurationError: a file cannot be read."""
    try:
        return certificates.read(chain, key)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error


def _certificates(chain: Path, key: Path, shown: Path | None) -> Certificates:
    """shown: a file that always has the certificate which clients are shown.

    Raises: ConfigurationError: names the files, one of which cannot be read, or they do not fit together.
    """
    try:
        return Certificates(_pair(chain, key), changing=None if shown is None else functools.partial(_show, shown))
    except ConfigurationError as error:
        raise ConfigurationError(f"OMNI_TLS_CERT_FILE {chain}, OMNI_TLS_KEY_FILE {key}: {error}") from error


def _show(shown: Path, contexts: Sequence[ssl.SSLContext]) -> None:
    fresh = shown.with_name(f"{shown.name}.new")
    try:
        fresh.write_bytes(pinning.listed(map(pinning.shown, contexts)))
        fresh.replace(shown)
    except OSError as error:  # a full disk: clients are served all the same
        log.error("cannot write %s: %s; the commands of this run cannot reach it", shown, error.strerror)


def _count_certificate(metrics: CoordinatorMetrics, tls: Certificates) -> None:
    metrics.read(catalog.HTTP_CERTIFICATE_START, lambda: tls.life and tls.life.begins)
    metrics.read(catalog.HTTP_CERTIFICATE_END, lambda: tls.life and tls.life.ends)
    metrics.read(catalog.HTTP_CERTIFICATE_REFUSED, lambda: float(tls.refused))


async def _watch_certificate(chain: Path, key: Path, tls: Certificates) -> None:
    """Show the certificate that is in the files now. One that is wrong is logged once, and the present one stays."""
    known, problem = tls.pair, ""
    while True:
        await asyncio.sleep(ticks.next_s(time.time(), REREAD_EVERY_S))
        try:
            pair = await asyncio.to_thread(_pair, chain, key)
            if pair != known:
                known = pair
                tls.replace(pair)
                log.info("the certificate has changed: connections from now on get the new one")
            tls.refused = pair != tls.pair
            problem = problem if tls.refused else ""
        except ConfigurationError as error:
            tls.refused = True
            if str(error) != problem:
                problem = str(error)
                log.error("cannot replace the certificate: %s; the one that was read before stays", problem)


async def _beat(beat: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(ticks.next_s(time.time(), 1.0))
        beat()


async def _give_memory_back(ended: Callable[[], int]) -> None:
    """Return to the system what ended requests have left free, when none has ended for a while.

    Late answers, and clients that read slowly, let go of more: so again, ever less often.
    """
    known, calm = ended(), REST_MOST_S
    while True:
        await asyncio.sleep(ticks.next_s(time.time(), 1.0))
        calm = calm + 1 if ended() == known else 0
        known = ended()
        if 0 < calm <= REST_MOST_S and calm.bit_count() == 1:
            pages.give_back()


def _web_settings(settings: CoordinatorSettings) -> WebSettings:
    plan = settings.plan
    return WebSettings(
        model=plan.model,
        serves=plan.serves,
        accepts=frozenset(plan.accepts),
        max_body_bytes=plan.max_body_bytes,
        media_hosts=plan.media_hosts,
        api_keys=ApiKeys(settings.api_keys),
        probes=not settings.probe_port,
        local=process_context.is_loopback(settings.http_host),
        hosts=(*settings.http_hosts, *plan.allowed_hosts),
        max_held_bytes=settings.bodies_nbytes or process_context.bodies_nbytes(plan.max_body_bytes),
    )

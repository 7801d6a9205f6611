"""The meaning of settings for sockets and relays: keys, addresses, sizes. Used by the wiring of both programs."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from typing import Final

import msgspec

from omnipipeline_spec.types.plan import RelayPlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler.recording.session import ProfileSession
from stage_runtime.relays.context import RelaySettings
from stage_runtime.settings import CoordinatorSettings, StageSettings
from stage_runtime.sockets.endpoints import hosts, limits
from stage_runtime.sockets.endpoints.addresses import CurveSecurity

BODIES_SHARE: Final = 0.125  # of it, for what clients send: decoded and encoded for the relay it is there three times
MAX_BODIES: Final = 1 << 30
ARENA_SHARE: Final = 0.4  # of the container's memory: what is in flight must not crowd out models


def memory_limit() -> int:
    """Bytes that this process may use: its control group's limit, else the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, limits.memory_limit() or machine)


def bodies_nbytes(largest: int) -> int:
    """How much of bodies and media may be in flight at a coordinator; one of the ``largest`` always may."""
    return max(largest, min(MAX_BODIES, int(memory_limit() * BODIES_SHARE)))


def is_loopback(host: str) -> bool:
    """Whether a server at ``host`` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(settings: CoordinatorSettings) -> CoordinatorSettings:
    """The settings with addresses written out: ``*``, and a pod's address as Kubernetes writes it."""
    endpoints = ("listen", "advertise", "publish", "publish_advertise")
    written = {name: hosts.written_out(getattr(settings, name)) for name in endpoints}
    return msgspec.structs.replace(settings, http_host=hosts.host(settings.http_host), **written)


def security(key: bytes | None) -> CurveSecurity | None:
    return CurveSecurity(key) if key is not None else None


def advertised(wanted: str, bound: str) -> str:
    """The endpoint to advertise: as configured, with the port that was bound."""
    if not wanted.startswith("tcp://"):
        return bound if bound.startswith("ipc://") else wanted
    host, _, port = wanted.rpartition(":")
    return f"{host}:{bound.rpartition(':')[2]}" if port in ("0", "*") else wanted


def rank_addresses(settings: StageSettings) -> tuple[str, str, RelaySettings]:
    """The addresses where rank 0 of a TP stage listens for its followers, what is advertised to them, and the relays
    beside it.
    """
    relays = relay_settings(settings)
    followers = settings.tp_endpoints[0]
    if followers.startswith("ipc://"):
        listen = advertise = f"{followers}.r"
        bind = f"{listen}d"
    else:
        bind = listen = f"{followers.rpartition(':')[0]}:*"
        advertise = listen
    arena = max(relays.arena_bytes // 4, min(relays.arena_bytes, 64 << 20))  # steps are released as they are taken
    settled = msgspec.structs.replace(
        relays, bind=bind, advertise_host=None, arena_bytes=arena, prefault_bytes=0, named=frozenset()
    )
    return listen, advertise, settled


def relay_settings(settings: StageSettings | CoordinatorSettings) -> RelaySettings:
    """The settings of relays: they listen beside the control socket, on the same interface."""
    defaults = RelaySettings()
    bind, host = defaults.bind, defaults.advertise_host
    if settings.listen.startswith("ipc://"):
        bind = f"{settings.listen}.data"
    elif settings.listen.startswith("tcp://"):
        bind = f"{settings.listen.rpartition(':')[0]}:*"
        host = settings.advertise.removeprefix("tcp://").rpartition(":")[0]
    arena = settings.arena_bytes or min(defaults.arena_bytes, int(memory_limit() * ARENA_SHARE))
    return RelaySettings(
        named=_named_relays(settings),
        allow_tcp=not isinstance(settings, StageSettings) or settings.plan.allow_tcp,
        mooncake_protocol=settings.plan.mooncake_protocol if isinstance(settings, StageSettings) else None,
        rank=_declared(settings, lambda relay: relay.rank),
        world_size=_declared(settings, lambda relay: relay.world_size),
        pod=settings.pod_uid,
        gpus=_gpus(settings),
        coordinator=not isinstance(settings, StageSettings),
        arena_bytes=arena,
        prefault_bytes=min(defaults.prefault_bytes, arena),
        bind=bind,
        advertise_host=host,
    )


def _named_relays(settings: StageSettings | CoordinatorSettings) -> frozenset[str]:
    """The relays that the plan names for what this process sends."""
    if isinstance(settings, StageSettings):
        return frozenset(stage.relay.backend for stage in settings.stages()) - {"auto"}
    return frozenset([settings.plan.relay_backend]) - {"auto"}


def _gpus(settings: StageSettings | CoordinatorSettings) -> tuple[int, ...]:
    """Those of this process's stages; of a rank of a TP stage, its own."""
    if not isinstance(settings, StageSettings):
        return ()
    return tuple(sorted({stage.gpus[settings.tp_rank % len(stage.gpus)] for stage in settings.stages() if stage.gpus}))


def _declared(settings: StageSettings | CoordinatorSettings, of: Callable[[RelayPlan], int | None]) -> int | None:
    """The place of this process in an NCCL world, from its stages; validation has refused different answers."""
    if not isinstance(settings, StageSettings):
        return None
    return next((value for stage in settings.stages() if (value := of(stage.relay)) is not None), None)


def profiles(settings: StageSettings | CoordinatorSettings, incarnation: Callable[[], str]) -> ProfileSession:
    """The process's profiles. Each process has a folder of its own in pods: they may share the storage."""
    stages = [COORDINATOR]
    rank = 0
    if isinstance(settings, StageSettings):
        stages, rank = [stage.name for stage in settings.stages()], settings.tp_rank
    own_folder = not settings.listen.startswith("ipc://")
    return ProfileSession(settings.profile_root, stages, incarnation=incarnation, rank=rank, own_folder=own_folder)

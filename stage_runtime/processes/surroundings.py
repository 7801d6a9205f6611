"""What settings mean for sockets and relays: keys, addresses, sizes. Used by the wiring of both programs."""

from __future__ import annotations

from stage_runtime.relays.context import RelaySettings
from stage_runtime.settings import CoordinatorSettings, StageSettings
from stage_runtime.sockets.addresses import Security


def security(key: bytes | None) -> Security | None:
    return Security(key) if key is not None else None


def advertised(wanted: str, bound: str) -> str:
    """The endpoint that peers are told: as wanted, with the port that was really bound."""
    if not wanted.startswith("tcp://"):
        return bound if bound.startswith("ipc://") else wanted
    host, _, port = wanted.rpartition(":")
    return f"{host}:{bound.rpartition(':')[2]}" if port in ("0", "*") else wanted


def relay_settings(settings: StageSettings | CoordinatorSettings) -> RelaySettings:
    """Where the relays listen: beside the control socket, on the same interface."""
    defaults = RelaySettings()
    bind, host = defaults.bind, defaults.advertise_host
    if settings.listen.startswith("ipc://"):
        bind = f"{settings.listen}.data"
    elif settings.listen.startswith("tcp://"):
        bind = f"{settings.listen.rpartition(':')[0]}:*"
        host = settings.advertise.removeprefix("tcp://").rpartition(":")[0]
    arena = settings.arena_bytes or defaults.arena_bytes
    return RelaySettings(
        arena_bytes=arena, prefault_bytes=min(defaults.prefault_bytes, arena), bind=bind, advertise_host=host
    )

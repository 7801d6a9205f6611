"""Asks a local run's coordinator: its status, and whether it knows the instances that are ready. Called by `local`."""

from __future__ import annotations

import asyncio
import http.client
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.processes.supervision.supervisor import Supervisor
from stage_runtime.web.listening import pinning

ADMISSION_POLL_S: Final = 0.02


async def wait(
    ready: Callable[[], Awaitable[None]],
    supervisor: Supervisor,
    url: Callable[[], str],
    key: str | None,
    group: str | None = None,
    certificate: Path | None = None,
) -> None:
    """Once ``ready`` returns, wait until the coordinator knows all ready instances (of one group): milliseconds.

    url: the coordinator's, known once ``ready`` has returned. key: what it asks clients for. certificate: as `status`.
    """
    await ready()
    while _ready_instances(supervisor, group) - await _known_ready(url(), key, certificate):
        await asyncio.sleep(ADMISSION_POLL_S)
        await ready()


def _ready_instances(supervisor: Supervisor, group: str | None) -> Counter[str]:
    """Group -> how many of it are ready now."""
    there = supervisor.instances(group)
    return Counter(one.spec.group for one in there if one.ready and one.spec.group != COORDINATOR)


async def status(url: str, key: str | None, certificate: Path | None = None) -> dict[str, Any]:
    """The coordinator's `/status`; empty when it does not answer now. certificate: a file with what it shows."""
    return await asyncio.to_thread(_status, url, key, certificate)


async def _known_ready(url: str, key: str | None, certificate: Path | None) -> Counter[str]:
    instances = (await status(url, key, certificate)).get("instances", [])
    return Counter(one["group"] for one in instances if one["ready"] and not one["draining"])


def _status(url: str, key: str | None, certificate: Path | None) -> dict[str, Any]:
    connection: http.client.HTTPConnection | None = None
    try:
        connection = _connection(url, certificate)
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {key}"} if key else {})
        return msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return {}
    finally:
        if connection is not None:
            connection.close()


def _connection(url: str, certificate: Path | None) -> http.client.HTTPConnection:
    where = urlsplit(url)
    host = where.hostname or ""
    if certificate is None:
        return http.client.HTTPConnection(host, where.port, timeout=5)
    trust = pinning.pinned(certificate)
    return http.client.HTTPSConnection(host, where.port, timeout=5, context=trust)

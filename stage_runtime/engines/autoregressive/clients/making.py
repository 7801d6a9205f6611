"""Which client serves a program."""

from __future__ import annotations

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.inproc import InprocClient
from stage_runtime.engines.autoregressive.clients.sync_mp import SyncMPClient
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.errors import ConfigurationError


def make_client(launch: EngineLaunch, *, multiprocess_mode: bool) -> InprocClient | SyncMPClient:
    """A client for a program without an event loop. Raises: ConfigurationError: the engine could not start."""
    return SyncMPClient(launch) if multiprocess_mode else InprocClient(launch)


async def make_async_client(launch: EngineLaunch, *, multiprocess_mode: bool) -> AsyncMPClient:
    """A client for an event loop.

    Raises: ConfigurationError: the engine could not start; or it would compute on the loop's thread, which would stop
        everything else there for a step.
    """
    if not multiprocess_mode:
        raise ConfigurationError("an engine in the event loop's own process is not supported: use multiprocess_mode")
    return await AsyncMPClient.start(launch)

"""The choice of the client that serves a stage."""

from __future__ import annotations

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.data_parallel.dp_coordinator import DPCoordinator
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch


def make_client(launch: EngineLaunch, *, engines: int = 1, lockstep: bool = False) -> AsyncMPClient:
    """A client of engine processes, not attached to an event loop yet. Several are coordinated, and can be scaled if
    they do not compute together (``lockstep``).

    Blocks until all are ready. Raises: ConfigurationError: one could not start.
    """
    if engines == 1:
        return AsyncMPClient(launch)
    coordinator = DPCoordinator(engines, lockstep=lockstep)
    try:
        client = DPLBAsyncMPClient(launch, coordinator, elastic=not lockstep)
    except BaseException:
        coordinator.close()
        raise
    if lockstep:
        coordinator.all_connected()
    return client

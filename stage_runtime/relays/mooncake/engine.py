"""Mooncake's Transfer Engine as this relay uses it: memory registered once, flat reads.

An engine is used again by the next relay of the process: to destroy one takes a second, with the GIL held.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

from stage_runtime.errors import ConfigurationError

#: Set before it is loaded; a variable that is set already is left as it is. A frozen peer is noticed after this time,
#: for which the calling thread burns a core: 5 s is the least that Mooncake accepts, 30 s its default.
TUNED: Final = {"MC_TRANSFER_TIMEOUT": "5", "MC_LOG_LEVEL": "ERROR"}

_idle: dict[str, list[Any]] = {}  #: Engines that no relay uses, by host.
_lock = threading.Lock()


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())


class Engine:
    """One engine, listening on two ports of ``host``. `read` may be called from any thread."""

    def __init__(self, host: str) -> None:
        """Raises: ConfigurationError: Mooncake is not installed, or does not start here."""
        for name, value in TUNED.items():
            os.environ.setdefault(name, value)
        if not has_rdma():
            os.environ.setdefault("MC_FORCE_TCP", "1")  # the argument "tcp" is ignored
        self._host = host
        self._engine = _taken(host)
        self._registered: list[int] = []
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers read that memory, or read into it.

        Raises: ConfigurationError: the system refuses.
        """
        if self._engine.register_memory(address, nbytes) != 0:
            raise ConfigurationError(f"relay 'mooncake': {nbytes} bytes cannot be registered")
        self._registered.append(address)

    def read(self, session: str, ours: int, theirs: int, nbytes: int) -> bool:
        """Copy a peer's memory here; runs without the GIL, and keeps a core busy. False: it failed, and if that took
        long, bytes may still come.
        """
        return bool(self._engine.transfer_sync_read(session, ours, theirs, nbytes) == 0)

    def close(self, *, again: bool) -> None:
        """again: nothing is read any more, so another relay may have the engine."""
        while self._registered:
            self._engine.unregister_memory(self._registered.pop())
        if again:
            with _lock:
                _idle.setdefault(self._host, []).append(self._engine)


def _taken(host: str) -> Any:
    """An engine of ``host``: an idle one, or a new one."""
    with _lock:
        idle = _idle.get(host)
        if idle:
            return idle.pop()
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        install = "pip install 'omnipipeline[mooncake]', and Debian's libibverbs1 libnuma1 libcurl4"
        raise ConfigurationError(f"relay 'mooncake' cannot be loaded ({error}): {install}") from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise ConfigurationError(f"relay 'mooncake': its engine does not start at {host}")
    return engine

"""Mooncake's Transfer Engine as this relay uses it: memory registered once, flat reads that are begun and looked at.

An engine is used again by the next relay of the process: to destroy one takes a second, with the GIL held.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Collection
from typing import Any, Final, Literal, NewType

import msgspec

from stage_runtime.errors import ConfigurationError

#: Set before it is loaded; a variable that is set already is left as it is.
TUNED: Final = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",  # without a byte for so long, Mooncake closes a read's connection; 30 else
}
NOT_BEGUN: Final = (0, (1 << 64) - 1)  # what Mooncake returns instead of a number

ReadId = NewType("ReadId", int)

_idle: dict[tuple[str, str], list[Any]] = {}  #: Engines that no relay uses, by host and protocol.
_lock = threading.Lock()


class ReadState(enum.Enum):
    MOVES = enum.auto()
    HERE = enum.auto()
    FAILED = enum.auto()  #: Its connection is broken.


READ_STATES: Final = {1: ReadState.HERE, -1: ReadState.FAILED}  # all else is under way, also if Mooncake calls it late


class TransferEngine:
    """One engine, listening on two ports of ``host``. Reads are begun and looked at in any thread."""

    def __init__(
        self, host: str, protocol: Literal["tcp", "rdma"] | None = None, devices: Collection[str] = ()
    ) -> None:
        """protocol: None: rdma where there is a device, else tcp. devices: the RDMA devices of this process.

        Raises: ConfigurationError: Mooncake is not installed, or does not start here, or finds no RDMA device.
        """
        forced = "MC_FORCE_TCP" in os.environ
        for name, value in TUNED.items():
            os.environ.setdefault(name, value)
        missing = "no RDMA device is found here" if not devices else "MC_FORCE_TCP is set" if forced else None
        engine = None
        if protocol != "tcp" and missing is None:
            engine = _taken(host, "rdma")
            if not _has_devices(engine):  # it has begun to listen for TCP instead
                engine, missing = None, f"Mooncake finds no RDMA device here, also not {', '.join(devices)}"
        if protocol == "rdma" and engine is None:
            raise ConfigurationError(f"relay 'mooncake': mooncakeProtocol is rdma, and {missing}")
        self.protocol: Literal["tcp", "rdma"] = "tcp" if engine is None else "rdma"
        if engine is None:
            os.environ.setdefault("MC_FORCE_TCP", "1")  # the argument "tcp" is ignored
            engine = _taken(host, "tcp")
        self._host = host
        self._engine = engine
        self._registered: list[int] = []
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers read that memory, or read into it.

        Raises: ConfigurationError: the system refuses.
        """
        if self._engine.register_memory(address, nbytes) != 0:
            raise ConfigurationError(f"relay 'mooncake': {nbytes} bytes cannot be registered")
        self._registered.append(address)

    def begin(self, session: str, ours: int, theirs: int, nbytes: int) -> ReadId | None:
        """Have a peer's memory copied here, by Mooncake's own thread. The call connects to the peer and waits for that,
        without the GIL. None: the peer is not reached. A move that was begun cannot be stopped.

        Mooncake's reads that wait burn a core until the bytes are here.
        """
        number = self._engine.batch_transfer_async_read(session, [ours], [theirs], [nbytes])
        return None if number in NOT_BEGUN else ReadId(number)

    def state(self, read: ReadId) -> ReadState:
        """Whether the bytes of a read are here. Not called again once the read has ended: Mooncake has freed it."""
        found = self._engine.transfer_check_status(read)
        return READ_STATES.get(found, ReadState.MOVES)

    def close(self, *, again: bool) -> None:
        """again: nothing is read any more, so another relay may have the engine."""
        while self._registered:
            self._engine.unregister_memory(self._registered.pop())
        if again:
            with _lock:
                _idle.setdefault((self._host, self.protocol), []).append(self._engine)


def _taken(host: str, protocol: str) -> Any:
    """An engine of ``host``: an idle one, or a new one."""
    with _lock:
        idle = _idle.get((host, protocol))
        if idle:
            return idle.pop()
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        install = "pip install 'omnipipeline[mooncake]', and Debian's libibverbs1 libnuma1 libcurl4"
        raise ConfigurationError(f"relay 'mooncake' cannot be loaded ({error}): {install}") from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
        raise ConfigurationError(f"relay 'mooncake': its engine does not start at {host}")
    return engine


def _has_devices(engine: Any) -> bool:
    """Whether an engine that was to use RDMA found a device. Otherwise it uses TCP, and reports nothing."""
    by_place: dict[str, list[list[str]]] = msgspec.json.decode(engine.get_local_topology() or "{}")
    return any(devices for places in by_place.values() for devices in places)

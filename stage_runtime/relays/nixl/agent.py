"""NIXL's agent as this relay uses it: one per process, memory registered once, flat transfers.

Called through the bindings: the Python class above them fixes ``pthrDelay`` at 0, which makes its progress thread burn
a core while nothing happens. This is revisited when ``nixl_agent_config`` has that option. Not thread-safe: after the
start, only the relay's own thread calls it (`worker`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NewType

from stage_runtime.errors import ConfigurationError

#: Packages of which one is installed, best first: the wheels differ in the CUDA version that they are built with.
PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
PROGRESS_DELAY_US: Final = 10_000  # the progress thread sleeps in poll() and wakes for events all the same

Handle = NewType("Handle", int)


class Unreachable(Exception):
    """The route to a peer is broken, or was never there. No transfer to or from it is under way any more."""


def bindings(packages: Sequence[str] = PACKAGES) -> Any:
    """NIXL's extension module, of the first of ``packages`` that is installed.

    Raises: ImportError: it is not installed, or not loadable on this machine; the message has the reason.
    """
    reasons = []
    for package in packages:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError("; ".join(reasons))


class Agent:
    """An agent with the backend UCX."""

    def __init__(self, name: str, packages: Sequence[str] = PACKAGES) -> None:
        """Raises: ConfigurationError: NIXL is not installed, or UCX does not start here."""
        try:
            nixl = self._nixl = bindings(packages)
        except ImportError as error:
            install = "pip install 'omnipipeline[nixl]'"
            raise ConfigurationError(f"relay 'nixl' cannot be loaded ({error}): {install}") from error
        #: All that a call raises: none of them has a common base of NIXL's own.
        self._errors = tuple(
            value
            for key, value in vars(nixl).items()
            if key.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
        )
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        config.captureTelemetry = True
        self.moved_nbytes = 0  #: Bytes by NIXL's own count, of the complete transfers that this agent began.
        try:
            self._agent = nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise ConfigurationError(f"relay 'nixl': UCX does not start: {error}") from error

    def register(self, address: int, nbytes: int) -> None:
        """Let peers read and write that memory of this process.

        Raises: ConfigurationError: the system refuses.
        """
        try:
            self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, nbytes, 0, "")]))
        except self._errors as error:
            raise ConfigurationError(f"relay 'nixl': {nbytes} bytes cannot be registered: {error}") from error

    def metadata(self) -> bytes:
        """How peers reach this agent and its memory; after `register`."""
        return bytes(self._agent.getLocalMD())

    def load(self, name: str, metadata: bytes) -> None:
        """Learn of a peer.

        Raises: Unreachable: it is not metadata of that peer's.
        """
        try:
            found = bytes(self._agent.loadRemoteMD(metadata)).decode("utf-8", "replace")
        except self._errors as error:
            raise Unreachable(f"metadata of {name}: {error}") from error
        if found != name:
            raise Unreachable(f"metadata of {name} is that of {found}")

    def unload(self, name: str) -> None:
        """Close the route to a peer, if there is one."""
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors:
            pass  # it was not loaded

    def notify(self, name: str, message: bytes) -> None:
        """Raises: Unreachable: it is known by now that nothing reaches the peer."""
        try:
            self._agent.genNotif(name, message)
        except self._errors as error:
            raise Unreachable(str(error)) from error

    def notifications(self) -> Mapping[str, Sequence[bytes]]:
        """Notifications since the last call, by the name that their sender claims."""
        found: Mapping[str, Sequence[bytes]] = self._agent.getNotifs({}, [])
        return found

    def begin(self, *, write: bool, peer: str, ours: int, theirs: int, nbytes: int, message: bytes) -> Handle:
        """Start to move bytes between two addresses. message: the peer is notified so when all are there; empty: not.

        Raises: Unreachable
        """
        nixl = self._nixl
        try:
            handle = self._agent.createXferReq(
                nixl.NIXL_WRITE if write else nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, [(ours, nbytes, 0)]),
                nixl.nixlXferDList(nixl.DRAM_SEG, [(theirs, nbytes, 0)]),
                peer,
                message,
                [],
            )
        except self._errors as error:
            raise Unreachable(str(error)) from error
        try:
            self._agent.postXferReq(handle)
        except self._errors as error:
            self._release(handle)
            raise Unreachable(str(error)) from error
        return Handle(handle)

    def done(self, handle: Handle) -> bool:
        """Whether a transfer is complete at both ends; then, and when it raises, the handle is void.

        Raises: Unreachable: it failed.
        """
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
        except self._errors as error:
            self._release(handle)
            raise Unreachable(str(error)) from error
        self._count(handle)
        self._release(handle)
        return True

    def close(self) -> None:
        """Nothing moves from here on: the only way to end a transfer under way."""
        del self._agent

    def _count(self, handle: int) -> None:
        try:
            self.moved_nbytes += int(self._agent.getXferTelemetry(handle).totalBytes)
        except self._errors:
            pass  # NIXL has none of it; the bytes are where they belong

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._errors:
            pass  # it has failed; its memory goes with the agent

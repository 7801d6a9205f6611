"""The coordinator of an instance's engines, as its starter sees it: a process and three addresses."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Final

from stage_runtime.engines.autoregressive.process.launching import EngineProcess
from stage_runtime.engines.autoregressive.process.messages.engine_messages import Coordination
from stage_runtime.errors import ConfigurationError
from stage_runtime.sockets import multipart

START_S: Final = 60.0
_PROGRAM: Final = "stage_runtime.engines.autoregressive.data_parallel"


class DPCoordinator:
    """front: for clients. output and input: for engines, seen from them."""

    def __init__(self, engines: int, *, lockstep: bool = False) -> None:
        """Blocks until it listens. Raises: ConfigurationError: it could not start."""
        self.engines = engines
        self.lockstep = lockstep
        self._folder = multipart.Folder()
        self.front, self._output, self._input = (self._folder.endpoint() for _ in range(3))
        self._rendezvous = self._folder.file("rendezvous")
        context = multipart.SocketContext()
        greeting = self._folder.endpoint()
        greeted = context.bind("PULL", greeting)
        argv = ("-m", _PROGRAM, self.front, self._output, self._input, greeting, str(engines), str(os.getpid()))
        try:
            self._process = EngineProcess(-1, argv, {})
            self._await(greeted)
        except BaseException:
            self._folder.remove()
            raise
        finally:
            greeted.close()
            context.close()

    def _await(self, greeted: multipart.FrameSocket) -> None:
        """Raises: ConfigurationError: it has not said that it listens."""
        try:
            poller = multipart.Poller(greeted, self._process.pidfd)
            if not poller.wait(START_S) or greeted.receive() is None:
                raise ConfigurationError(f"the coordinator did not start, exit code {self._process.exit_code}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pidfd(self) -> int:
        """Readable when it has ended."""
        return self._process.pidfd

    @property
    def coordination(self) -> Coordination:
        """The facts that engines and clients must know; any process of this user may be one."""
        return Coordination(
            size=self.engines,
            input=self._input,
            output=self._output,
            stats=self.front,
            pid=self.pid,
            lockstep=self.lockstep,
            rendezvous=self._rendezvous if self.lockstep else "",
        )

    def all_connected(self) -> None:
        """No further engine or client will come: nothing is left on disk should this process be killed."""
        self._folder.remove()

    def close(self) -> None:
        if self._process.pidfd >= 0:
            if self._process.exit_code is None:
                self._process.signal(signal.SIGKILL)  # it holds nothing
            self._process.close()
        self._folder.remove()

    def __enter__(self) -> DPCoordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

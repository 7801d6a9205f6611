"""Engine processes: started, greeted, watched, ended. Linux only (pidfd)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    Coordination,
    EngineFailed,
    EngineHello,
    EngineLoading,
    EngineReady,
    Init,
    identity,
)
from stage_runtime.engines.making import bars
from stage_runtime.errors import ConfigurationError
from stage_runtime.sockets import multipart

ENGINE: Final = "stage_runtime.engines.autoregressive.process"  #: The program of an engine that is alone.
_Greeting: TypeAlias = EngineHello | EngineLoading | EngineReady | EngineFailed


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """factory: a dotted name of what returns a `serving.Served`; called in the engine's process with ``kwargs``.
    env: of the processes, over this one's. cores: a list of processors for each engine, in turn; empty: any.
    frozen_after_s: an engine that gives no sign of life for so long is killed; it gives one each second.
    """

    factory: str
    name: str = ""  #: The name by which `ps` shows the processes: the stage's.
    kwargs: dict[str, Any] = {}
    env: dict[str, str] = {}
    cores: tuple[tuple[int, ...], ...] = ()
    ready_within_s: float = 600.0
    frozen_after_s: float = 10.0


class EngineProcess:
    """One child process."""

    def __init__(self, index: int, argv: Sequence[str], env: Mapping[str, str], cores: Sequence[int] = ()) -> None:
        """Raises: ConfigurationError: this machine does not have the cores. OSError: no process can start."""
        self.index = index
        path = os.pathsep.join(one for one in sys.path if one)  # factories are found as they are here
        whole = {**os.environ, "PYTHONPATH": path, **env}
        self.pidfd = -1  #: Readable when it has ended.
        self._process = subprocess.Popen([sys.executable, *argv], env=whole, stdin=subprocess.DEVNULL)
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
            if cores:
                _keep_to(self._process.pid, cores)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n when killed by signal n."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        """Reap it; it must have ended, or is killed."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self.pidfd)
        self.pidfd = -1


def _keep_to(pid: int, cores: Sequence[int]) -> None:
    """Raises: ConfigurationError."""
    try:
        os.sched_setaffinity(pid, cores)
    except OSError as error:
        raise ConfigurationError(f"cores={list(cores)}: {error.strerror}: this process has {_own_cores()}") from error


def _own_cores() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))


class ForeignProcess:
    """An engine that another process has started, and will end: only watched here."""

    def __init__(self, index: int, pid: int) -> None:
        """Raises: ProcessLookupError: it has ended."""
        self.index = index
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; its starter alone knows the code."""
        return -1 if multipart.wait_for_exit([self.pidfd], 0) else None

    def signal(self, number: int) -> None:
        """Does nothing: the process that has started the engine signals it."""

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1


def end(processes: Sequence[EngineProcess], *, within_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that still run after ``within_s``."""
    for one in processes:
        one.signal(signal.SIGTERM)
    multipart.wait_for_exit([one.pidfd for one in processes if one.pidfd >= 0], within_s)
    for one in processes:
        one.close()


def start(
    launch: EngineLaunch,
    indices: Sequence[int],
    *,
    context: multipart.SocketContext,
    folder: multipart.Folder,
    inputs: Sequence[str],
    outputs: Sequence[str],
    coordination: Coordination | None = None,
    program: str = ENGINE,
) -> tuple[list[EngineProcess], dict[int, EngineReady]]:
    """Start one engine for each index, and wait until all are ready.

    program: the module that each process runs.
    Raises: ConfigurationError: one could not start; it names the cause. None is left running then.
    """
    endpoint = folder.endpoint()
    handshake = context.bind("ROUTER", endpoint)
    processes: list[EngineProcess] = []
    try:
        for index in indices:
            argv = ("-m", program, endpoint, str(index), str(os.getpid()), launch.name)
            cores = launch.cores[index % len(launch.cores)] if launch.cores else ()
            processes.append(EngineProcess(index, argv, launch.env, cores))
        init = Init(
            factory=launch.factory,
            kwargs=launch.kwargs,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            coordination=coordination,
        )
        return processes, _greet(processes, handshake, msgspec.msgpack.encode(init), launch.ready_within_s)
    except BaseException:
        for one in processes:
            one.close()
        raise
    finally:
        handshake.close()


def _greet(
    processes: Sequence[EngineProcess], handshake: multipart.FrameSocket, init: bytes, within_s: float
) -> dict[int, EngineReady]:
    ready: dict[int, EngineReady] = {}
    loading: dict[int, float] = {}
    poller = multipart.Poller(handshake, *(one.pidfd for one in processes))
    deadline = time.monotonic() + within_s
    while len(ready) < len(processes):
        ended = [one for one in processes if one.exit_code is not None]  # before its last words are read
        while (frames := handshake.receive()) is not None:
            sender, greeting = bytes(frames[0]), msgspec.msgpack.decode(frames[1], type=_Greeting)
            if sender != identity(greeting.engine_index):
                continue
            match greeting:
                case EngineHello():
                    handshake.send([sender, init])
                case EngineLoading(index, message, done, total, unit):
                    loading[index] = done / total if total else 0.0
                    if loading[index] <= min(loading.values()):  # the slowest engine's
                        bars.pass_on(message, done, total, unit)
                case EngineReady(index):
                    ready[index] = greeting
                case EngineFailed(index, message):
                    raise ConfigurationError(f"engine {index} could not start: {message}")
        for one in ended:
            raise ConfigurationError(f"engine {one.index} ended while it started, exit code {one.exit_code}")
        if len(ready) < len(processes) and not poller.wait(max(deadline - time.monotonic(), 0)):
            raise ConfigurationError(f"engines were not ready within {within_s:g} s")
    return ready

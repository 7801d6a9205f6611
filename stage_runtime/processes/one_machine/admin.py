"""Orders to a running `omni up`: a Unix socket in its run folder, one JSON line each way.

Here: both ends. Not here: carrying them out (`local`), finding runs (`rundir`). The server is opened by
`cli.serving.up`, the client is called by `cli.running.scale` and `cli.running.restart`. The folder is 0700: only the
user can reach the socket.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from stage_runtime.errors import ConfigurationError, describe, safe_str
from stage_runtime.processes.supervision.startup_failures import StartupFailed

SOCKET = "admin.sock"
MAX_LINE = 1 << 16
MAX_ERROR = 4000  # characters; the last line of a dead process may be as long as it likes

log = logging.getLogger(__name__)


class AdminCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=str.lower):
    """Base of the requests."""


class Scale(AdminCommand, frozen=True, kw_only=True):
    group: str
    replicas: int


class Restart(AdminCommand, frozen=True, kw_only=True):
    group: str


class AdminAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` is empty when it was done."""

    error: str = ""


class AdministeredPipeline(Protocol):
    """The part of `local.LocalPipeline` that the server needs."""

    @property
    def folder(self) -> Path: ...

    async def scale(self, group: str, replicas: int) -> None: ...

    async def restart(self, group: str) -> None: ...


class AdminServer:
    """Takes commands as long as it is open."""

    def __init__(self, pipeline: AdministeredPipeline) -> None:
        self._pipeline = pipeline

    async def __aenter__(self) -> AdminServer:
        self._server = await asyncio.start_unix_server(self._serve, self._pipeline.folder / SOCKET, limit=MAX_LINE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.readline())
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError):  # gone, or a line without an end
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> AdminAnswer:
        try:
            match msgspec.json.decode(line, type=Scale | Restart):
                case Scale(group=group, replicas=replicas):
                    await self._pipeline.scale(group, replicas)
                case Restart(group=group):
                    await self._pipeline.restart(group)
        except (msgspec.MsgspecError, ConfigurationError, StartupFailed) as error:
            return AdminAnswer(error=safe_str(error, limit=MAX_ERROR))
        except Exception as error:  # the outermost: the error is sent to the command, and the next one is served
            log.exception("admin command failed: %s", line.decode(errors="replace").rstrip())
            return AdminAnswer(error=describe(error))
        return AdminAnswer()


async def send(folder: Path, command: Scale | Restart) -> None:
    """Send a command to the run whose folder this is, and wait until it is carried out.

    Raises: ConfigurationError: it was refused, or no process listens.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
    except OSError as error:
        raise ConfigurationError(f"{folder / SOCKET}: {error.strerror}: is it starting or stopping?") from error
    try:
        writer.write(msgspec.json.encode(command) + b"\n")
        line = await reader.readline()
    except ConnectionError:  # it ended before it had read the command
        line = b""
    finally:
        writer.close()
    if not line:
        raise ConfigurationError("it stopped before the command was carried out")
    answer = msgspec.json.decode(line, type=AdminAnswer)
    if answer.error:
        raise ConfigurationError(answer.error)

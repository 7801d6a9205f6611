"""The socket of a running `omni up`: each command is answered, whatever becomes of it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine import admin
from tests.patience import patience

PATIENCE_S = patience(60.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path has room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield Path(made)


class Refusing:
    """`admin.AdministeredPipeline` that carries out nothing."""

    def __init__(self, folder: Path, error: Exception) -> None:
        self.folder = folder
        self._error = error

    async def scale(self, group: str, replicas: int) -> None:
        raise self._error

    async def restart(self, group: str) -> None:
        raise self._error


@pytest.mark.parametrize("kind", [ConfigurationError, RuntimeError])
async def test_a_refusal_whose_text_no_encoding_takes_reaches_the_command(folder: Path, kind: type[Exception]) -> None:
    async with admin.AdminServer(Refusing(folder, kind("/models/\udcff is not there"))):
        with pytest.raises(ConfigurationError, match=r"/models/\\+udcff is not there"):
            await asyncio.wait_for(admin.send(folder, admin.Restart(group="voice")), PATIENCE_S)


async def test_a_run_that_is_killed_before_it_reads_a_command_has_not_carried_it_out(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / admin.SOCKET))
        listening.listen()
        listening.setblocking(False)
        sending = asyncio.create_task(admin.send(folder, admin.Restart(group="voice")))
        accepted, _ = await loop.sock_accept(listening)
        unread = asyncio.Event()
        loop.add_reader(accepted, unread.set)
        await unread.wait()
        loop.remove_reader(accepted)
        accepted.close()  # with bytes in it that were not read, as the kernel does for a process that is killed
        with pytest.raises(ConfigurationError, match="it stopped before the command was carried out"):
            await asyncio.wait_for(sending, PATIENCE_S)

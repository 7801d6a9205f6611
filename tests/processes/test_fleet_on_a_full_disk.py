"""A change of a local run that meets a full disk: what it had begun is taken back, and what ran goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.processes.one_machine.fleet import Fleet
from stage_runtime.processes.one_machine.preparing.prepared import LocalOptions, Prepared
from stage_runtime.processes.supervision.instances import InstanceSpec
from stage_runtime.processes.supervision.startup_failures import StartupFailed

SPEC = """\
name: fleet
stages:
- {name: say, process: voice, factory: "math:floor", factoryArgs: {word: WORD}, terminal: true}
"""


class Instance:
    ready, stopping = True, False

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec


class Supervised:
    """`supervisor.Supervisor` without processes."""

    def __init__(self) -> None:
        self.there: dict[str, Instance] = {}

    def add(self, spec: InstanceSpec, policy: object) -> None:
        self.there[spec.name] = Instance(spec)

    def instances(self, group: str | None = None) -> list[Instance]:
        return [one for one in self.there.values() if group in (None, one.spec.group)]

    async def take_back(self, name: str) -> None:
        del self.there[name]

    async def ready(self, names: object) -> None: ...


class Folder:
    """`rundir.RunDir` whose disk gets full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_full = False

    def write(self, name: str, content: bytes) -> Path:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.path / name

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path / name}"


async def test_a_change_that_fails_on_a_full_disk_takes_back_what_it_had_begun(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(SPEC.replace("WORD", "one"))
    folder, supervised = Folder(tmp_path), Supervised()

    async def admitted(ready: Callable[[], Awaitable[None]], group: str | None = None) -> None:
        folder.is_full = True
        raise StartupFailed("voice.1", "on purpose")

    supervisor: Any = supervised
    fleet = Fleet(
        Prepared(file, options=LocalOptions(port=0)), supervisor, admitted=admitted, printed=lambda line: None
    )
    directory: Any = folder
    fleet.start(directory, lambda: 0)
    before = set(supervised.there)
    file.write_text(SPEC.replace("WORD", "two"))
    with pytest.raises(OSError, match="No space left on device"):
        await fleet.update({file})
    assert set(supervised.there) == before

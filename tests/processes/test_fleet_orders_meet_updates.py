"""Orders for a local run that come while its file is read again: they meet what runs when their turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_spec.types.pods import ON_DEMAND_FILE
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.fleet import Fleet
from stage_runtime.processes.one_machine.preparing.prepared import LocalOptions, Prepared
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from tests.patience import patience
from tests.processes.test_fleet_on_a_full_disk import SPEC, Folder, Supervised

GROUPS = "processGroups: [{name: voice, autoscaling: {minReplicas: 1, maxReplicas: 3}}]\n"


class Stopped(Supervised):
    """Processes that end at once."""

    async def stop(self, name: str) -> None:
        del self.there[name]

    def settle(self, names: object = None) -> None: ...


class Written(Folder):
    """A folder whose files are looked at."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files: dict[str, bytes] = {}

    def write(self, name: str, content: bytes) -> Path:
        self.files[name] = content
        return super().write(name, content)


@pytest.fixture
def held() -> asyncio.Event:
    """Set: new instances are admitted."""
    return asyncio.Event()


def fleet_of(file: Path, held: asyncio.Event, supervised: Stopped) -> Fleet:
    async def admitted(ready: Callable[[], Awaitable[None]], group: str | None = None) -> None:
        await held.wait()

    supervisor: Any = supervised
    fleet = Fleet(
        Prepared(file, options=LocalOptions(port=0)), supervisor, admitted=admitted, printed=lambda line: None
    )
    directory: Any = Folder(file.parent)
    fleet.start(directory, lambda: 0)
    return fleet


@pytest.mark.parametrize("order", ["scale", "restart"])
@pytest.mark.parametrize(
    ("edited", "problem"),
    [
        (SPEC.replace("process: voice", "process: other"), "'voice' is not a process group of fleet: other"),
        (SPEC + GROUPS, "its load sets its replicas"),
    ],
)
async def test_an_order_that_waits_for_an_update_is_for_what_runs_then(
    tmp_path: Path, held: asyncio.Event, order: str, edited: str, problem: str
) -> None:
    file, supervised = tmp_path / "pipeline.yaml", Stopped()
    file.write_text(SPEC)
    fleet = fleet_of(file, held, supervised)
    file.write_text(edited.replace("WORD", "two"))
    updating = asyncio.create_task(fleet.update({file}))
    async with asyncio.timeout(patience(60)):
        while len(supervised.there) < 3:  # the coordinator, and both voices
            await asyncio.sleep(0)
        ordered = asyncio.create_task(fleet.scale("voice", 2) if order == "scale" else fleet.restart("voice"))
        await asyncio.sleep(0)
        held.set()
        await updating
        there = set(supervised.there)
        if order == "restart" and edited.endswith(GROUPS):
            await ordered  # a person may restart what follows its load
            return
        with pytest.raises(ConfigurationError, match=problem):
            await ordered
    assert set(supervised.there) == there


async def test_requests_do_not_wait_for_a_group_that_no_load_starts_any_more_though_its_start_failed(
    tmp_path: Path,
) -> None:
    file, supervised, folder = tmp_path / "pipeline.yaml", Stopped(), Written(tmp_path)
    first = '- {name: hear, process: ear, factory: "math:floor", next: say}\n- {name: say'
    spec = SPEC.replace("- {name: say", first)
    file.write_text(spec + GROUPS.replace("minReplicas: 1", "minReplicas: 0"))

    async def admitted(ready: Callable[[], Awaitable[None]], group: str | None = None) -> None:
        raise StartupFailed("voice.0", "on purpose")

    supervisor: Any = supervised
    fleet = Fleet(
        Prepared(file, options=LocalOptions(port=0)), supervisor, admitted=admitted, printed=lambda line: None
    )
    directory: Any = folder
    fleet.start(directory, lambda: 0)
    assert folder.files[ON_DEMAND_FILE] == b'["voice"]'
    file.write_text(spec)
    with pytest.raises(StartupFailed, match="on purpose"):
        await fleet.update({file})
    assert folder.files[ON_DEMAND_FILE] == b"[]"

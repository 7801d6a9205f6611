"""A container without memory, with real processes: who is new is refused by name, and what runs goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.scalelab.children import LINE_LIMIT, ROOT, Child
from benchmarks.scalelab.fakes import GROUPS

PATIENCE_S = 120.0
MOST = 1 << 30
LITTLE, ALL = MOST // 4, MOST - (1 << 20)
#: The command before one that sees the folder as the container's control group.
INSIDE = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /sys/fs/cgroup && exec "$@"')


def possible() -> bool:
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([*INSIDE, folder, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not possible() and not os.environ.get("CI"), reason="needs root, to mount a folder"),
    pytest.mark.timeout(3 * PATIENCE_S),
]


class Container:
    """The files by which the kernel says what a container may use and uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "memory.max").write_text(f"{MOST}\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 0\n")
        self.use(LITTLE)

    def use(self, nbytes: int) -> None:
        beside = self.folder / "next"
        beside.write_text(f"{nbytes}\n")
        beside.replace(self.folder / "memory.current")


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        yield Path(folder)


async def started(base: Path, module: str, *arguments: str, container: Container | None = None) -> Child:
    inside = (*INSIDE, str(container.folder)) if container is not None else ()
    with (base / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *inside,
            *(sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            limit=LINE_LIMIT,
        )
    return Child(process)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.05)


@pytest.mark.proves("no-memory")
async def test_a_coordinator_without_memory_refuses_who_is_new_serves_and_takes_them_when_it_has(base: Path) -> None:
    container = Container(base)
    coordinator = await started(base, "benchmarks.scalelab.coordinating", str(base), "c0", "60", container=container)
    children = [coordinator]
    try:
        for _ in range(2):
            children.append(await started(base, "benchmarks.scalelab.instances", str(base), "60", f"ipc://{base}/c0"))
        _, old, new = children
        await old.ask("begin", of_each_group=1, unit_revision="one")
        await coordinator.ask("until_ready", instances=len(GROUPS))

        container.use(ALL)
        begun = 0

        async def refused() -> int:
            return int((await new.ask("usage"))["heard"].get("Rejected", 0))

        async def ready() -> int:
            return int((await coordinator.ask("usage"))["ready"])

        async def all_are_answered() -> bool:
            """Each of the new ones is ready or was refused. The figure that was read of the container may be a second
            old.
            """
            return await ready() - len(GROUPS) + await refused() >= begun

        while not await refused():
            await new.ask("begin", of_each_group=1, unit_revision="one")
            begun += len(GROUPS)
            await until(all_are_answered)
        served = await coordinator.ask("load", requests=50, per_second=200.0)
        assert served["failed"] == {}
        assert await ready() < len(GROUPS) + begun
        log = (base / "log").read_text()
        assert "no room for another instance" in log and "resources.limits.memory" in log

        container.use(LITTLE)
        await coordinator.ask("until_ready", instances=len(GROUPS) + begun)
        served = await coordinator.ask("load", requests=50, per_second=200.0)
        assert served["failed"] == {}
    finally:
        for child in children:
            await child.kill()

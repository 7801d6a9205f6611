"""Fixtures of the end-to-end tests: one event loop for all of them, so that they can share a pipeline."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import APART, Client, diamond, replicas, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        of_here = str(item.path).startswith(here)
        if of_here and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder for one test's runs (pytest's own are too long for sockets); its log is shown on failure."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        yield Path(folder)
        log = Path(folder) / "log"
        if log.exists():
            print(log.read_text()[-12_000:])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared() -> AsyncIterator[LocalPipeline]:
    """A diamond in several processes, for tests that leave it as they found it.

    Two replicas of its terminal's group.
    """
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        async with running(diamond(APART, process_groups=replicas(voice=2)), Path(folder)) as pipeline:
            yield pipeline


@pytest_asyncio.fixture(loop_scope="session")
async def client(shared: LocalPipeline) -> AsyncIterator[Client]:
    async with Client(shared.url, connections=100) as one:
        yield one

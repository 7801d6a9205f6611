"""Scaling and restarting a running pipeline of real processes: a command that fails costs nobody but itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine import admin
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.supervision.startup_failures import StartupFailed

PATIENCE_S = 60.0
ONE_FOR_ALL = pytest.mark.asyncio(loop_scope="module")
#: Two groups; what a factory of ``voice`` does is read from a file each time it is called.
FICKLE = """\
name: fickle
stages:
- {name: hear, process: ear, factory: "fickle_stages:hear", next: say}
- {name: say, process: voice, factory: "fickle_stages:say", factoryArgs: {mood: MOOD}, terminal: true}
code:
  inline:
    fickle_stages.py: |
      import pathlib, time
      def hear():
          return lambda payload: payload.data
      def say(mood):
          now = pathlib.Path(mood).read_text()
          with open(mood + ".seen", "a") as seen:
              print(now, file=seen)
          match now.split():
              case ["bad"]:
                  raise RuntimeError("in a bad mood")
              case ["slow"]:
                  while pathlib.Path(mood).read_text() == "slow":
                      time.sleep(0.02)
              case ["lazy"]:
                  return lambda payload: (time.sleep(1.0), payload.data)[1]
          return lambda payload: payload.data
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for the run that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


class Fickle:
    """The pipeline as it runs, and the mood of its factory."""

    def __init__(self, running: LocalPipeline, mood: Path) -> None:
        self.running, self._mood = running, mood

    def becomes(self, mood: str) -> None:
        self._mood.write_text(mood)

    def seen(self) -> list[str]:
        """The mood at each call of the factory."""
        return Path(f"{self._mood}.seen").read_text().split()

    def voices(self) -> dict[str, int]:
        return {name: pid for name, pid in self.running.pids().items() if name.startswith("voice")}

    async def served(self) -> int:
        async with httpx.AsyncClient(base_url=self.running.url, timeout=PATIENCE_S) as client:
            return (await client.post("/v1/pipeline", json={"inputs": "a"})).status_code

    def known(self) -> int:
        """Instances of ``voice`` that the coordinator knows."""
        status = httpx.get(f"{self.running.url}/status", timeout=PATIENCE_S).json()
        return sum(one["group"] == "voice" for one in status["instances"])


@asynccontextmanager
async def fickle(base: Path, *overrides: str, environ: dict[str, str] | None = None) -> AsyncIterator[Fickle]:
    mood, file = base / "mood", base / "fickle.yaml"
    mood.write_text("good")
    file.write_text(FICKLE.replace("MOOD", str(mood)))
    all_overrides = [f"endpoints.basePath={base / 'runs'}", *overrides]
    async with LocalPipeline(file, overrides=all_overrides, options=LocalOptions(port=0), environ=environ) as running:
        yield Fickle(running, mood)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def only() -> AsyncIterator[Fickle]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        async with fickle(Path(folder)) as made:
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def shared(only: Fickle) -> AsyncIterator[Fickle]:
    """One pipeline for tests that leave one ready instance of each group, under whatever name."""
    yield only
    only.becomes("good")
    await only.running.ready()
    assert len(only.voices()) == 1


async def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.02)


@pytest.mark.proves("scale-fails")
@ONE_FOR_ALL
async def test_a_restart_that_fails_leaves_what_ran_and_the_next_one_with_a_cured_factory_succeeds(
    shared: Fickle,
) -> None:
    before = shared.voices()
    shared.becomes("bad")
    for _ in range(2):  # the second is not an heir of the first
        with pytest.raises(StartupFailed, match=r"voice\S*: RuntimeError: in a bad mood"):
            await shared.running.restart("voice")
        assert shared.voices() == before
        assert await shared.served() == 200
    await shared.running.restart("ear")  # another group's command does not reach voice
    shared.becomes("good")
    await shared.running.restart("voice")
    assert len(shared.voices()) == 1
    assert not before.items() & shared.voices().items()
    assert await shared.served() == 200


@pytest.mark.proves("scale-fails")
@ONE_FOR_ALL
async def test_a_scaling_that_fails_takes_back_all_that_it_added_and_the_next_one_succeeds(shared: Fickle) -> None:
    before = shared.voices()
    shared.becomes("bad")
    with pytest.raises(StartupFailed, match="in a bad mood"):
        await shared.running.scale("voice", 3)
    assert shared.voices() == before
    await shared.running.scale("voice", 1)  # to what is there
    await eventually(lambda: shared.known() == 1)
    shared.becomes("good")
    await shared.running.scale("voice", 2)
    assert len(shared.voices()) == shared.known() == 2
    await shared.running.scale("voice", 1)


async def test_scaling_to_the_same_number_starts_and_ends_nothing_even_while_another_group_is_away(
    base: Path,
) -> None:
    async with fickle(base) as pipeline:
        pipeline.becomes("slow")  # the next life of voice never gets ready
        killed = pipeline.voices()["voice"]
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: pipeline.voices().get("voice", killed) != killed)
        before = pipeline.running.pids()
        await asyncio.wait_for(pipeline.running.scale("voice", 1), PATIENCE_S)
        await asyncio.wait_for(pipeline.running.scale("ear", 2), PATIENCE_S)  # another group's command does not wait
        assert before.items() <= pipeline.running.pids().items()
        assert sorted(pipeline.running.pids()) == ["coordinator", "ear", "ear.1", "voice"]


@ONE_FOR_ALL
async def test_restarts_at_the_same_time_are_carried_out_one_after_the_other(shared: Fickle) -> None:
    before = shared.voices()
    async with asyncio.TaskGroup() as both:
        both.create_task(shared.running.restart("voice"))
        both.create_task(shared.running.restart("voice"))
    assert len(shared.voices()) == 1
    assert not before.items() & shared.voices().items()
    assert await shared.served() == 200


@ONE_FOR_ALL
async def test_a_restart_that_fails_between_two_others_fails_alone(shared: Fickle) -> None:
    shared.becomes("slow")
    first = asyncio.create_task(shared.running.restart("voice"))
    await eventually(lambda: shared.seen()[-1] == "slow")
    second = asyncio.create_task(shared.running.restart("voice"))
    third = asyncio.create_task(shared.running.restart("ear"))
    shared.becomes("bad")  # ends the first one's loading, too; only what starts now fails
    await first
    with pytest.raises(StartupFailed, match="in a bad mood"):
        await second
    await third
    assert len(shared.voices()) == 1
    assert await shared.served() == 200


@pytest.mark.proves("scale-fails")
async def test_a_command_during_a_drain_is_refused_and_one_under_way_fails_at_once(base: Path) -> None:
    async with fickle(base) as pipeline:
        pipeline.becomes("slow")
        under_way = asyncio.create_task(pipeline.running.scale("voice", 2))
        await eventually(lambda: pipeline.seen()[-1] == "slow")
        pipeline.running.ask_to_stop()
        with pytest.raises((StartupFailed, ConfigurationError), match="stopp"):
            await asyncio.wait_for(under_way, PATIENCE_S)
        for command in (pipeline.running.scale("ear", 3), pipeline.running.restart("ear")):
            with pytest.raises(ConfigurationError, match="fickle is stopping"):
                await asyncio.wait_for(command, PATIENCE_S)
        await asyncio.wait_for(pipeline.running.stop(), PATIENCE_S)


@pytest.mark.long
async def test_where_the_old_instance_had_to_go_first_a_failed_restart_says_so_and_the_next_one_brings_it_back(
    base: Path,
) -> None:
    """A GPU has no room for both."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    async with fickle(base, "stages.say.gpu=[0]", environ=environ) as pipeline:
        pipeline.becomes("bad")
        with pytest.raises(StartupFailed, match=r"in a bad mood.*`omni restart voice` tries again"):
            await pipeline.running.restart("voice")
        assert pipeline.voices() == {}
        pipeline.becomes("good")
        await pipeline.running.restart("voice")
        assert list(pipeline.voices()) == ["voice"]
        assert await pipeline.served() == 200


@ONE_FOR_ALL
async def test_a_scaling_that_fails_beside_an_instance_that_keeps_dying_costs_neither_it_nor_the_next_command(
    shared: Fickle,
) -> None:
    shared.becomes("bad")
    [(dying, pid)] = shared.voices().items()
    seen = shared.seen().count("bad")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: shared.seen().count("bad") > seen + 1)
    with pytest.raises(StartupFailed, match=r"voice\S*: .*in a bad mood"):
        await shared.running.scale("voice", 2)
    shared.becomes("good")
    await shared.running.ready()
    assert list(shared.voices()) == [dying]
    assert await shared.served() == 200


async def test_a_command_that_breaks_in_an_unforeseen_way_is_answered_and_the_next_one_carried_out(base: Path) -> None:
    class Breaking:
        folder = base

        async def scale(self, group: str, replicas: int) -> None:
            raise OSError(28, "No space left on device")

        async def restart(self, group: str) -> None:
            raise StartupFailed(group, "x" * 300_000)

    async with admin.AdminServer(Breaking()):
        with pytest.raises(ConfigurationError, match="No space left on device"):
            await admin.send(base, admin.Scale(group="voice", replicas=2))
        with pytest.raises(ConfigurationError, match=r"voice: xxxx"):
            await admin.send(base, admin.Restart(group="voice"))
        reader, writer = await asyncio.open_unix_connection(base / admin.SOCKET)
        writer.write(b'{"command": "scale", "group": "voice", "replicas": "many"}\n')
        assert "replicas" in json.loads(await reader.readline())["error"]
        writer.close()

"""A whole pipeline of real processes on this machine, as `omni up` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from omnipipeline_spec import loading
from omnipipeline_spec.pipeline import EndpointsConfig, PipelineConfig, StageConfig
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes import coordinator_process
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.starting import rundir
from stage_runtime.processes.supervision.instances import ProcessView
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from tests.patience import patience

HELLO = Path(__file__).parents[2] / "examples" / "hello" / "pipeline.yaml"
ANY_PORT = LocalOptions(port=0)
PATIENCE_S = patience(60.0)
RAISING = ["stages.shout.factory=json:loads", "stages.shout.factoryArgs={s: '{'}"]


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for runs that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def pipeline(base: Path, **changes: Any) -> LocalPipeline:
    """Hello, in a run folder of its own."""
    options = changes.pop("options", ANY_PORT)
    overrides = [*changes.pop("overrides", ()), f"endpoints.basePath={base}"]
    return LocalPipeline(HELLO, overrides=overrides, options=options, **changes)


async def ask(url: str, words: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        return await client.post("/v1/pipeline", json={"inputs": words}, **more)


async def eventually(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.02)


async def serves(url: str) -> None:
    """Wait until it answers."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await ask(url, "nothing")).status_code == 200:
                return
        assert time.monotonic() < end, "it never answered again"
        await asyncio.sleep(0.05)


def shared_files() -> set[str]:
    """Shared memory of the whole machine, but for semaphores: those are other programs', we use none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


async def left_over(base: Path, pids: dict[str, int], shared_before: set[str]) -> list[str]:
    left = [name for name, pid in pids.items() if psutil.pid_exists(pid)] + os.listdir(base)
    shared = shared_files() - shared_before
    with contextlib.suppress(AssertionError):
        await eventually(lambda: not shared & shared_files())  # those of programs beside this test go with them
    return left + sorted(shared & shared_files())


async def test_hello_answers_and_leaves_nothing_behind(base: Path) -> None:
    shared = shared_files()
    async with pipeline(base) as running:
        answer = await ask(running.url, "hello there")
        assert answer.status_code == 200, answer.text
        assert "HELLO!!" in answer.text
        pids = running.pids()
        assert sorted(pids) == ["coordinator", "front", "voice"]
        assert (running.folder.stat().st_mode & 0o777) == 0o700
    assert await left_over(base, pids, shared) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hello() -> AsyncIterator[LocalPipeline]:
    """One for tests that leave it ready, with one instance of each group."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        async with pipeline(Path(folder)) as running:
            yield running


def restarts(running: LocalPipeline) -> Counter[str]:
    return Counter({view.process: view.restarts for view in running.views()})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_stage_process_comes_back_and_the_pipeline_answers_again(hello: LocalPipeline) -> None:
    before, (name, killed) = restarts(hello), next(one for one in hello.pids().items() if one[0].startswith("voice"))
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: hello.pids().get(name, killed) != killed)
    await hello.ready()
    assert (await ask(hello.url, "again")).status_code == 200
    assert restarts(hello) - before == {name: 1}


@pytest.mark.proves("killed-coordinator")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_coordinator_comes_back_at_the_same_address(hello: LocalPipeline) -> None:
    before, url, killed = restarts(hello), hello.url, hello.pids()["coordinator"]
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: hello.pids().get("coordinator", killed) != killed)
    await hello.ready()
    assert hello.url == url
    assert (await ask(url, "again")).status_code == 200
    assert restarts(hello) - before == {"coordinator": 1}


@pytest.mark.proves("factory-raises")
async def test_a_factory_that_raises_fails_the_start_with_its_traceback_and_stops_the_others(base: Path) -> None:
    shared = shared_files()
    seen: list[ProcessView] = []
    broken = pipeline(base, overrides=RAISING, on_change=seen.append)
    with pytest.raises(StartupFailed) as caught:
        await broken.start()
    assert (caught.value.process, caught.value.stage) == ("voice", "shout")
    assert caught.value.problem.startswith("JSONDecodeError: ")
    assert caught.value.traceback.startswith("Traceback")
    started = {f"{view.process}#{view.pid}": view.pid for view in seen if view.pid is not None}
    assert await left_over(base, started, shared) == []


@pytest.mark.proves("drain")
@pytest.mark.asyncio(loop_scope="module")
async def test_scaling_and_restarting_under_load_loses_no_request(hello: LocalPipeline) -> None:
    outcomes: list[int] = []

    async def load(url: str, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            while not stop.is_set():
                outcomes.append((await client.post("/v1/pipeline", json={"inputs": "a b c"})).status_code)

    stop = asyncio.Event()
    clients = [asyncio.create_task(load(hello.url, stop)) for _ in range(3)]
    await hello.scale("voice", 3)
    assert sorted(hello.pids()) == ["coordinator", "front", "voice", "voice.1", "voice.2"]
    first = hello.pids()["front"]
    await hello.restart("front")
    assert first not in hello.pids().values()
    await hello.scale("voice", 1)
    assert [name for name in hello.pids() if name.startswith("voice")] == ["voice"]
    stop.set()
    await asyncio.gather(*clients)
    assert len(outcomes) > 10
    assert set(outcomes) == {200}


@pytest.mark.nightly  # the pipeline that the tests of tests/e2e share has two replicas of a group
async def test_replicas_of_the_spec_are_started(base: Path) -> None:
    overrides = ["processGroups=[{name: voice, replicas: 2}]"]
    async with pipeline(base, overrides=overrides) as running:
        assert sorted(running.pids()) == ["coordinator", "front", "voice", "voice.1"]


async def test_an_order_for_a_group_that_is_not_there_names_those_that_are(base: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'vioce' is not a process group of hello: front, voice"):
        await pipeline(base).scale("vioce", 2)


async def test_a_port_that_is_taken_is_said_before_anything_starts(base: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port} of 127.0.0.1 is taken: choose another with --port"):
            await pipeline(base, options=LocalOptions(port=port)).start()


async def test_socket_paths_too_long_for_the_kernel_are_refused_with_what_to_shorten() -> None:
    spec = PipelineConfig(
        name="long",
        stages=[StageConfig(name="only", process="p" * 60, factory="m:f", terminal=True)],
        endpoints=EndpointsConfig(base_path="/tmp/" + "d" * 60),
    )
    with pytest.raises(ConfigurationError, match=r"'p{60}' would have a path of \d+ bytes.*shorten endpoints.basePath"):
        await LocalPipeline(spec, options=ANY_PORT).start()


def test_the_budget_admits_exactly_what_the_kernel_admits(base: Path) -> None:
    room = rundir.MAX_SOCKET_PATH - len("/tmp/omni-xxxxxxxx/")
    rundir.check_budget("/tmp", {"s" * room: "fits"})
    with pytest.raises(ConfigurationError, match="by 1"):
        rundir.check_budget("/tmp", {"s" * (room + 1): "does not"})


def test_a_run_that_was_killed_is_swept_up_and_a_living_one_is_not(base: Path) -> None:
    living, dead = rundir.RunDir(str(base)), rundir.RunDir(str(base))
    foreign = base / "omni-notes"
    foreign.mkdir()
    assert dead._lock is not None
    os.close(dead._lock)  # as the kernel does when its owner is killed
    rundir.sweep(str(base))
    assert sorted(base.iterdir()) == sorted([living.path, foreign])
    living.remove()


@pytest.mark.parametrize(("given_s", "drained_s"), [(120, 119), (600, 599), (3, 2), (1, 0.5)])
def test_the_coordinator_drains_for_as_long_as_the_spec_says_and_keeps_time_for_last_words(
    given_s: float, drained_s: float
) -> None:
    assert coordinator_process.drain_seconds(given_s) == drained_s


async def test_two_pipelines_run_side_by_side(base: Path) -> None:
    async with pipeline(base) as one, pipeline(base) as other:
        assert one.url != other.url
        for url in (one.url, other.url):
            assert (await ask(url, "hi")).status_code == 200


def test_a_spec_in_python_needs_no_file() -> None:
    spec = loading.load(HELLO).spec
    assert LocalPipeline(spec).plan.pipeline == "hello"


@pytest.mark.long
@pytest.mark.proves("internal-task-ends")
async def test_a_task_that_ends_is_logged_and_its_process_is_started_again(base: Path) -> None:
    lines: list[tuple[str, str]] = []
    spec = PipelineConfig(
        name="fatal",
        stages=[StageConfig(name="only", process="only", factory="fatal:stage", terminal=True)],
        terminal_stages_fn="fatal:terminal_stages_fn",
        endpoints=EndpointsConfig(base_path=str(base)),
    )
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    up = LocalPipeline(spec, options=ANY_PORT, environ=environ, on_line=lambda name, line: lines.append((name, line)))

    async with up:
        for task, process in (
            ("beat", "only"),
            ("watchdog", "only"),
            ("watch of revisions.json", "coordinator"),
            ("HTTP server", "coordinator"),
        ):
            before = up.pids()
            with contextlib.suppress(httpx.HTTPError):  # its process may end before the answer
                await ask(up.url, task)
            await eventually(lambda: up.pids().get(process, before[process]) != before[process])  # noqa: B023
            assert {name for name, pid in up.pids().items() if pid != before[name]} == {process}
            ended = f"the task '{task}' has ended"
            await eventually(lambda: any(name == process and ended in line for name, line in lines))  # noqa: B023
            await serves(up.url)


@pytest.mark.proves("threads-left-at-exit")
async def test_a_process_that_is_over_exits_whatever_threads_and_processes_its_author_has_left(base: Path) -> None:
    lines: list[tuple[str, str]] = []
    async with lingering(base, "stage", lines) as up:
        for task, process in (("beat", "only"), ("watch of revisions.json", "coordinator")):
            before = up.pids()
            with contextlib.suppress(httpx.HTTPError):  # its process may end before the answer
                await ask(up.url, task)
            await eventually(lambda: up.pids().get(process, before[process]) != before[process])  # noqa: B023
            assert any(name == process and "lingering.py" in line for name, line in lines), "its stacks are in the log"
            await serves(up.url)
        drained = up.pids()
    assert {name: psutil.pid_exists(pid) for name, pid in drained.items()} == dict.fromkeys(drained, False)


@pytest.mark.proves("threads-left-at-exit")
async def test_a_factory_that_starts_a_thread_and_raises_fails_the_start_with_its_traceback(base: Path) -> None:
    with pytest.raises(StartupFailed, match="OSError: no weights at /models") as caught:
        async with lingering(base, "broken", []):
            pass
    assert "in broken" in caught.value.traceback
    assert os.listdir(base) == []


@pytest.mark.proves("interrupt")
async def test_whoever_is_cancelled_while_a_run_is_given_up_is_so_when_its_folder_is_gone(
    base: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # the factory waits for who writes, and what it returns is not a stage
    up = pipeline(base, overrides=["stages.shout.factory=io:open", f"stages.shout.factoryArgs={{file: {gate}}}"])
    before = set(psutil.Process().children())  # a pipeline that other tests share may run
    starting = asyncio.create_task(up.start())
    await eventually(lambda: bool(up.pids()))
    started = set(psutil.Process().children()) - before
    (reaper,) = (one for one in started if any("reaper.py" in word for word in one.cmdline()))
    reaper.suspend()  # it is the last one to end
    (await asyncio.to_thread(gate.open, "w")).close()
    await eventually(lambda: not up.pids())
    for _ in range(3):
        starting.cancel()
        await asyncio.sleep(0.1)
        assert not starting.done(), "the run has a folder"
    reaper.resume()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert os.listdir(base) == []


def lingering(base: Path, factory: str, lines: list[tuple[str, str]]) -> LocalPipeline:
    spec = PipelineConfig(
        name="lingering",
        stages=[
            StageConfig(name="only", process="only", factory=f"tests.processes.lingering:{factory}", terminal=True)
        ],
        terminal_stages_fn="tests.processes.lingering:terminal_stages_fn",
        endpoints=EndpointsConfig(base_path=str(base)),
    )
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    return LocalPipeline(spec, options=ANY_PORT, environ=environ, on_line=lambda name, line: lines.append((name, line)))

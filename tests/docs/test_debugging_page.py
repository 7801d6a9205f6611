"""docs/debugging-a-stage.md: its files are run, its commands tried, its error lines provoked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest

import stage_runtime as omni
from stage_runtime import testing
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.docs.blocks import ROOT, blocks

PAGE = "docs/debugging-a-stage.md"
TEXT = (ROOT / PAGE).read_text()
PIPELINE = "name: captions\nstages: [{{name: captions, process: model, factory: '{factory}', terminal: true}}]\n"
WITHIN_S = 60.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every Python file of the page, beside each other; pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        for block in blocks(PAGE, "python"):
            (Path(name) / block.splitlines()[0].removeprefix("# ")).write_text(block)
        monkeypatch.syspath_prepend(name)
        yield Path(name)
    for module in ("captions", "repl", "stuck"):
        sys.modules.pop(module, None)


class Running:
    """A pipeline of one stage, what its processes print, and a client."""

    def __init__(self, pipeline: LocalPipeline, lines: list[str], client: httpx.AsyncClient) -> None:
        self.pipeline, self.lines, self.client = pipeline, lines, client

    async def ask(self, inputs: Any, request_id: str = "r-1") -> httpx.Response:
        headers = {"X-Request-Id": request_id}
        return await self.client.post("/v1/pipeline", json={"inputs": inputs}, headers=headers)

    async def printed(self, *words: str) -> None:
        """Wait until some line holds all of ``words``."""
        end = time.monotonic() + WITHIN_S
        while not any(all(word in line for word in words) for line in self.lines):
            assert time.monotonic() < end, f"{words} in\n" + "\n".join(self.lines)
            await asyncio.sleep(0.02)

    def pid(self) -> int:
        [pid] = [view.pid for view in self.pipeline.views() if view.process == "model"]
        assert pid is not None
        return pid


@contextlib.asynccontextmanager
async def running(folder: Path, spec: str, **options: Any) -> AsyncIterator[Running]:
    (folder / "pipeline.yaml").write_text(spec)
    lines: list[str] = []
    pipeline = LocalPipeline(
        folder / "pipeline.yaml",
        overrides=[f"endpoints.basePath={folder}"],
        options=LocalOptions(port=0, **options),
        on_line=lambda process, line: lines.append(f"{process} | {line}"),
    )
    async with pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=WITHIN_S) as client:
        yield Running(pipeline, lines, client)


def test_run_stage_in_a_repl_prints_what_the_page_says(folder: Path) -> None:
    shown = subprocess.run([sys.executable, "repl.py"], cwd=folder, capture_output=True, text=True, timeout=WITHIN_S)
    [repl] = [block for block in blocks(PAGE, "python") if block.startswith("# repl.py")]
    expected = [line.split("  # ", 1)[1] for line in repl.splitlines() if line.startswith("print(")]
    assert shown.stdout.splitlines() == expected, shown.stderr


def test_pytest_opens_the_debugger_where_the_function_raised(folder: Path) -> None:
    (folder / "test_captions.py").write_text(
        "import stage_runtime as omni\nfrom captions import load\n\n\n"
        "def test_it():\n    [one] = omni.testing.run_stage(load, [{'tokens': [9]}])\n    one.result\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pdb", "test_captions.py"]
    shown = subprocess.run(
        command, cwd=folder, input="u\np payload.data\nq\n", capture_output=True, text=True, timeout=WITHIN_S
    ).stdout
    assert "captions.py(9)caption()" in shown
    assert "{'tokens': [9]}" in shown
    assert "> captions.py(9)caption()" in TEXT


async def test_a_failed_request_is_reported_to_the_client_and_in_the_log(folder: Path) -> None:
    async with running(folder, PIPELINE.format(factory="captions:load")) as pipeline:
        answer = await pipeline.ask({"tokens": [9]})
        [shown] = blocks(PAGE, "json")
        assert answer.status_code == 500
        assert answer.json() == msgspec.json.decode(shown)
        failed = "request r-1 failed in captions.run: IndexError: list index out of range"
        await pipeline.printed("model | ", failed)
        await pipeline.printed("captions.py", "line 9, in caption")
        logged = "request_id=r-1 route=POST /v1/pipeline status=500 outcome=stage_failed"
        await pipeline.printed("coordinator | ", logged)
        assert failed in TEXT and logged in TEXT
        known = (await pipeline.client.get("/v1/requests/r-1")).json()
        assert {"state", "bindings", "waiting_for"} <= set(known)


@pytest.fixture
def stopping(folder: Path) -> Path:
    """The page's stage with a breakpoint."""
    stage = (folder / "captions.py").read_text()
    (folder / "captions.py").write_text(stage.replace("        words", "        breakpoint()\n        words"))
    (folder / "pipeline.yaml").write_text(PIPELINE.format(factory="captions:load"))
    return folder


async def test_a_breakpoint_of_a_debugged_stage_stops_at_the_terminal_of_omni_up(stopping: Path) -> None:
    omni_up = [str(Path(sys.executable).with_name("omni")), "up", "-f", "pipeline.yaml", "--debug", "captions"]
    program = await asyncio.create_subprocess_exec(
        *omni_up,
        *("--port", "0", "--set", f"endpoints.basePath={stopping}"),
        cwd=stopping,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdin is not None and program.stdout is not None
    async with asyncio.timeout(2 * WITHIN_S):
        url = ""
        while not url:
            line = (await program.stdout.readline()).decode()
            assert line, "it has ended"
            url = line.partition("captions answers at ")[2].strip()
        async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S) as client:
            asked = [
                asyncio.create_task(client.post("/v1/pipeline", json={"inputs": {"tokens": tokens}}))
                for tokens in ([1, 3], [9])
            ]
            shown = await program.stdout.readuntil(b"(Pdb) ")
            assert "captions.py(10)caption()" in shown.decode()
            program.stdin.write(b"payload.data['tokens'] = [0]\n")
            await program.stdout.readuntil(b"(Pdb) ")
            program.stdin.write(b"c\n")
            await program.stdout.readuntil(b"(Pdb) ")  # the other request
            program.stdin.write(b"payload.data['tokens'] = [2]\nc\n")
            answers = [(await one).json()["results"]["captions"]["caption"] for one in asked]
            assert sorted(answers) == ["a", "fast"]
        program.send_signal(signal.SIGINT)
        await program.stdout.read()
        assert await program.wait() == 0


async def test_a_breakpoint_of_a_stage_that_is_not_debugged_is_passed_and_logged(stopping: Path) -> None:
    async with running(stopping, PIPELINE.format(factory="captions:load")) as pipeline:
        for _ in range(2):
            assert (await pipeline.ask({"tokens": [1, 3]})).json()["results"] == {"captions": {"caption": "red car"}}
        await pipeline.printed("captions.py:9: breakpoint() is passed: `omni up --debug STAGE` stops there")
    assert "captions.py:9: breakpoint() is passed: `omni up --debug STAGE` stops there" in TEXT


async def test_the_stacks_of_a_stage_that_hangs_are_printed_with_and_without_ending_it(folder: Path) -> None:
    async with running(folder, PIPELINE.format(factory="stuck:load")) as pipeline:
        answer = asyncio.create_task(pipeline.ask(1))
        pid = pipeline.pid()
        await busy(pipeline)
        os.kill(pid, signal.SIGUSR1)
        await pipeline.printed("stuck.py", "line 13 in wait")
        assert psutil.pid_exists(pid)
        pipeline.lines.clear()
        os.kill(pid, signal.SIGABRT)
        await pipeline.printed("stuck.py", "line 13 in wait")
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
    assert "line 13 in wait" in TEXT


async def busy(pipeline: Running) -> None:
    """Wait until the stage computes."""
    end = time.monotonic() + WITHIN_S
    while True:
        instances = (await pipeline.client.get("/status")).json()["instances"]
        if any(one["running"] for one in instances):
            return
        assert time.monotonic() < end, instances
        await asyncio.sleep(0.02)


async def test_a_stage_that_writes_into_what_it_got_is_named(folder: Path) -> None:
    (folder / "writers.py").write_text(
        "import torch\n\n\ndef first():\n    return lambda payload: {'x': torch.ones(3)}\n\n\n"
        "def second():\n    return lambda payload: {'y': payload.data['x'].mul_(2).sum().item()}\n"
    )
    spec = (
        "name: writers\nstages:\n"
        "- {name: first, process: front, factory: 'writers:first', next: second}\n"
        "- {name: second, process: back, factory: 'writers:second', terminal: true}\n"
    )
    line = (
        "stage 'second' wrote into payload.data['x'], which it got from 'first': it is read-only; use payload.detach()"
    )
    async with running(folder, spec, debug_values=True) as pipeline:
        await pipeline.ask(1)
        await pipeline.printed("back | ", line)
    assert line in TEXT


async def test_a_chat_that_is_answered_with_a_str_says_what_to_wrap(folder: Path) -> None:
    (folder / "bare.py").write_text("def load():\n    return lambda payload: 'a bare str'\n")
    spec = PIPELINE.format(factory="bare:load") + "serves: [chat]\n"
    async with running(folder, spec) as pipeline:
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        answer = await pipeline.client.post("/v1/chat/completions", json=body)
    assert f"`{answer.json()['error']['message']}`" in TEXT


@dataclasses.dataclass
class Box:
    label: str


def gives(value: Any) -> Callable[[], Any]:
    """A factory of a stage whose result is ``value``."""
    return lambda: lambda payload: value


def returns_nothing() -> None:
    """No factory: it forgets its return."""


def yields_plain_data() -> Any:
    def run(payload: omni.StagePayload) -> Iterator[Any]:
        yield {"word": "plain"}

    return run


def gives_too_few() -> Any:
    return omni.Batched(lambda payloads: ["one"])


def reuses_a_buffer() -> Any:
    buffer = np.zeros(3, np.float32)

    def run(payload: omni.StagePayload) -> Iterator[Any]:
        for number in range(2):
            buffer[:] = number
            yield omni.Chunk({"sound": buffer})

    return run


def raised(factory: Callable[..., Any], payloads: int = 1) -> str:
    """The error that a stage fails with, at its start or at its first request."""
    try:
        first, *_ = testing.run_stage(factory, ["payload"] * payloads)
    except Exception as error:
        return str(error)
    return str(first.error)


@pytest.mark.parametrize(
    ("factory", "payloads", "line"),
    [
        (
            returns_nothing,
            1,
            "returned NoneType; expected a function, omni.Simple, Batched, Streaming, Autoregressive, Encoder,"
            " or an object with run(inbox, outbox, stop). Is its return missing?",
        ),
        (gives({"boxes": (1, 2)}), 1, "result['boxes']: tuple: use a list"),
        (gives({"score": np.float32(0.5)}), 1, "result['score']: numpy scalar float32: use .item()"),
        (gives([Box("car")]), 1, "result[0]: dataclass Box: use a dict, or a msgspec.Struct with @omni.message"),
        (yields_plain_data, 1, "yielded dict; wrap it: omni.Chunk(…) or omni.Result(…)"),
        (gives_too_few, 2, "returned 1 results for a batch of 2; expected a list with one per payload, in order"),
        (
            reuses_a_buffer,
            1,
            "wrote into chunk.data['sound'], after it sent it: another stage may share the memory;"
            " send a new tensor each time, or a clone",
        ),
    ],
)
def test_a_mistake_in_a_function_says_what_the_page_shows(
    factory: Callable[..., Any], payloads: int, line: str
) -> None:
    assert line in raised(factory, payloads)
    assert f"`{line}`" in TEXT


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        (
            "[{name: a, process: m, factory: 'direct:caption', terminal: true}]",
            "missing a required argument: 'payload'. A factory is called once, without a payload",
        ),
        (
            "[{name: a, process: m, factory: 'captions:load', factoryArgs: {sise: 3}, terminal: true}]",
            "captions:load takes no sise; it takes size",
        ),
        (
            "[{name: a, process: m, factory: 'caption:load', terminal: true}]",
            "no module named 'caption' (in 'caption:load')",
        ),
        (
            "[{name: a, process: m, factory: 'captions:laod', terminal: true}]",
            "'captions' has no 'laod'; did you mean load?",
        ),
        (
            "[{name: a, process: m, factory: 'captions:load', next: [b, join]},"
            " {name: b, process: m, factory: 'captions:load', next: join},"
            " {name: join, process: m, factory: 'captions:load', terminal: true}]",
            "'join' takes one payload per request, but 'a', 'b' send it one each:"
            " join them by waitFor and mergeFn, or choose one by routeFn",
        ),
    ],
)
def test_a_mistake_in_a_file_says_what_the_page_shows(folder: Path, stages: str, line: str) -> None:
    (folder / "direct.py").write_text("def caption(payload):\n    return payload.data\n")
    (folder / "pipeline.yaml").write_text(f"stages: {stages}\n")
    command = [sys.executable, "-m", "stage_runtime", "validate", "--imports", "-f", str(folder / "pipeline.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert checked.returncode == 1
    assert line in checked.stdout + checked.stderr
    assert f"`{line}`" in TEXT

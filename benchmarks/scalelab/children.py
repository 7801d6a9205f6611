"""Child processes that take orders as lines of JSON on stdin and answer each with one line on stdout."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import uvloop

ROOT = Path(__file__).resolve().parents[2]
LINE_LIMIT = 1 << 26
ORDER_S = 600.0


class Child:
    """One process and its orders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=LINE_LIMIT,
        )
        return cls(process)

    async def ask(self, order: str, **facts: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"order": order, **facts}).encode() + b"\n")
        async with asyncio.timeout(ORDER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that was asked for {order!r} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{order}: {answer['error']}")
        return answer

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def serve(make: Callable[[], Mapping[str, Callable[..., Awaitable[dict[str, Any]]]]]) -> None:
    """The child's main: carry out orders until stdin ends. make: called in the loop; what each order does."""
    raise_limits()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(make))


async def _serve(make: Callable[[], Mapping[str, Callable[..., Awaitable[dict[str, Any]]]]]) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = make()
    while line := await reader.readline():
        order = json.loads(line)
        try:
            answer = await orders[order.pop("order")](**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # thousands of sockets: the system closes them faster


def raise_limits() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def own_usage() -> dict[str, float]:
    """This process's resident memory without garbage, descriptors, processor time before and after looking."""
    spent_s = time.process_time()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_bytes": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processor_s": spent_s,
        "processor_after_s": time.process_time(),
    }

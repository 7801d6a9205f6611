"""What the profiler costs: two stages that echo, 64 requests under way, in processor time of all their processes.

    python -m benchmarks.profiler [--generations 6] [--blocks 40] [--seconds 0.5] [--in-turns]

Three sides: ``without`` is a copy of the runtime whose hooks are cut out of the source; ``off`` is the runtime as it
is, with nothing recorded; ``on`` is the same while events are recorded. In a block all three serve at the same moment,
so that whatever else the machine does disturbs them alike; their differences within the block are paired. ``off`` and
``on`` change places with each block. Each generation starts all processes anew, since two processes of one program
differ by a percent or so. With ``--in-turns`` the three serve one after the other instead, in random order and for a
third of the time each: the better choice on a machine that does nothing else. The result is the median of the paired
differences, with a 95 % interval by a bootstrap that draws generations, then blocks within them. Beside throughput,
processor time hardly depends on who else uses the machine; with all processors busy it is the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.hoplab.measuring import used
from omnipipeline_spec.pipeline import EndpointsConfig, PipelineConfig, StageConfig
from stage_runtime.processes.local import LocalOptions, LocalPipeline
from stage_runtime.profiler.recorder import FLUSH_EVERY_S

CONCURRENCY: Final = 64
WRITTEN_S: Final = 2.5 * FLUSH_EVERY_S  # after a block: its last events are written then
WARM_UP: Final = 6  # blocks
SIDES: Final = ("without", "off", "on")
RUNTIME: Final = Path(__file__).parents[1] / "stage_runtime"
ECHO: Final = "def echo():\n    return lambda payload: payload.data\n"
BODY: Final = json.dumps({"inputs": "hello"}).encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection, for all blocks: a request, its whole answer, the next request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._answer = b""
        self._until = 0.0
        self._ended: asyncio.Future[None] | None = None
        self.asked = 0

    def begin(self, until: float) -> asyncio.Future[None]:
        """Ask until then, by the monotonic clock. Returns: when the last one is answered."""
        ended = asyncio.get_running_loop().create_future()
        self._until, self._ended = until, ended
        self._next()
        return ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._end(SystemExit(self._answer.decode(errors="replace")[:500]))
            return
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        if len(body) >= length:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or EOFError("the server closed the connection"))

    def _next(self) -> None:
        self._answer = b""
        if time.monotonic() < self._until:
            self.asked += 1
            self.transport.write(self._request)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Of the block. Between two blocks the server may close a connection: it is made anew."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)


class Pipeline:
    """One running pipeline and the connections to it."""

    def __init__(self, url: str, pids: list[int]) -> None:
        self.url = url
        self.pids = pids
        self._connections: list[Connection] = []
        self._asked = 0  #: On connections that were closed meanwhile.

    async def connect(self) -> None:
        """Have all connections."""
        where = urlsplit(self.url)
        assert where.hostname is not None and where.port is not None
        host, port = where.hostname, where.port
        head = f"POST /v1/pipeline HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        loop = asyncio.get_running_loop()
        self._asked += sum(each.asked for each in self._connections if each.transport.is_closing())
        self._connections = [each for each in self._connections if not each.transport.is_closing()]
        for _ in range(CONCURRENCY - len(self._connections)):
            _, one = await loop.create_connection(lambda: Connection(request), host, port)
            self._connections.append(one)

    def close(self) -> None:
        for each in self._connections:
            each.transport.close()

    async def cpu_us(self, until: float) -> float:
        """A block: its processor time per request."""
        await self.connect()
        before, asked = used(self.pids), self._all_asked()
        await asyncio.gather(*(each.begin(until) for each in self._connections))
        await asyncio.sleep(WRITTEN_S)
        return (used(self.pids) - before).cpu_s / (self._all_asked() - asked) * 1e6

    def _all_asked(self) -> int:
        return self._asked + sum(each.asked for each in self._connections)


def without_hooks(folder: Path) -> int:
    """A copy of the runtime in ``folder`` that never asks whether it is profiled. Returns how many hooks were cut."""
    shutil.copytree(RUNTIME, folder / "stage_runtime", ignore=shutil.ignore_patterns("__pycache__", "profiler"))
    cut = 0
    for path in (folder / "stage_runtime").rglob("*.py"):
        text, guarded = re.subn(r"\bif recorder\.active:", "if False:", path.read_text())
        text, traced = re.subn(r"\bif recorder\.traces is not None:", "if False:", text)
        text, inline = re.subn(r"\bif recorder\.active else\b", "if False else", text)
        text, plain = re.subn(r"(?m)^( +)recorder\.(?:emit|record)\(.*\)$", r"\1pass", text)
        path.write_text(text)
        cut += guarded + traced + inline + plain
    shutil.copytree(RUNTIME / "profiler", folder / "stage_runtime" / "profiler")
    return cut


async def start(stack: contextlib.AsyncExitStack, folder: Path, path: Sequence[Path]) -> Pipeline:
    """A pipeline whose processes import from ``path`` first."""
    folder.mkdir()
    (folder / "echoes.py").write_text(ECHO)
    stages = [
        StageConfig(name="a", process="a", factory="echoes:echo", next="b"),
        StageConfig(name="b", process="b", factory="echoes:echo", terminal=True),
    ]
    spec = PipelineConfig(name="echo", stages=stages, endpoints=EndpointsConfig(base_path=str(folder / "run")))
    folders = [*map(str, path), str(folder), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMNI_PROFILE_ROOT": str(folder / "profiles")}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    pipeline = LocalPipeline(spec, options=LocalOptions(port=0), environ=environ)
    await stack.enter_async_context(pipeline)
    found = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    # of the processes of a run: the coordinator and the stages, not what watches over them
    made = Pipeline(pipeline.url, [child.pid for child in found if {"stage", "coordinator"} & set(child.cmdline())])
    await made.connect()
    stack.callback(made.close)
    return made


Block = dict[str, float]  #: side -> microseconds of processor time per request


async def record(pipeline: Pipeline, http: httpx.AsyncClient, run_id: str) -> str:
    """Record events from now on. Returns: the folder of their files."""
    started = await http.post(f"{pipeline.url}/start_request_profile", json={"run_id": run_id})
    folder: str = started.raise_for_status().json()["event_dir"]
    return folder


async def together(sides: Mapping[str, Pipeline], seconds: float) -> Block:
    until = time.monotonic() + seconds
    took = await asyncio.gather(*(each.cpu_us(until) for each in sides.values()))
    return dict(zip(sides, took, strict=True))


async def one_by_one(sides: Mapping[str, Pipeline], seconds: float) -> Block:
    order = random.sample(list(sides), len(sides))
    return {side: await sides[side].cpu_us(time.monotonic() + seconds / len(sides)) for side in order}


async def generation(root: Path, cut: Path, blocks: int, seconds: float, in_turns: bool) -> list[Block]:
    """Fresh processes, and so many blocks of them."""
    root.mkdir()
    found: list[Block] = []
    async with contextlib.AsyncExitStack() as stack:
        bare = await start(stack, root / "bare", [cut])
        whole = [await start(stack, root / name, []) for name in ("first", "second")]
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        for number in range(blocks + WARM_UP):
            off, on = whole if number % 2 else reversed(whole)
            folder = await record(on, http, f"block-{number}")
            sides = dict(zip(SIDES, (bare, off, on), strict=True))
            found.append(await (one_by_one if in_turns else together)(sides, seconds))
            (await http.post(f"{on.url}/stop_request_profile", json={})).raise_for_status()
            shutil.rmtree(folder)
    return found[WARM_UP:]


async def measure(generations: int, blocks: int, seconds: float, in_turns: bool) -> list[list[Block]]:
    """Blocks by generation."""
    found = []
    with tempfile.TemporaryDirectory(prefix="profiler-") as name:
        root = Path(name)
        print(f"{without_hooks(root / 'cut')} hooks were cut out of the runtime", flush=True)
        for index in range(generations):
            measured = await generation(root / str(index), root / "cut", blocks, seconds, in_turns)
            found.append(measured)
            told = "  ".join(f"{side} {statistics.median(each[side] for each in measured):.0f}" for side in SIDES)
            print(f"generation {index}: {told} us of processor time per request", flush=True)
    return found


def difference(found: Sequence[Sequence[Block]], base: str, other: str) -> tuple[float, float, float]:
    """How much more ``other`` takes, in percent of ``base``: median over blocks, and its 95 % interval (bootstrap).

    Medians: on a machine that others use, some blocks are disturbed by far more than what is measured.
    """
    changes = [[100 * (block[other] / block[base] - 1) for block in blocks] for blocks in found]
    chance = random.Random(0)

    def drawn() -> float:
        generations = chance.choices(changes, k=len(changes))
        return statistics.median(each for blocks in generations for each in chance.choices(blocks, k=len(blocks)))

    draws = sorted(drawn() for _ in range(2000))
    return statistics.median(each for blocks in changes for each in blocks), draws[50], draws[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=40, help="of one generation")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one block")
    parser.add_argument("--in-turns", action="store_true", help="one side after the other: on a machine at rest")
    chosen = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(measure(chosen.generations, chosen.blocks, chosen.seconds, chosen.in_turns))
    print(f"{sum(map(len, found))} blocks in {time.monotonic() - began:.0f} s")
    for side in SIDES:
        middle = statistics.median(block[side] for blocks in found for block in blocks)
        print(f"{side:>8}: {middle:7.0f} us of processor time per request (median)")
    for base, other in (("without", "off"), ("off", "on")):
        middle, low, high = difference(found, base, other)
        print(f"{other} beside {base}: {middle:+.2f} %, 95 % interval {low:+.2f} % to {high:+.2f} %")


if __name__ == "__main__":
    main()

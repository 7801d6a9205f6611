"""The cost of the profiler: two stages that echo, 64 requests under way, in processor time of all their processes.

    python -m benchmarks.profiler [--generations 6] [--blocks 60] [--seconds 1]

Three sides: ``without`` is a copy of the runtime whose hooks are cut out of the source; ``off`` is the runtime as it
is, with nothing recorded; ``on`` is the same while events are recorded. ``off`` and ``on`` are the same processes,
switched by signals, since two processes of one program differ by a percent or so; for ``without`` each generation
starts all processes anew. The two that are compared serve one after the other in a block, in random order, for a short
time: how fast a machine is changes from second to second. So a side's processor time is also taken relative to what
the client took for the same requests at the same moment. A result is the mean of the paired differences without the
outermost tenths, with a 95 % interval by a bootstrap that draws generations, then blocks within them. Bytes that a
writer wrote after a block's last request belong to the block's processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.hoplab.measuring import used
from omnipipeline_spec.pipeline import EndpointsConfig, PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.profiler.recording.writing import FLUSH_EVERY_S

CONCURRENCY: Final = 64
WRITTEN_S: Final = 1.2 * FLUSH_EVERY_S  # after a block: its last events are written then
WARM_UP: Final = 6  # blocks
TOLD_S: Final = 0.02  # that a signal may take
TRIMMED: Final = 0.1  # of the differences, at each end
SIDES: Final = ("without", "off", "on")
PAIRS: Final = (("without", "off"), ("off", "on"))  # that are compared; a run is begun before the second
RUNTIME: Final = Path(__file__).parents[1] / "stage_runtime"
ECHO: Final = "def echo():\n    return lambda payload: payload.data\n"
SWITCHES: Final = """
import signal

def switch(number, frame):
    from stage_runtime.profiler.recording.recorder import recorder
    recorder.active = number == signal.SIGUSR2

for each in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, switch)
"""  # Python runs `sitecustomize` in each process
BODY: Final = json.dumps({"inputs": "hello"}).encode()


class Cost(NamedTuple):
    """The cost of one side in one block, in microseconds of processor time per request."""

    pipeline_us: float
    client_us: float
    rate: float  #: Requests per second.


#: The values that are compared.
VALUES: Final[dict[str, Callable[[Cost], float]]] = {
    "processor time relative to the client's": lambda cost: cost.pipeline_us / cost.client_us,
    "processor time": lambda cost: cost.pipeline_us,
    "requests per second": lambda cost: cost.rate,
}


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
        """End the block. The server may close a connection between two blocks: it is made anew."""
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
        self._asked = 0  #: Requests on connections that were closed meanwhile.

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

    async def record(self, on: bool) -> None:
        """Whether events are recorded from now on; the run is begun before."""
        for pid in self.pids:
            os.kill(pid, signal.SIGUSR2 if on else signal.SIGUSR1)
        await asyncio.sleep(TOLD_S)

    async def cpu_us(self, seconds: float) -> Cost:
        """A block: its processor time per request, and the client's."""
        await self.connect()
        before, asked, client = used(self.pids), self._all_asked(), time.process_time()
        began = time.monotonic()
        await asyncio.gather(*(each.begin(began + seconds) for each in self._connections))
        took, client, requests = time.monotonic() - began, time.process_time() - client, self._all_asked() - asked
        await asyncio.sleep(WRITTEN_S)
        pipeline = (used(self.pids) - before).cpu_s
        return Cost(pipeline / requests * 1e6, client / requests * 1e6, requests / took)

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
    (folder / "sitecustomize.py").write_text(SWITCHES)
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


Block = dict[str, Cost]  #: by side


async def generation(root: Path, cut: Path, blocks: int, seconds: float) -> list[Block]:
    """Fresh processes, and so many blocks of them for each of `PAIRS`."""
    root.mkdir()
    found: list[Block] = []
    async with contextlib.AsyncExitStack() as stack:
        bare = await start(stack, root / "bare", [cut])
        whole = await start(stack, root / "whole", [])
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        for pair in PAIRS:
            if "on" in pair:
                started = await http.post(f"{whole.url}/start_request_profile", json={"run_id": "cost"})
                assert started.raise_for_status().json()["complete"], started.text
            for number in range(blocks + WARM_UP):
                block: Block = {}
                for side in random.sample(pair, len(pair)):
                    pipeline = bare if side == "without" else whole
                    await pipeline.record(side == "on")
                    block[side] = await pipeline.cpu_us(seconds)
                if number >= WARM_UP:
                    found.append(block)
        (await http.post(f"{whole.url}/stop_request_profile", json={})).raise_for_status()
    return found


async def measure(generations: int, blocks: int, seconds: float) -> list[list[Block]]:
    """Blocks by generation."""
    found = []
    with tempfile.TemporaryDirectory(prefix="profiler-") as name:
        root = Path(name)
        print(f"{without_hooks(root / 'cut')} hooks were cut out of the runtime", flush=True)
        for index in range(generations):
            measured = await generation(root / str(index), root / "cut", blocks, seconds)
            found.append(measured)
            figures = "  ".join(f"{side} {_median_us(measured, side):.0f}" for side in SIDES)
            print(f"generation {index}: {figures} us of processor time per request", flush=True)
    return found


def difference(
    found: Sequence[Sequence[Block]], base: str, other: str, value: Callable[[Cost], float]
) -> tuple[float, float, float]:
    """How much more ``other`` has, in percent of ``base``: trimmed mean, and its 95 % interval (bootstrap).

    Logarithms are compared, so that both directions weigh the same.
    """
    changes = [
        [100 * math.log(value(block[other]) / value(block[base])) for block in blocks if {base, other} <= block.keys()]
        for blocks in found
    ]
    chance = random.Random(0)

    def drawn() -> float:
        generations = chance.choices(changes, k=len(changes))
        return _trimmed(each for blocks in generations for each in chance.choices(blocks, k=len(blocks)))

    draws = sorted(drawn() for _ in range(2000))
    return _trimmed(each for blocks in changes for each in blocks), draws[50], draws[-51]


def _trimmed(values: Iterable[float]) -> float:
    ordered = sorted(values)
    cut = int(TRIMMED * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _median_us(blocks: Iterable[Block], side: str) -> float:
    return statistics.median(block[side].pipeline_us for block in blocks if side in block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=60, help="of one generation and comparison")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one side in one block")
    chosen = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(measure(chosen.generations, chosen.blocks, chosen.seconds))
    print(f"{sum(map(len, found))} blocks in {time.monotonic() - began:.0f} s")
    for side in SIDES:
        middle = _median_us([block for blocks in found for block in blocks], side)
        print(f"{side:>8}: {middle:7.0f} us of processor time per request (median)")
    for base, other in PAIRS:
        for what, value in VALUES.items():
            middle, low, high = difference(found, base, other, value)
            print(f"{other} beside {base}, {what}: {middle:+.2f} %, 95 % interval {low:+.2f} % to {high:+.2f} %")


if __name__ == "__main__":
    main()

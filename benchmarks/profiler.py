"""What the profiler costs: two stages that echo, 64 requests under way, in processor time of all their processes.

    python -m benchmarks.profiler [--rounds 40] [--requests 500]

Three sides, in turns within one run: ``without`` is a copy of the runtime whose hooks are cut out of the source;
``off`` is the runtime as it is, with nothing recorded; ``on`` is the same while events are recorded. A round gives each
side's processor time per request; the differences within rounds give the cost, with a 95 % interval. Beside
throughput, processor time hardly depends on who else uses the machine; with all processors busy it is the throughput.
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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil

from benchmarks.hoplab.measuring import used
from omnipipeline_spec.pipeline import EndpointsConfig, PipelineConfig, StageConfig
from stage_runtime.processes.local import LocalOptions, LocalPipeline

CONCURRENCY: Final = 64
RUNTIME: Final = Path(__file__).parents[1] / "stage_runtime"
ECHO: Final = "def echo():\n    return lambda payload: payload.data\n"


class Side(msgspec.Struct):
    """One running pipeline."""

    url: str
    pids: list[int]

    def cpu_us(self, requests: int) -> float:
        """Processor time per request."""
        before = used(self.pids)
        client = Path(__file__).parent / "hoplab" / "client.py"
        body = json.dumps({"inputs": "hello"}).encode()
        command = [sys.executable, str(client), f"{self.url}/v1/pipeline", str(CONCURRENCY), str(requests)]
        subprocess.run(command, input=body, check=True, stdout=subprocess.DEVNULL)
        return (used(self.pids) - before).cpu_s / requests * 1e6


def without_hooks(folder: Path) -> int:
    """A copy of the runtime in ``folder`` that never asks whether it is profiled. Returns how many hooks were cut."""
    shutil.copytree(RUNTIME, folder / "stage_runtime", ignore=shutil.ignore_patterns("__pycache__", "profiler"))
    cut = 0
    for path in (folder / "stage_runtime").rglob("*.py"):
        text, guarded = re.subn(r"\bif recorder\.active:", "if False:", path.read_text())
        text, inline = re.subn(r"\bif recorder\.active else\b", "if False else", text)
        text, plain = re.subn(r"(?m)^( +)recorder\.(?:emit|record)\(.*\)$", r"\1pass", text)
        path.write_text(text)
        cut += guarded + inline + plain
    shutil.copytree(RUNTIME / "profiler", folder / "stage_runtime" / "profiler")
    return cut


async def start(stack: contextlib.AsyncExitStack, folder: Path, path: Sequence[Path]) -> Side:
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
    pids = [child.pid for child in found if {"stage", "coordinator"} & set(child.cmdline())]
    return Side(pipeline.url, pids)


async def measure(rounds: int, requests: int) -> dict[str, list[float]]:
    """side -> microseconds of processor time per request, by round."""
    found: dict[str, list[float]] = {"without": [], "off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="profiler-") as name:
        root = Path(name)
        cut = without_hooks(root / "cut")
        print(f"{cut} hooks were cut out of the runtime", flush=True)
        async with contextlib.AsyncExitStack() as stack:
            bare = await start(stack, root / "bare", [root / "cut"])
            whole = await start(stack, root / "whole", [])
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=whole.url, timeout=60))

            async def once(side: str) -> float:
                if side == "on":
                    (await http.post("/start_request_profile", content=b"{}")).raise_for_status()
                took = await asyncio.to_thread((bare if side == "without" else whole).cpu_us, requests)
                if side == "on":
                    stopped = (await http.post("/stop_request_profile", content=b"{}")).json()
                    shutil.rmtree(stopped["event_dir"])
                return took

            for index in range(-1, rounds):
                for side in sorted(found, reverse=bool(index % 2)):  # neither side always goes first
                    took = await once(side)
                    if index >= 0:  # the round before the first one warms them up
                        found[side].append(took)
                print(
                    f"round {index}: " + "  ".join(f"{side} {v[-1]:.0f}" for side, v in found.items() if v), flush=True
                )
                await asyncio.sleep(1.1)  # names of runs are made of the second
    return found


def difference(base: list[float], other: list[float]) -> tuple[float, float, float]:
    """How much more ``other`` takes, in percent of ``base``: median over rounds, and its 95 % interval (bootstrap).

    Medians: on a machine that others use, some rounds are disturbed by far more than what is measured.
    """
    changes = [100 * (b - a) / a for a, b in zip(base, other, strict=True)]
    chance = random.Random(0)
    drawn = sorted(statistics.median(chance.choices(changes, k=len(changes))) for _ in range(2000))
    return statistics.median(changes), drawn[50], drawn[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=500, help="of one side in one round")
    chosen = parser.parse_args()
    found = asyncio.run(measure(chosen.rounds, chosen.requests))
    for side, took in found.items():
        print(f"{side:>8}: {statistics.median(took):7.0f} us of processor time per request (median of {len(took)})")
    for base, other in (("without", "off"), ("off", "on")):
        middle, low, high = difference(found[base], found[other])
        print(f"{other} beside {base}: {middle:+.2f} %, 95 % interval {low:+.2f} % to {high:+.2f} % (paired rounds)")


if __name__ == "__main__":
    main()

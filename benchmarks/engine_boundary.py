"""The cost of the boundary between client and engine process: ``python -m benchmarks.engine_boundary [--json FILE]``.

The model is left out (the next token is the last one plus one), so what is measured is the scheduler, the loop and the
boundary: all that the client uses, and all that the engine's process uses outside the thread of its loop. The same
requests run beside it without a boundary, in this process, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stage_runtime.engines.autoregressive.clients.async_mp import AsyncMPClient
from stage_runtime.engines.autoregressive.clients.inproc import InprocClient
from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.core.preprocessing import ModelFacts
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.sampling.model_output import ModelOutput
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.rules.autoregressive.blocks import BlockPool
from stage_runtime.rules.autoregressive.scheduling import Scheduler
from stage_runtime.rules.autoregressive.steps import SchedulerLimits, SchedulerOutput

VOCABULARY = 1000
PROMPT = 32


class _Counter:
    max_concurrent_batches = 1

    def add(self, request_id: str, params: SamplingParams, prompt: Any) -> None: ...

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        raise AssertionError("no blocks cross")

    def execute_model(self, step: SchedulerOutput, hold: bool = False, drafted: Any = None) -> Future[ModelOutput]:
        future: Future[ModelOutput] = Future()
        sampled = {row.request.id: (row.request.tokens[-1] + 1) % VOCABULARY for row in step.rows if row.samples}
        future.set_result(ModelOutput(sampled, {}, {}))
        return future

    def sample_tokens(self, masks: Mapping[str, Any], after: Any = None) -> Future[ModelOutput]:
        raise AssertionError("no request has a grammar")

    def shutdown(self) -> None: ...


def engine(max_requests: int) -> Served:
    limits = SchedulerLimits(
        block_size=16, max_requests=max_requests, max_batched_tokens=4096, max_chunk=512, max_model_len=2000
    )
    core = EngineCore(Scheduler(limits, BlockPool(max_requests * 128)), _Counter(), ModelFacts(VOCABULARY))
    return Served(
        core, 0, {"used_s": lambda core: [processor_s(), time.thread_time()], "steps": lambda core: core.steps}
    )


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _requests(name: str, count: int, tokens: int) -> list[EngineCoreRequest]:
    params = SamplingParams(max_tokens=tokens)
    return [
        EngineCoreRequest(request_id=f"{name}.{index}", prompt_token_ids=[index % VOCABULARY] * PROMPT, params=params)
        for index in range(count)
    ]


def _inside(client: InprocClient, requests: list[EngineCoreRequest]) -> dict[str, float]:
    left, steps = len(requests), client.engine_core.steps
    began, wall = processor_s(), time.monotonic()
    for request in requests:
        client.add_request(request)
    while left:
        left -= sum(output.finish is not None for output in client.get_output().outputs)
    used, passed = processor_s() - began, time.monotonic() - wall
    return {"processor_s": used, "wall_s": passed, "steps": client.engine_core.steps - steps}


async def _across(client: AsyncMPClient, requests: list[EngineCoreRequest]) -> dict[str, float]:
    left = len(requests)
    steps = await client.call_utility_async("steps")
    before = await client.call_utility_async("used_s")
    began, wall = processor_s(), time.monotonic()
    for request in requests:
        await client.add_request_async(request)
    while left:
        left -= sum(output.finish is not None for output in (await client.get_output_async()).outputs)
    used, passed = processor_s() - began, time.monotonic() - wall
    after = await client.call_utility_async("used_s")
    steps = await client.call_utility_async("steps") - steps
    whole, loop = (later - earlier for earlier, later in zip(before, after, strict=True))
    return {"loop_s": loop, "io_s": whole - loop, "client_s": used, "wall_s": passed, "steps": steps}


async def measure(rounds: int, users: int, tokens: int) -> dict[str, float]:
    launch = EngineLaunch(factory="benchmarks.engine_boundary:engine", kwargs={"max_requests": users})
    inside = InprocClient(launch)
    names = ("without_us", "loop_us", "io_us", "client_us", "steps_per_s", "requests_per_s")
    found: dict[str, list[float]] = {name: [] for name in names}
    async with await AsyncMPClient.start(launch) as across:
        await _across(across, _requests("warm", users, 50))
        for index in range(rounds):
            a = _inside(inside, _requests(f"i{index}", users, tokens))
            b = await _across(across, _requests(f"a{index}", users, tokens))
            found["without_us"].append(a["processor_s"] / a["steps"] * 1e6)
            for part in ("loop", "io", "client"):
                found[f"{part}_us"].append(b[f"{part}_s"] / b["steps"] * 1e6)
            found["steps_per_s"].append(b["steps"] / b["wall_s"])
            short = await _across(across, _requests(f"s{index}", 2000, 1))
            found["requests_per_s"].append(2000 / short["wall_s"])
    result = {name: statistics.median(values) for name, values in found.items()}
    result["boundary_us_per_step"] = result["io_us"] + result["client_us"]
    return {"users": users, "rounds": rounds, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rounds, arguments.users, arguments.tokens))
    for name, value in found.items():
        print(f"{name:>26} {value:12.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

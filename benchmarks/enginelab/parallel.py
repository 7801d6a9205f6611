"""Several engines in processes of their own, as a stage with ``data_parallel_size`` has them, as an arm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psutil

from benchmarks.enginelab.others import Ask, Run
from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.stage import factory


class Engines:
    """The client chooses an engine for each request; the engines wait while others have their turns."""

    def __init__(self, spec: Autoregressive) -> None:
        self._runner = asyncio.Runner()
        launch = factory.launch_of(spec, "cpu")
        self._client = self._runner.run(DPLBAsyncMPClient.launch_all(launch, spec.data_parallel_size))
        self._turns = 0

    def __call__(self, asks: Sequence[Ask]) -> Run:
        self._turns += 1
        return self._runner.run(self._run(asks))

    async def _run(self, asks: Sequence[Ask]) -> Run:
        began, cpu = time.perf_counter(), processor_s()
        for index, ask in enumerate(asks):
            params = SamplingParams(temperature=0.0, max_tokens=ask.new, ignore_eos=True)
            await self._client.add_request_async(
                EngineCoreRequest(
                    request_id=f"{self._turns}.{index}",
                    prompt_token_ids=ask.prompt,
                    params=params,
                    cache_salt=str(self._turns),  # only what one turn shares counts
                )
            )
        first, gaps, last = dict[int, float](), [], dict[int, float]()
        answers: list[list[int]] = [[] for _ in asks]
        left = len(asks)
        while left:
            for one in (await self._client.get_output_async()).outputs:
                now, index = time.perf_counter(), int(one.request_id.split(".")[1])
                left -= one.finish is not None
                answers[index] += one.new_token_ids
                if index in last:
                    gaps.append(now - last[index])
                else:
                    first[index] = now - began
                last[index] = now
        return Run(
            tokens=sum(map(len, answers)),
            wall_s=time.perf_counter() - began,
            cpu_s=processor_s() - cpu,
            first_s=list(first.values()),
            gaps_s=gaps,
            answers=answers,
        )

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


def processor_s() -> float:
    """Processor time of this process and of those that it has started."""
    used = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        used += times.user + times.system
    return used

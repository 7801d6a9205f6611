"""Another engine as an arm of `benchmarks.engine`, in an environment of its own, which need not have this project.

    /path/to/venv/bin/python benchmarks/enginelab/other_engine.py openvino|vllm|vllm-eager

JSON lines on standard input and output: first settings, then one workload a line; an answer to each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

#: (index of the request, new tokens) of each step's outputs, from requests (prompt, number of new tokens).
Steps = Callable[[list[tuple[list[int], int]]], Iterator[list[tuple[int, list[int]]]]]


def openvino(settings: dict[str, Any]) -> tuple[str, Steps]:
    import numpy as np
    import openvino_genai as package
    from openvino import Tensor

    precision = {"float32": "f32", "bfloat16": "bf16"}[settings["dtype"]]
    config = package.SchedulerConfig()
    config.max_num_batched_tokens, config.max_num_seqs = 512, settings["requests"]
    config.dynamic_split_fuse, config.enable_prefix_caching = True, settings["prefix_caching"]
    config.cache_size = max(1, settings["kv_mib"] >> 10)
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    with tempfile.TemporaryDirectory() as empty:  # ids go in and out
        tokenizer = package.Tokenizer(empty)
    pipeline = package.ContinuousBatchingPipeline(settings["gguf"], tokenizer, config, "CPU", **properties)
    numbers = iter(range(1 << 60))

    def run(asks: list[tuple[list[int], int]]) -> Iterator[list[tuple[int, list[int]]]]:
        handles = []
        for prompt, new in asks:
            wanted = package.GenerationConfig()
            wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = new, True, False
            wanted.set_eos_token_id(0)  # it wants one
            handles.append(pipeline.add_request(next(numbers), Tensor(np.asarray([prompt], dtype=np.int64)), wanted))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            given = []
            for index, handle in enumerate(handles):
                while handle.can_read():
                    given += [(index, list(part.generated_ids)) for part in handle.read().values()]
            yield given

    return str(package.__version__), run


def vllm(settings: dict[str, Any]) -> tuple[str, Steps]:
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: settings["threads"]])),
    }
    import vllm as package
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = package.AsyncEngineArgs(
        model=settings["model"],
        dtype=settings["dtype"],
        max_num_seqs=settings["requests"],
        max_num_batched_tokens=512,
        max_model_len=2048,
        kv_cache_memory_bytes=max(1, settings["kv_mib"] >> 10) << 30,
        enable_prefix_caching=settings["prefix_caching"],
        enforce_eager=settings["eager"],
        disable_log_stats=True,
    )
    runner = asyncio.Runner()
    llm: Any = None
    names = itertools.count()

    async def start() -> None:
        nonlocal llm
        llm = AsyncLLM.from_engine_args(arguments)

    async def answer(index: int, prompt: list[int], new: int, given: asyncio.Queue[Any]) -> None:
        wanted = package.SamplingParams(
            temperature=0.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=package.sampling_params.RequestOutputKind.DELTA,
        )
        async for one in llm.generate({"prompt_token_ids": prompt}, wanted, str(next(names))):
            given.put_nowait((index, list(one.outputs[0].token_ids)))

    def run(asks: list[tuple[list[int], int]]) -> Iterator[list[tuple[int, list[int]]]]:
        given: asyncio.Queue[Any] = asyncio.Queue()

        async def begin() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(answer(index, *ask, given)) for index, ask in enumerate(asks)]

        tasks = runner.run(begin())
        left = sum(new for _prompt, new in asks)
        while left:
            index, tokens = runner.run(given.get())
            left -= len(tokens)
            yield [(index, tokens)]
        runner.run(asyncio.wait(tasks))

    runner.run(start())
    return f"{package.__version__}, {'compiled' if llm.vllm_config.compilation_config.mode else 'eager'}", run


def processor_s() -> float:
    """Processor time of this process and of those that it has started, such as vLLM's core and worker."""
    used = time.process_time()
    if "psutil" in sys.modules:  # vLLM needs it; openvino-genai has no other process
        for child in sys.modules["psutil"].Process().children(recursive=True):
            times = child.cpu_times()
            used += times.user + times.system
    return used


def turn(steps: Steps, asks: list[tuple[list[int], int]]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), processor_s()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gaps = []
    answers: list[list[int]] = [[] for _ in asks]
    for given in steps(asks):
        now = time.perf_counter()
        for index, tokens in given:
            if not tokens:
                continue
            answers[index] += tokens
            if index in last:
                gaps.append(now - last[index])
            else:
                first[index] = now - began
            last[index] = now
    return {
        "tokens": sum(map(len, answers)),
        "wall_s": time.perf_counter() - began,
        "cpu_s": processor_s() - cpu,
        "first_s": list(first.values()),
        "gaps_s": gaps,
        "answers": answers,
    }


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engines print to standard output
    settings = json.loads(sys.stdin.readline())
    settings["eager"] = sys.argv[1].endswith("-eager")
    version, steps = {"openvino": openvino, "vllm": vllm}[sys.argv[1].removesuffix("-eager")](settings)
    print(json.dumps({"version": version}), file=lines)
    for line in sys.stdin:
        print(json.dumps(turn(steps, [(prompt, new) for prompt, new in json.loads(line)])), file=lines)


if __name__ == "__main__":
    main()

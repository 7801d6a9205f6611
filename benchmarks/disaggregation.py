"""Prefill and decode apart beside one engine: `python -m benchmarks.disaggregation [--seconds N] [--json]`.

A model with random weights, one thread an engine. Streams of short prompts decode all the time, and long prompts arrive
by chance among them. Compared for the same arrivals, as clients see them over HTTP: gaps between tokens of the streams
(p50, p99), time to the first token of the long prompts (p50, p99), tokens a second, and goodput: answers a second that
keep `SLO_GAP_S` between all but one of twenty of their tokens, or `SLO_FIRST_S` for the first token of a long prompt.

one       one engine, prompts in chunks of 512 tokens.
chunked   one engine, in chunks of 64: what costs no further process.
two       two engines, each with half of the requests: as many processes as apart.
apart     one engine decodes, one computes prompts (`disaggregation`).
apart2    one engine decodes, two compute prompts: more processes than this machine has cores.

Each engine's thread is pinned to a processor of its own, as far as there are some.

The same run measures before it: bytes a second of blocks from cache to cache, beside a copy of as many bytes (memcpy),
and from process to process, beside raw TCP and memcpy (`kv_rate`), and over links with a bandwidth, beside raw TCP over
the same link (`kv_link`; where network namespaces are allowed). The share of bytes that came before prefill had
computed the last chunk of a prompt, of prompts of 2, 4 and 8 chunks, one at a time. And what long prompts of one decode
instance wait while another one, which has asked prefill for some, is stopped and takes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import torch
import transformers as untyped
from tokenizers import Tokenizer, models

from benchmarks import kv_link, kv_rate
from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages, Page
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

transformers: Any = untyped

VOCABULARY: Final = 4096
STREAMS: Final = 4
STREAM_TOKENS: Final = 64
LONG: Final = 1000  # tokens
ARRIVALS_PER_S: Final = 0.8
SLO_GAP_S: Final = 0.4
SLO_FIRST_S: Final = 20.0
CHUNK: Final = 128  # where the hidden share is measured
STAGE: Final = """
import os
import pathlib
import stage_runtime as omni

def model(model, max_chunk=512):
    with pathlib.Path(__file__).with_name("started").open("a") as started:  # one byte by each engine
        started.write(".")
        number = started.tell() - 1
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[number % len(processors)]})  # of this thread, which computes
    return omni.Autoregressive(
        model=model,
        prompt=lambda payload: omni.Prompt(tokens=payload.data["tokens"], params={"max_tokens": payload.data["count"]}),
        deliver=lambda payload, made: [omni.Chunk(len(made.tokens), to="coordinator")] * bool(made.tokens)
        + [omni.Result(made.finish)] * (made.finish is not None),
        params={"max_tokens": 256, "temperature": 0, "ignore_eos": True},
        threads=1, max_chunk=max_chunk, linears="plain", max_model_len=2048,
    )
"""
PIPELINE: Final = """
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {{name: bench}}
spec:
  control: {{deadAfterSeconds: {dead_after_s}}}
  processGroups: [{{name: {group}, replicas: {replicas}}}]
  stages:
  - name: words
    process: decoder
    factory: "words:model"
    factoryArgs: {{model: "{model}", max_chunk: {chunk}}}
    terminal: true
    {apart}
"""


class Arrangement(NamedTuple):
    chunk: int = 512
    replicas: int = 1
    apart: str = ""
    group: str = "decoder"  #: The group that has so many replicas.
    dead_after_s: int = 4


ARRANGEMENTS: Final = {
    "one": Arrangement(),
    "chunked": Arrangement(chunk=64),
    "two": Arrangement(replicas=2),
    "apart": Arrangement(apart="disaggregation: {prefill: {process: prefiller}}"),
    "apart2": Arrangement(apart="disaggregation: {prefill: {process: prefiller}}", replicas=2, group="prefiller"),
}


class Figures(NamedTuple):
    gap_p50_ms: float
    gap_p99_ms: float
    first_p50_ms: float
    first_p99_ms: float
    tokens_per_s: float
    long_prompts: int
    goodput_per_s: float

    def shown(self) -> str:
        gaps = f"gaps p50 {self.gap_p50_ms:6.1f} p99 {self.gap_p99_ms:7.1f} ms"
        firsts = f"p50 {self.first_p50_ms:7.0f} p99 {self.first_p99_ms:7.0f} ms"
        rates = f"{self.tokens_per_s:5.1f} tokens/s, {self.goodput_per_s:.2f} good answers/s"
        return f"{gaps}, first token of {self.long_prompts} long prompts {firsts}, {rates}"


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def save_model(folder: Path) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


async def answer(client: httpx.AsyncClient, tokens: list[int], count: int) -> list[float]:
    """When each token came, after the request."""
    body = {"inputs": {"tokens": tokens, "count": count}, "stream": True}
    begun, times = time.monotonic(), []
    async with client.stream("POST", "/v1/pipeline", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "event: chunk":
                times.append(time.monotonic() - begun)
    return times


async def measured(url: str, seconds: float) -> Figures:
    draw = random.Random(7)
    gaps: list[float] = []
    firsts: list[float] = []
    tokens = good = 0
    begun = time.monotonic()
    end = begun + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def stream() -> None:
            nonlocal tokens, good
            while time.monotonic() < end:
                times = await answer(client, [draw.randrange(VOCABULARY) for _ in range(12)], STREAM_TOKENS)
                own = [later - one for one, later in itertools.pairwise(times)]
                gaps.extend(own)
                tokens += len(times)
                good += quantile(own, 0.95) <= SLO_GAP_S

        async def arrive() -> None:
            waiting = []
            while time.monotonic() < end:
                await asyncio.sleep(draw.expovariate(ARRIVALS_PER_S))
                prompt = [draw.randrange(VOCABULARY) for _ in range(LONG)]
                waiting.append(asyncio.create_task(answer(client, prompt, 1)))
            firsts.extend(times[0] for times in await asyncio.gather(*waiting))

        await asyncio.gather(arrive(), *(stream() for _ in range(STREAMS)))
    return Figures(
        gap_p50_ms=quantile(gaps, 0.5) * 1e3,
        gap_p99_ms=quantile(gaps, 0.99) * 1e3,
        first_p50_ms=quantile(firsts, 0.5) * 1e3,
        first_p99_ms=quantile(firsts, 0.99) * 1e3,
        tokens_per_s=tokens / (time.monotonic() - begun),
        goodput_per_s=(good + sum(first <= SLO_FIRST_S for first in firsts)) / (time.monotonic() - begun),
        long_prompts=len(firsts),
    )


@contextlib.asynccontextmanager
async def arranged(chosen: Arrangement, model: Path) -> AsyncIterator[LocalPipeline]:
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        Path(folder, "words.py").write_text(STAGE)
        text = PIPELINE.format(model=model, **chosen._asdict())
        Path(folder, "pipeline.yaml").write_text(text)
        overrides = [f"endpoints.basePath={folder}"]
        options = LocalOptions(port=0, cpu=True)
        async with LocalPipeline(Path(folder, "pipeline.yaml"), overrides=overrides, options=options) as pipeline:
            yield pipeline


async def run(name: str, model: Path, seconds: float) -> Figures:
    async with arranged(ARRANGEMENTS[name], model) as pipeline:
        await measured(pipeline.url, 2.0)  # warm
        return await measured(pipeline.url, seconds)


async def hidden(model: Path, prompts: int = 5) -> dict[int, float]:
    """Chunks of a prompt -> the share of its bytes that came before prefill had computed the last chunk."""
    draw = random.Random(3)
    shares = {}
    chosen = ARRANGEMENTS["apart"]._replace(chunk=CHUNK)
    async with arranged(chosen, model) as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=300) as client:

        async def counted() -> tuple[float, float, float]:
            """Bytes received, bytes hidden, tokens generated, of all until the last beat."""
            text = (await client.get("/metrics")).text
            lines = [line.rpartition(" ") for line in text.splitlines() if 'stage="words"' in line]
            names = ("kv_received_bytes_total{", "kv_hidden_bytes_total{", "generated_tokens_total{")
            received, behind, made = (sum(float(one[2]) for one in lines if name in one[0]) for name in names)
            return received, behind, made

        total = 0
        for chunks in (1, 2, 4, 8):  # the first one warms
            before = await counted()
            for _ in range(prompts):
                await answer(client, [draw.randrange(VOCABULARY) for _ in range(chunks * CHUNK + 1)], 1)
            total += prompts
            while (after := await counted())[2] < total:
                await asyncio.sleep(0.2)
            received = after[0] - before[0]
            shares[chunks] = (after[1] - before[1]) / received if received else float("nan")
    return shares


async def stalled(model: Path, prompts: int = 8) -> tuple[float, float]:
    """Seconds to the first token of a long prompt: before another decode instance is stopped, and meanwhile."""
    draw = random.Random(5)
    chosen = ARRANGEMENTS["apart"]._replace(replicas=2, dead_after_s=60)  # it is not taken for a dead one
    async with arranged(chosen, model) as pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=300) as client:

        async def first() -> float:
            return (await answer(client, [draw.randrange(VOCABULARY) for _ in range(LONG)], 1))[0]

        async def bound() -> int:
            found = (await client.get("/status")).json()["instances"]
            return min(int(one["bound"]) for one in found if one["group"] == "decoder")

        for _ in range(3):  # warm
            await asyncio.gather(first(), first())
        before = [await first() for _ in range(prompts)]
        asked = [asyncio.create_task(first()) for _ in range(4)]
        while not await bound():
            await asyncio.sleep(0.001)
        reader = next(pid for name, pid in pipeline.pids().items() if name.startswith("decoder"))
        os.kill(reader, signal.SIGSTOP)
        try:
            while sum(one.done() for one in asked) < 2:  # the other instance's
                await asyncio.sleep(0.01)
            meanwhile = [await first() for _ in range(prompts)]
        finally:
            os.kill(reader, signal.SIGCONT)
        await asyncio.gather(*asked)
    return statistics.median(before), statistics.median(meanwhile)


def copying(blocks: int = 64) -> tuple[float, float]:
    """GB/s of blocks out of a cache and into another one, and of memcpy of as many bytes twice."""
    pages = [Page(str(at), torch.zeros(512, 16, 3, 64)) for at in range(24)]
    here, there = BlockPages(pages), BlockPages([one._replace(values=one.values.clone()) for one in pages])
    chosen = list(range(1, 1 + blocks))
    source = torch.zeros(blocks * here.block_nbytes, dtype=torch.uint8)
    crossing, memcpy = [], []
    for _ in range(20):
        begun = time.perf_counter()
        there.load(chosen, here.export(chosen))
        crossing.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        source.clone().clone()
        memcpy.append(time.perf_counter() - begun)
    nbytes = 2 * source.numel() / 1e9
    return nbytes / statistics.median(crossing), nbytes / statistics.median(memcpy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", nargs="*", default=list(ARRANGEMENTS), choices=list(ARRANGEMENTS))
    parser.add_argument("--relays", nargs="*", default=["shm", "tcp", "nixl", "mooncake"])
    parser.add_argument("--gbit", type=float, nargs="*", default=kv_link.GBITS, help="links with a bandwidth")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    crossing, memcpy = copying()
    found: dict[str, Any] = {"copy": {"blocks_gb_per_s": crossing, "memcpy_gb_per_s": memcpy}}
    print(f"blocks out and in {crossing:.1f} GB/s, memcpy {memcpy:.1f} GB/s: {crossing / memcpy:.2f}x", flush=True)
    for relay, checked in itertools.product(arguments.relays, (False, True)):
        rates = asyncio.run(kv_rate.of_relay(relay, checked=checked))
        found[f"{relay}{' checked' if checked else ''}"] = kv_rate.medians(rates)
        print(kv_rate.shown(relay, checked, rates), flush=True)
    found.update(kv_link.measured(arguments.gbit, [one for one in arguments.relays if one in kv_link.RELAYS]))
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        save_model(Path(folder))
        shares = found["hidden"] = asyncio.run(hidden(Path(folder)))
        print(
            "hidden behind prefill:",
            ", ".join(f"{one:.0%} of {many} chunks" for many, one in shares.items()),
            flush=True,
        )
        before, meanwhile = asyncio.run(stalled(Path(folder)))
        found["stalled"] = {"before_s": before, "meanwhile_s": meanwhile, "ratio": meanwhile / before}
        print(
            f"first token of a long prompt {before:.2f} s, beside a reader that is stopped {meanwhile:.2f} s: "
            f"{meanwhile / before:.2f}x",
            flush=True,
        )
        for name in arguments.only:
            figures = asyncio.run(run(name, Path(folder), arguments.seconds))
            found[name] = figures._asdict()
            print(f"{name:8} {figures.shown()}", flush=True)
        if "one" in found:
            longest = {name: found[name]["gap_p99_ms"] / found["one"]["gap_p99_ms"] for name in arguments.only}
            print("p99 gap beside one engine's:", ", ".join(f"{one} {ratio:.2f}x" for one, ratio in longest.items()))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Qwen3-Omni as stages beside transformers' whole model, with the tiny checkpoint, on this machine.

    python -m benchmarks.omni [--users 1,8,16,32] [--every 6] [--requests 8] [--closed 1,16] [--model FOLDER]
        [--set PATH=VALUE]... [--json]

Each of a number of users asks every so many seconds (``--every``), answered or not, so arrivals have a
fixed rate; with ``--closed``, so many ask at once, again and again, until all requests are answered. Answers are
streamed. Printed in the field's words: time to the first text and to the first sound, the real-time factor (seconds of
computing for a second of sound), underruns of a player that starts with the first sound and the longest one, the share
of time in which each stage computed, and what lies between two steps of the talker. The same run measures on the same
cores transformers' ``generate`` of the whole model in a process of its own, one request after the other. The ratios of
a tiny checkpoint say what the stages and the engine cost, not what a large model takes. ``--set`` places stages on a
GPU, ``--model`` names a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from benchmarks.omnilab import talkers
from stage_models.qwen3_omni import checkpoint
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

EXAMPLE: Final = Path(__file__).parents[1] / "examples/qwen3_omni/pipeline.yaml"
TALKER: Final = "benchmarks.omnilab.talkers:timed"
RATE: Final = 24_000
FRAMES: Final = 64
TOKENS: Final = 24
SHORTEST_S: Final = 0.001  # of an underrun
SMOOTH: Final = 0.8  # a real-time factor below which no player may run dry
QUESTIONS: Final = ("sing", "zebra crossing", "a sea of time", "the end of the day")
_MONOLITH: Final = """
import json, sys, time, torch
from stage_models.qwen3_omni import checkpoint
from stage_models.qwen3_omni.preparing import Preparer
from transformers import Qwen3OmniMoeForConditionalGeneration as Whole
import stage_runtime as omni
folder, questions, count, tokens, frames = json.loads(sys.argv[1])
torch.set_num_threads(1)
model = Whole.from_pretrained(folder, dtype=torch.float32).eval()
preparer = Preparer(folder, checkpoint.config_of(folder))
times = []
for index in range(count + len(questions)):
    text = questions[index % len(questions)]
    request = omni.OmniRequest(id="r", kind="chat", modalities=["audio"],
                               inputs={"messages": [{"role": "user", "content": text}]})
    begun = time.monotonic()
    ids = torch.tensor([preparer.prepare(request)[0].tokens])
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), thinker_max_new_tokens=tokens,
                   thinker_eos_token_id=model.config.im_end_token_id, talker_max_new_tokens=frames,
                   thinker_do_sample=False, talker_do_sample=False)
    times.append(time.monotonic() - begun)
print(json.dumps(times[len(questions):]))
"""


LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class Answer(NamedTuple):
    """Seconds from the request on. underruns: silences of a player that starts with the first sound."""

    first_text: float
    first_sound: float
    whole: float
    sound: float
    underruns: list[float]


def underruns(arrivals: Sequence[tuple[float, float]]) -> list[float]:
    """Each time for which a player has nothing to play. arrivals: when each piece came, and its seconds, in order."""
    silent, end = [], arrivals[0][0]
    for at, seconds in arrivals:
        if at - end > SHORTEST_S:
            silent.append(at - end)
        end = max(end, at) + seconds
    return silent


async def ask(client: httpx.AsyncClient, question: str) -> Answer:
    body = {
        "model": "qwen3-omni",
        "messages": [{"role": "user", "content": question}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "chelsie", "format": "pcm16"},
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    begun, first_text = time.monotonic(), None
    arrivals: list[tuple[float, float]] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                delta = choice["delta"]
                if delta.get("content") and first_text is None:
                    first_text = time.monotonic() - begun
                if data := (delta.get("audio") or {}).get("data"):
                    arrivals.append((time.monotonic() - begun, len(base64.b64decode(data)) / 2 / RATE))
    whole = time.monotonic() - begun
    if not arrivals:
        return Answer(first_text or whole, whole, whole, 0.0, [])
    return Answer(first_text or whole, arrivals[0][0], whole, sum(one for _at, one in arrivals), underruns(arrivals))


async def arriving(client: httpx.AsyncClient, rate: float, requests: int) -> list[Answer]:
    """Answers to requests that come at a fixed rate, a second."""
    asked = []
    for index in range(requests):
        asked.append(asyncio.create_task(ask(client, QUESTIONS[index % len(QUESTIONS)])))
        await asyncio.sleep(1 / rate)
    return await asyncio.gather(*asked)


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient, steps: Path) -> AsyncIterator[dict[str, Any]]:
    """The stages' work meanwhile. busy: the mean share of time in which each computed, looked at each second."""
    found: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            for line in (await client.get("/metrics")).text.splitlines():
                if line.startswith("omnipipeline_stage_busy_ratio{"):
                    stage = line.split('stage="')[1].split('"')[0]
                    shares.setdefault(stage, []).append(float(line.split()[-1]))

    begun = time.monotonic()
    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        found["busy"] = {stage: statistics.mean(some) for stage, some in shares.items()}
        found["talker"] = talkers.between(talkers.read(steps, begun, time.monotonic()))


async def served(client: httpx.AsyncClient, users: int, requests: int) -> tuple[list[Answer], float]:
    """Answers, and the seconds that all took."""
    left = iter(range(requests))
    answers: list[Answer] = []

    async def user() -> None:
        for index in left:
            answers.append(await ask(client, QUESTIONS[index % len(QUESTIONS)]))

    begun = time.monotonic()
    await asyncio.gather(*(user() for _ in range(users)))
    return answers, time.monotonic() - begun


def monolith(folder: str, requests: int) -> list[float]:
    """Seconds of each answer of the whole model."""
    arguments = json.dumps([folder, QUESTIONS, requests, TOKENS, FRAMES])
    done = subprocess.run([sys.executable, "-c", _MONOLITH, arguments], capture_output=True, text=True, check=True)
    return [float(one) for one in json.loads(done.stdout.splitlines()[-1])]


def row(answers: Sequence[Answer], alone: Sequence[float]) -> dict[str, Any]:
    """The sound that users hear."""
    heard = [one for one in answers if one.sound]
    whole = statistics.median(alone)
    smooth = [one for one in heard if one.whole / one.sound < SMOOTH]
    return {
        "first_text_s": statistics.median(one.first_text for one in answers),
        "first_sound_s": statistics.median(one.first_sound for one in heard),
        "first_sound_of_whole_model": statistics.median(one.first_sound for one in heard) / whole,
        "real_time_factor": statistics.median(one.whole / one.sound for one in heard),
        "answers": len(answers),
        "with_underruns": sum(bool(one.underruns) for one in heard),
        "with_underruns_below_0.8": sum(bool(one.underruns) for one in smooth),
        "longest_underrun_s": max((gap for one in heard for gap in one.underruns), default=0.0),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = checkpoint.folder_of(options.model)
    at_rates: list[tuple[int, float, list[Answer], dict[str, Any]]] = []
    closed: list[tuple[int, list[Answer], float, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="o-") as base:
        overrides = [f"endpoints.basePath={base}", f"modelPath={folder}", *options.set]
        steps = Path(base) / "steps"
        args = "stages.talker.factoryArgs"
        overrides += [
            f"{args}.params.max_tokens={FRAMES}",
            f"{args}.steps_file={steps}",
            f"stages.talker.factory={TALKER}",
        ]
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            async with httpx.AsyncClient(base_url=running.url, timeout=600.0, limits=LIMITS) as client:
                await served(client, 2, len(QUESTIONS))
                for users in options.users:
                    rate = users / options.every
                    async with watched(client, steps) as seen:
                        answers = await arriving(client, rate, max(options.requests, users))
                    at_rates.append((users, rate, answers, seen))
                for users in options.closed:
                    async with watched(client, steps) as seen:
                        answers, seconds = await served(client, users, max(options.requests, 2 * users))
                    closed.append((users, answers, seconds, seen))
    alone = monolith(folder, options.requests)
    return {
        "whole_model_s": statistics.median(alone),
        "fixed_arrivals": [
            {"users": users, "arrivals_per_s": rate, **row(answers, alone), **seen}
            for users, rate, answers, seen in at_rates
        ],
        "closed_loop": [
            {
                "users": users,
                **row(answers, alone),
                "answers_per_s": len(answers) / seconds,
                "answers_of_whole_model": len(answers) / seconds * statistics.mean(alone),
                **seen,
            }
            for users, answers, seconds, seen in closed
        ],
    }


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=numbers, default=[1, 8, 16, 32])
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two questions of a user")
    parser.add_argument("--requests", type=int, default=8, help="at least, of each row")
    parser.add_argument("--closed", type=numbers, default=[1, 16])
    parser.add_argument("--model")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"whole model: {found.pop('whole_model_s'):.3g} s an answer")
    for title, rows in found.items():
        print(f"\n{title.replace('_', ' ')}")
        for one in rows:
            print("  " + ", ".join(f"{name} {_shown(value)}" for name, value in one.items()))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_shown(one)}" for name, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Qwen3-Omni as stages beside transformers' whole model, with the tiny checkpoint, on this machine.

    python -m benchmarks.omni [--users 1,8,16] [--requests 16] [--json]

For each number of users, that many ask at once, again and again, until all requests are answered; answers are streamed.
Printed in the field's words: time to the first text and to the first sound, the real-time factor (seconds of computing
for a second of sound), answers whose player would have had gaps, and answers a second. Beside them, in the same run and
on the same cores, transformers' ``generate`` of the whole model in a process of its own, one request after the other.
With a tiny checkpoint the ratios say what the stages and the engine cost, not what a large model takes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from stage_models.qwen3_omni import checkpoint
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline

EXAMPLE: Final = Path(__file__).parents[1] / "examples/qwen3_omni/pipeline.yaml"
STAGES: Final = ("preprocess", "image_encoder", "audio_encoder", "thinker", "decode", "talker", "code2wav")
RATE: Final = 24_000
FRAMES: Final = 64
TOKENS: Final = 24
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


class Answer(NamedTuple):
    """Seconds from the request on. lacked: seconds of silence of a player that starts with the first sound."""

    first_text: float
    first_sound: float
    whole: float
    sound: float
    lacked: float


def lacking(arrivals: Sequence[tuple[float, float]]) -> float:
    """Seconds for which a player has nothing to play. arrivals: when each piece came, and its seconds, in order."""
    silent, end = 0.0, arrivals[0][0]
    for at, seconds in arrivals:
        silent += max(at - end, 0.0)
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
        return Answer(first_text or whole, whole, whole, 0.0, 0.0)
    return Answer(first_text or whole, arrivals[0][0], whole, sum(one for _at, one in arrivals), lacking(arrivals))


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


def row(users: int, answers: Sequence[Answer], seconds: float, alone: Sequence[float]) -> dict[str, Any]:
    heard = [one for one in answers if one.sound]
    whole = statistics.median(alone)
    return {
        "users": users,
        "first_text_s": statistics.median(one.first_text for one in answers),
        "first_sound_s": statistics.median(one.first_sound for one in heard),
        "first_sound_of_whole_model_s": statistics.median(one.first_sound for one in heard) / whole,
        "real_time_factor": statistics.median(one.whole / one.sound for one in heard),
        "answers_with_gaps": sum(one.lacked > 0.001 for one in heard),
        "answers_per_s": len(answers) / seconds,
        "answers_of_whole_model": len(answers) / seconds * statistics.mean(alone),
    }


async def measure(users: Sequence[int], requests: int) -> list[dict[str, Any]]:
    folder = checkpoint.folder_of(None)
    rows = []
    with tempfile.TemporaryDirectory(prefix="o-") as base:
        overrides = [f"endpoints.basePath={base}", f"modelPath={folder}"]
        overrides += [f"stages.talker.factoryArgs.params.max_tokens={FRAMES}"]
        async with LocalPipeline(EXAMPLE, overrides=overrides, options=LocalOptions(port=0)) as running:
            async with httpx.AsyncClient(base_url=running.url, timeout=600.0) as client:
                await served(client, 2, len(QUESTIONS))
                for count in users:
                    found = await served(client, count, max(requests, count))
                    rows.append((count, *found))
    alone = monolith(folder, requests)
    return [row(count, answers, seconds, alone) for count, answers, seconds in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", default="1,8,16")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(measure([int(one) for one in options.users.split(",")], options.requests))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for one in rows:
        print(", ".join(f"{name} {value:.3g}" for name, value in one.items()))


if __name__ == "__main__":
    main()

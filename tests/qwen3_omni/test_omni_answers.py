"""examples/qwen3_omni beside transformers' whole model: the same text, as many frames, and the same sound."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import pytest_asyncio
import soundfile

from stage_models.qwen3_omni import tiny
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.qwen3_omni.omni_cases import CASES, FRAMES, Case, body

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples/qwen3_omni/pipeline.yaml"
PATIENCE_S = 250.0
STAGES = ("preprocess", "image_encoder", "audio_encoder", "thinker", "decode", "talker", "code2wav")
TOGETHER = [f"stages.{name}.process=all" for name in STAGES]
#: A cache of 26 blocks, which one long prompt fills nearly: beside each other, requests are preempted.
TOKEN_BYTES = 4 * (3 * 2 * 2 * 16 + 64)  # keys and values of three layers, and the kept row of one
SCARCE = [f"stages.thinker.factoryArgs.kv_cache_bytes={26 * 16 * TOKEN_BYTES}"]


#: Settings of the example, which serves chat alone, so that the model itself answers what it does not do.
SPEAKING = ["serves=[chat, speech]"]
ONE_FOR_ALL = pytest.mark.asyncio(loop_scope="module")


class Answer(NamedTuple):
    text: str
    samples: Any
    usage: dict[str, Any]


@contextlib.asynccontextmanager
async def pipeline(checkpoint: str, *overrides: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        changed = [f"endpoints.basePath={folder}", f"modelPath={checkpoint}", *overrides]
        changed += [f"stages.talker.factoryArgs.params.max_tokens={FRAMES}"]
        async with LocalPipeline(EXAMPLE, overrides=changed, options=LocalOptions(port=0, **options)) as running:
            async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as client:
                yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def together(tiny_omni: str) -> AsyncIterator[httpx.AsyncClient]:
    """All stages in one process, with little memory."""
    async with pipeline(tiny_omni, *TOGETHER, *SCARCE, *SPEAKING) as client:
        yield client


async def ask(client: httpx.AsyncClient, case: Case) -> Answer:
    response = await client.post("/v1/chat/completions", json=body(case))
    assert response.status_code == 200, response.text
    found = response.json()
    said = found["choices"][0]["message"]
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(said["audio"]["data"])), dtype="float32")
    assert rate == 24_000
    return Answer(said["content"], samples, found["usage"])


def text_of(checkpoint: str, tokens: Any) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(checkpoint).decode(tokens.tolist(), skip_special_tokens=True))


def check(checkpoint: str, oracle: dict[str, Any], case: Case, answer: Answer) -> None:
    wave = oracle[f"{case.name}.wave"]
    assert answer.text == text_of(checkpoint, oracle[f"{case.name}.tokens"]), case.name
    assert answer.samples.shape == wave.shape, case.name
    assert float(np.abs(answer.samples - wave).max()) <= 2 / 32768, case.name  # two steps of 16-bit sound
    assert answer.usage["completion_tokens"] >= len(oracle[f"{case.name}.tokens"])


@pytest.mark.nightly  # test_omni_replicas.py has as many processes, by tcp
async def test_each_answer_in_six_processes_is_that_of_the_whole_model(tiny_omni: str, oracle: dict[str, Any]) -> None:
    async with pipeline(tiny_omni) as client:
        for case in CASES:
            check(tiny_omni, oracle, case, await ask(client, case))


@ONE_FOR_ALL
async def test_together_with_little_memory_and_aborts_beside_them_answers_are_the_same(
    tiny_omni: str, oracle: dict[str, Any], together: httpx.AsyncClient
) -> None:
    alone = await ask(together, CASES[1])
    answers = [asyncio.create_task(ask(together, case)) for case in CASES]
    leaving = [asyncio.create_task(ask(together, case)) for case in CASES[:4]]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    beside = await asyncio.gather(*answers)
    for case, answer in zip(CASES, beside, strict=True):
        check(tiny_omni, oracle, case, answer)
    assert np.array_equal(beside[1].samples, alone.samples), "the same samples, alone and among others"
    await ask(together, CASES[3])  # whose blocks may have been taken by those beside it
    again = await ask(together, CASES[3])
    check(tiny_omni, oracle, CASES[3], again)
    of_prompt = again.usage["prompt_tokens_details"]
    assert of_prompt["cached_tokens"] > 0, "equal pictures and sounds share a prefix"
    assert (of_prompt["image_tokens"], of_prompt["audio_tokens"]) == (6, 30)  # 96 x 64 pixels, 2.3 s
    assert of_prompt["text_tokens"] == again.usage["prompt_tokens"] - 36
    frames = len(oracle[f"{CASES[3].name}.codes"])
    assert again.usage["completion_tokens_details"]["audio_tokens"] == frames
    metrics = [line for line in (await together.get("/metrics")).text.splitlines() if "cache_hits_total{" in line]
    hits = {line.split('stage="')[1].split('"')[0]: float(line.split()[-1]) for line in metrics}
    assert hits["image_encoder"] >= 1 and hits["audio_encoder"] >= 1


@pytest.mark.nightly
async def test_engines_in_processes_of_their_own_give_the_same(tiny_omni: str, oracle: dict[str, Any]) -> None:
    own = [f"stages.{name}.factoryArgs.own_process=true" for name in ("thinker", "talker")]
    async with pipeline(tiny_omni, *TOGETHER, *own) as client:
        for case in CASES[3:6]:
            check(tiny_omni, oracle, case, await ask(client, case))


@pytest.mark.nightly  # tests/engines/test_kv_transfer.py has rows, positions and kept rows each time
async def test_a_thinker_whose_prompts_are_computed_elsewhere_gives_the_same(
    tiny_omni: str, oracle: dict[str, Any]
) -> None:
    """Pictures and sounds cross to prefill, and rows for the talker come back with the blocks."""
    apart = [f"stages.{name}.process=all" for name in STAGES if name != "thinker"]
    apart += ["stages.thinker.disaggregation={prefill: {process: prompts}}"]
    apart += ["stages.thinker.factoryArgs.remote_prefill_tokens=1"]
    async with pipeline(tiny_omni, *apart) as client:
        for case in CASES[3:6]:
            check(tiny_omni, oracle, case, await ask(client, case))
        async with asyncio.timeout(PATIENCE_S):
            while not re.search(r'kv_received_tokens_total\{.*"thinker"\} [1-9]', (await client.get("/metrics")).text):
                await asyncio.sleep(0.1)


@ONE_FOR_ALL
async def test_text_and_sound_are_streamed_while_they_are_made(
    tiny_omni: str, oracle: dict[str, Any], together: httpx.AsyncClient
) -> None:
    case = CASES[1]
    more = {"stream": True, "audio": {"voice": case.voice, "format": "pcm16"}}
    text, sound, pieces, order = "", b"", 0, ""
    async with together.stream("POST", "/v1/chat/completions", json=body(case, **more)) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                order += "t" * bool(delta.get("content"))
                if data := (delta.get("audio") or {}).get("data"):
                    sound += base64.b64decode(data)
                    pieces += 1
                    order += "a"
    assert text == text_of(tiny_omni, oracle[f"{case.name}.tokens"])
    assert len(sound) == 2 * len(oracle[f"{case.name}.wave"])
    assert pieces > 1
    assert order[0] == "t" and order[-1] == "a"


@ONE_FOR_ALL
async def test_an_answer_that_is_only_read_needs_no_talker_and_no_vocoder(together: httpx.AsyncClient) -> None:
    asked = {**body(CASES[0]), "modalities": ["text"]}
    del asked["audio"]
    response = await together.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    assert "audio" not in response.json()["choices"][0]["message"]
    record = await together.get("/v1/requests/" + response.json()["id"])
    assert "talker" not in json.dumps(record.json().get("stages", {})), record.text


@ONE_FOR_ALL
@pytest.mark.parametrize("shortened", [{"max_completion_tokens": 1}, {"logit_bias": {"283": 100}}, {"stop": ["n"]}])
async def test_an_answer_without_words_to_speak_ends_as_any_other(
    together: httpx.AsyncClient, shortened: dict[str, Any]
) -> None:
    response = await together.post(CHAT, json=body(CASES[0], **shortened))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == ("length" if "max_completion_tokens" in shortened else "stop")
    assert choice["message"]["audio"]["data"]


@ONE_FOR_ALL
async def test_silence_is_answered(together: httpx.AsyncClient) -> None:
    asked = body(CASES[2])
    out = io.BytesIO()
    soundfile.write(out, np.zeros(8_000, dtype=np.float32), 16_000, format="WAV")
    asked["messages"][1]["content"][0]["input_audio"]["data"] = base64.b64encode(out.getvalue()).decode()
    response = await together.post(CHAT, json=asked)
    assert response.status_code == 200, response.text
    said = response.json()
    assert said["choices"][0]["message"]["content"]
    assert said["usage"]["prompt_tokens_details"]["audio_tokens"] == 7  # half a second


CHAT = "/v1/chat/completions"
READ_ALOUD = {"model": "qwen3-omni", "input": "hello", "voice": "chelsie"}


@ONE_FOR_ALL
@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        (CHAT, {**body(CASES[0]), "audio": {"voice": "nobody", "format": "wav"}}, "nobody"),
        (
            CHAT,
            body(CASES[0])
            | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "",
        ),
        (CHAT, {**body(CASES[0]), "messages": [{"role": "user", "content": "x" * 40_000}]}, "context"),
        ("/v1/audio/speech", READ_ALOUD, "does not read a given text aloud"),
        ("/v1/audio/speech", {**READ_ALOUD, "stream_format": "sse"}, "does not read a given text aloud"),
    ],
)
async def test_what_the_model_does_not_take_is_refused_and_the_next_is_served(
    together: httpx.AsyncClient, path: str, asked: dict[str, Any], named: str
) -> None:
    refused = await together.post(path, json=asked)
    assert (refused.status_code, named in refused.text) == (400, True), refused.text
    assert (await ask(together, CASES[0])).text


def test_the_tiny_checkpoint_is_made_once(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "tiny")
    before = {one.name: one.stat().st_mtime_ns for one in made.iterdir()}
    tiny.make(tmp_path / "tiny")
    assert {one.name: one.stat().st_mtime_ns for one in made.iterdir()} == before
    assert [one.name for one in tmp_path.iterdir()] == ["tiny"]

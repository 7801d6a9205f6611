"""Engines that share the experts of a model answer as one engine does, however uneven their load, and end together."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stage_runtime as omni
from stage_runtime.engines import events
from stage_runtime.engines.autoregressive.clients.data_parallel import DPLBAsyncMPClient
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.expert_parallel import experts
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model.models import UnsupportedModel
from stage_runtime.engines.autoregressive.process.launching import EngineLaunch
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.stage import factory
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError, EngineDeadError
from tests.engines.engine_kit import running
from tests.engines.expert_engine import FACTORY
from tests.engines.generation_kit import MIXTURES, VOCABULARY, Answers, tiny_model, tiny_tokenizer
from tests.engines.test_engine_parallel import Reader, until
from tests.thoroughness import rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LIMITS: dict[str, Any] = {
    "block_size": 4,
    "max_requests": 8,
    "max_batched_tokens": 32,
    "max_chunk": 16,
    "max_model_len": 200,
    "threads": 1,
}
#: Requests by name: the engine that computes one, the length of its prompt, of its answer, and a seed.
ASKED: dict[str, tuple[int, int, int, int | None]] = {
    "long": (0, 40, 60, None),  # alone at first: the other engine is idle
    "late": (1, 9, 60, None),  # joins when the first one has begun
    "sampled": (1, 17, 30, 5),
    "short": (0, 3, 4, None),
}


def checkpoint(kind: str, folder: Path) -> Path:
    tiny_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def spec(folder: Path | str, **settings: Any) -> omni.Autoregressive:
    return omni.Autoregressive(
        model=str(folder), data_parallel_size=2, enable_expert_parallel=True, **{**LIMITS, **settings}
    )


def launch(folder: Path, **settings: Any) -> EngineLaunch:
    return msgspec.structs.replace(factory.launch_of(spec(folder, **settings), "cpu"), factory=FACTORY)


def request(name: str, count: int | None = None) -> EngineCoreRequest:
    _engine, length, answer, seed = ASKED[name]
    draw = random.Random(name)
    prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
    params = SamplingParams(
        temperature=0.0 if seed is None else 0.9, seed=seed, max_tokens=count or answer, ignore_eos=True
    )
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=params)


def of_one_engine(folder: Path) -> dict[str, list[int]]:
    """The tokens that one engine with all experts gives."""
    loaded = loader.load(omni.Autoregressive(model=str(folder), **LIMITS))
    answers = Answers(loaded.core)
    for name in ASKED:
        one = request(name)
        answers.ask(name, one.prompt_token_ids, one.params)
    answers.run()
    loaded.core.shutdown()
    return answers.tokens


async def ask(client: DPLBAsyncMPClient, *names: str) -> None:
    for name in names:
        await client.add_request_async(request(name), data_parallel_rank=ASKED[name][0])


@pytest.mark.parametrize("kind", rows([*MIXTURES], each_run=2))
async def test_two_engines_with_half_of_the_experts_give_the_tokens_of_one_and_end_together(
    kind: str, tmp_path: Path
) -> None:
    folder = checkpoint(kind, tmp_path / "model")
    client = await DPLBAsyncMPClient.launch_all(launch(folder), 2, lockstep=True)
    async with client:
        reader = Reader(client)
        kept, read_by = await client.call_utility_async("experts", rank=1)
        assert set(kept) == {MIXTURES[kind] // 2} and "Own" in read_by
        await ask(client, "long")
        await until(lambda: len(reader.tokens.get("long", [])) > 3 or reader.task.done())
        await ask(client, "late", "sampled")
        await client.add_request_async(msgspec.structs.replace(request("short", 1000), request_id="given up"))
        await until(lambda: "given up" in reader.tokens or reader.task.done())
        await client.abort_requests_async(["given up"])
        await ask(client, "short")
        await reader.until(*ASKED)
        expected = await asyncio.to_thread(of_one_engine, folder)
        assert {name: reader.tokens[name] for name in ASKED} == expected
        before = [await client.call_utility_async("meetings", rank=rank) for rank in range(2)]
        assert before[0] == before[1]  # all rest: none was asked for more passes than another one
        for name in ASKED:
            del reader.tokens[name], reader.over[name]
        await client.call_utility_async("break_next_pass", rank=1)  # in it, the other engine waits for the rest
        await ask(client, *ASKED)
        await reader.until(*ASKED)
        assert {name: reader.tokens[name] for name in ASKED} == expected
        assert await client.call_utility_async("breaks", rank=1) == 1
        await end_together(client, reader, signal.SIGKILL)


@pytest.mark.nightly  # the test above kills one each time
async def test_all_engines_end_within_seconds_when_one_is_frozen(tmp_path: Path) -> None:
    folder = checkpoint("mixtral", tmp_path / "model")
    client = await DPLBAsyncMPClient.launch_all(launch(folder, frozen_after_s=2.0), 2, lockstep=True)
    async with client:
        await end_together(client, Reader(client), signal.SIGSTOP)


async def end_together(client: DPLBAsyncMPClient, reader: Reader, number: int) -> None:
    """All engines end within seconds when one gets this signal, with a request under way at the other one."""
    lasting = msgspec.structs.replace(request("long", 150), request_id="lasting")
    await client.add_request_async(lasting, data_parallel_rank=0)
    await until(lambda: "lasting" in reader.tokens or reader.task.done())
    pids = client.pids_by_rank()
    os.kill(pids[1], number)
    begun = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"engine 1 .*enable_expert_parallel"):
        await asyncio.wait_for(reader.task, 60)
    await until(lambda: not any(map(alive, pids.values())))
    assert time.monotonic() - begun < 40
    with pytest.raises(EngineDeadError):
        await ask(client, "short")


def alive(pid: int) -> bool:
    """Whether the process computes: what is left of one that was killed and not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_stage_of_such_engines_answers_is_not_scaled_and_finishes_what_it_has(tmp_path: Path) -> None:
    made = loading.as_engine(spec(checkpoint("mixtral", tmp_path), params={"max_tokens": 40, "ignore_eos": True}))
    with running(made) as rig:
        replies: list[Any] = []
        rig.inbox.put(events.Admin("call", "scale_engines", {"engines": 3}, replies.append))
        for name in "abc":
            messages = [{"role": "user", "content": name * 9}]
            rig.ask(omni.OmniRequest(id=name, kind="chat", inputs={"messages": messages}))
        ends = [rig.outbox.next()]
        rig.close()  # with requests under way in both engines
        while not rig.outbox.outputs.empty():
            ends.append(rig.outbox.next())
    assert {name: what for name, what, *_ in ends} == dict.fromkeys("abc", "done")
    (refused,) = replies
    assert "enable_expert_parallel cannot be added or removed" in str(refused)


class Fixed:
    """Engines of a given number, none of which is ever called."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.layers = 0, size, list[Callable[[], None]]()


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("llama", 2, "LlamaForCausalLM has no experts that enable_expert_parallel could spread"),
        ("mixtral", 3, "4 experts cannot be shared by 3 engines"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused_in_one_sentence(kind: str, size: int, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        experts.share(tiny_model(kind), Fixed(size))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_size": 1}, "data_parallel_size must be 2 or more"),
        ({"overlap": True}, "does not go with overlap=True"),
        ({"compile": True}, "does not go with compile"),
        ({"kv_folder": "/tmp/blocks"}, "does not go with kv_folder"),
        ({"engine": "vllm", "data_parallel_size": 1}, "takes no enable_expert_parallel"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        given = {"data_parallel_size": 2, "enable_expert_parallel": True, **settings}
        loading.as_engine(omni.Autoregressive(model="unused", **given))

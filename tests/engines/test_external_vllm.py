"""`engine="vllm"`: another engine under the same stage. Real runs where vLLM's CPU build is installed.

One engine serves all tests: starting it takes half a minute. Its environment has no extra `engine`: see docs/engine.md.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
import torch

import stage_runtime as omni
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError
from stage_runtime.metrics import catalog
from tests.engines import external_kit
from tests.engines.engine_kit import Rig
from tests.engines.external_kit import GREEDY_12, save
from tests.engines.generation_kit import CONFIGS, alone_with, tiny_tokenizer, transformers

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs the extra `vllm` (pip install 'omnipipeline[vllm]')"
    ),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
PATIENCE_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


@functools.cache
def model() -> Any:
    """The model of `generation_kit.tiny_model`, with heads as large as vLLM's attention on CPUs wants them."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = CONFIGS["llama"]()
    config.head_dim = 32
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def alone(prompt: Sequence[int], count: int) -> list[int]:
    return alone_with(model(), prompt, count)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model(), tmp_path_factory.mktemp("checkpoint"))


prompt = external_kit.prompt(GREEDY_12)


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.tokens:
        yield omni.Chunk([list(generation.tokens), list(generation.logprobs), list(generation.prompt_logprobs)])
    if generation.finish is not None:
        yield omni.Result([generation.finish, generation.completion_tokens])


class Stage:
    """The engine at work, and its outputs by request."""

    def __init__(self, checkpoint: Path) -> None:
        spec = omni.Autoregressive(
            model=str(checkpoint), engine="vllm", threads=1, prompt=prompt, deliver=deliver, params={"max_tokens": 200}
        )
        self.rig = Rig(loading.as_engine(spec))
        self.rig.thread.start()
        self.chunks: dict[str, list[Any]] = {}
        self.ends: dict[str, tuple[Any, ...]] = {}
        self._count = 0

    def start(self, tokens: Sequence[int], **params: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.chunks[name] = []
        self.rig.start(name, {"tokens": list(tokens), "params": params})
        return name

    def take(self) -> str:
        """Take its next output. Returns: of which request."""
        while True:
            try:
                name, kind, *rest = self.rig.outbox.outputs.get(timeout=1)
                break
            except Empty:
                assert self.rig.thread.is_alive(), self.rig.crash
        if kind == "chunk":
            self.chunks[name].append(rest[0])
        else:
            self.ends[name] = (kind, *rest)
        return str(name)

    def end(self, *names: str) -> None:
        while not set(names) <= set(self.ends):
            self.take()

    def tokens(self, name: str) -> list[int]:
        self.end(name)
        return [token for chunk in self.chunks[name] for token in chunk[0]]

    def logprobs(self, name: str, at: int = 1) -> list[Any]:
        self.end(name)
        return [one for chunk in self.chunks[name] for one in chunk[at]]

    def close(self) -> None:
        self.rig.inbox.close()
        self.rig.thread.join(PATIENCE_S)
        assert not self.rig.thread.is_alive()


@contextmanager
def started(checkpoint: Path) -> Iterator[Stage]:
    made = Stage(checkpoint)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def stage(checkpoint: Path) -> Iterator[Stage]:
    before = dict(os.environ)
    with started(checkpoint) as made:
        assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}
        yield made
    assert made.rig.crash is None


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def text(tokens: Sequence[int]) -> str:
    return str(tiny_tokenizer().decode(list(tokens), skip_special_tokens=True))


def test_each_request_gets_the_tokens_that_transformers_gives_to_it_alone(stage: Stage) -> None:
    texts = ["a", "the quick brown fox", "the quick brown cat", "zzz" * 9, "b" * 70]
    names = [stage.start(ids(one), max_tokens=5 + at) for at, one in enumerate(texts)]
    for at, (name, one) in enumerate(zip(names, texts, strict=True)):
        assert stage.tokens(name) == alone(ids(one), 5 + at)
        assert stage.ends[name] == ("done", ["length", 5 + at])
    assert len(stage.chunks[names[-1]]) > 1, "tokens did not come one after the other"


def test_a_prompt_of_the_greatest_length_is_answered_and_a_longer_one_is_refused(stage: Stage) -> None:
    whole = stage.start([3] * 255, max_tokens=10)
    longer = stage.start([3] * 256)
    huge = stage.start([3] * 100_000)
    stage.end(whole, longer, huge)
    assert stage.ends[whole] == ("done", ["length", 1])
    assert stage.ends[longer][0] == stage.ends[huge][0] == "failed"
    assert "256" in stage.ends[longer][1]


def test_stop_tokens_and_strings_end_an_answer(stage: Stage) -> None:
    expected = alone([1, 2, 3], 12)
    last = expected.index(expected[6])
    name = stage.start([1, 2, 3], stop_token_ids=[expected[6]])
    assert stage.tokens(name) == expected[: last + 1]
    assert stage.ends[name] == ("done", ["stop", last + 1])
    whole = text(alone([5, 6], 60))
    stop = next(one for one in whole[8:] if one.isprintable() and one.isascii())
    name = stage.start([5, 6], max_tokens=60, stop=stop)
    stage.end(name)
    assert stage.ends[name][1][0] == "stop"


def test_log_probabilities_are_those_of_the_own_engine(stage: Stage, checkpoint: Path) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4}
    name = stage.start([5, 6, 7, 8], **asked)
    own = loading.as_engine(omni.Autoregressive(model=str(checkpoint), prompt=prompt, deliver=deliver, threads=1))
    rig = Rig(own)
    rig.thread.start()
    rig.start("own", {"tokens": [5, 6, 7, 8], "params": asked})
    outputs: list[tuple[Any, ...]] = []
    while not outputs or outputs[-1][1] == "chunk":
        outputs.append(rig.outbox.outputs.get(timeout=PATIENCE_S))
    rig.close()
    for at, count in ((1, 4), (2, 3)):
        expected = [one for _name, kind, *rest in outputs if kind == "chunk" for one in rest[0][at]]
        found = stage.logprobs(name, at)
        assert len(found) == len(expected) == count
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
            assert [token for token, _value in ours[1]] == [token for token, _value in theirs[1]]
            assert [value for _t, value in ours[1]] == pytest.approx([value for _t, value in theirs[1]], abs=1e-3)


def test_sampling_follows_its_parameters_and_a_seed_repeats_an_answer(stage: Stage) -> None:
    greedy = alone([5, 6], 40)
    hot = {"max_tokens": 40, "temperature": 2.0}
    names = {
        "one": stage.start([5, 6], **hot, top_k=1),
        "least": stage.start([5, 6], **hot, top_p=0),
        "bias": stage.start([5, 6], max_tokens=40, logit_bias={"77": 100}),
        "first": stage.start([5, 6], **hot, seed=3),
        "again": stage.start([5, 6], **hot, seed=3),
        "other": stage.start([5, 6], **hot, seed=4),
        "penalized": stage.start([5, 6], max_tokens=40, repetition_penalty=10.0),
    }
    found = {key: stage.tokens(name) for key, name in names.items()}
    assert found["one"] == found["least"] == greedy
    assert found["bias"] == [77] * 40
    assert found["first"] == found["again"] != found["other"]
    assert len(set(found["penalized"])) > len(set(greedy))


def test_answers_follow_a_schema_and_a_bad_one_fails_its_request_alone(stage: Stage) -> None:
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "ignore_eos": False}
    wrong = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}}
    function = {"name": "look", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    call = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "ignore_eos": False}
    good = stage.start([1, 2], **wanted, max_tokens=60)
    bad = stage.start([1, 2], **wrong)
    forced = stage.start([1, 2], **call, max_tokens=100)
    plain = stage.start([1, 2])
    assert set(json.loads(text(stage.tokens(good)))) == {"name", "sure"}
    assert stage.ends[good][1][0] == "stop"
    stage.end(bad)
    assert stage.ends[bad][0] == "failed"
    assert text(stage.tokens(forced)).startswith("<tool_call>")
    assert stage.tokens(plain) == alone([1, 2], 12)


def test_an_abort_storm_leaves_the_others_alone_and_the_next_is_served(stage: Stage) -> None:
    storm = [stage.start([1, 2, at], max_tokens=200) for at in range(40)]
    kept = stage.start([9, 9])
    for name in storm[::2]:
        stage.rig.abort(name)
    assert stage.tokens(kept) == alone([9, 9], 12)
    for name in storm[1::2]:
        stage.rig.abort(name)
    last = stage.start([3, 4])
    assert stage.tokens(last) == alone([3, 4], 12)


def test_a_shared_prefix_is_found_and_the_numbers_are_shown_as_those_of_the_own_engine(stage: Stage) -> None:
    shared = [7, 8, 9] * 60
    expected = alone(shared, 12)
    assert stage.tokens(stage.start(shared)) == expected
    before = stage.rig.inbox.gauges["prefix_hit_tokens_total"]
    assert stage.tokens(stage.start(shared)) == expected
    stage.tokens(stage.start([1]))  # a report follows each answer
    gauges = stage.rig.inbox.gauges
    assert set(gauges) == set(catalog.ENGINE)
    assert gauges["prefix_hit_tokens_total"] >= before + 128


def test_a_model_that_vllm_cannot_load_is_refused_when_the_stage_is_loaded(tmp_path: Path, checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigurationError, match="vLLM does not load"):
        loading.as_engine(omni.Autoregressive(model=str(tmp_path), engine="vllm", threads=1))


def test_a_stage_ends_when_the_engine_s_process_is_killed_and_every_request_with_it(checkpoint: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with started(checkpoint) as made:
        name = made.start([1, 2], max_tokens=200)
        made.take()
        fresh = set(psutil.Process().children(recursive=True)) - before
        core = min((one for one in fresh if "EngineCore" in " ".join(one.cmdline())), key=lambda one: one.pid)
        core.send_signal(signal.SIGKILL)
        made.rig.thread.join(PATIENCE_S)
        assert not made.rig.thread.is_alive()
        assert made.rig.crash is not None and "vllm has ended" in str(made.rig.crash)
        assert made.ends.get(name, ("failed",))[0] != "done"

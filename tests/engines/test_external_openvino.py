"""`engine="openvino"`: another engine under the same stage. Real runs where openvino-genai is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.making import loading
from stage_runtime.metrics import catalog
from tests.engines import external_kit
from tests.engines.engine_kit import running
from tests.engines.external_kit import GREEDY_12, save
from tests.engines.generation_kit import alone_with, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openvino_genai") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the extra `openvino` (pip install 'omnipipeline[openvino]')",
)
LONG = 120  # tokens; all that a request of the tiny model can have is 256


@functools.cache
def rounded() -> Any:
    """The tiny model with weights that F16 holds exactly: openvino-genai is given F16."""
    return tiny_model("llama").half().float()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(rounded(), tmp_path_factory.mktemp("checkpoint"))


prompt = external_kit.prompt(GREEDY_12)


def deliver(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.tokens:
        yield omni.Chunk(list(generation.tokens))
    if generation.finish is not None:
        yield omni.Result([generation.finish, generation.completion_tokens])


def stage(checkpoint: Path, **settings: Any) -> Callable[[], omni.Autoregressive]:
    wanted = {"model": str(checkpoint), "engine": "openvino", "threads": 1, "params": {**GREEDY_12, "max_tokens": LONG}}
    return lambda: omni.Autoregressive(**{**wanted, **settings})


def test_each_request_gets_the_tokens_that_transformers_gives_to_it_alone(checkpoint: Path) -> None:
    texts = ["a", "the quick brown fox", "the quick brown cat", "zzz" * 9, "b" * 70]
    prompts = [tiny_tokenizer()(text)["input_ids"] for text in texts]
    asked = [{"tokens": one, "params": {"max_tokens": 5 + at}} for at, one in enumerate(prompts)]
    found = omni.testing.run_stage(stage(checkpoint, prompt=prompt, deliver=deliver, max_batched_tokens=48), asked)
    for at, (one, emitted) in enumerate(zip(prompts, found, strict=True)):
        assert [token for piece in emitted.data for token in piece] == alone_with(rounded(), one, 5 + at)
        assert emitted.result == ["length", 5 + at]
        assert len(emitted.data) > 1, "tokens did not come one after the other"


def test_a_chat_is_answered_in_text_until_its_stop_string(checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = str(tiny_tokenizer().decode(alone_with(rounded(), ids, 30), skip_special_tokens=True))
    stop = next(one for one in whole[8:] if one.isprintable() and one.isascii())

    def request(name: str, **params: Any) -> omni.OmniRequest:
        return omni.OmniRequest(
            id=name, kind="chat", inputs={"messages": messages}, params={"max_tokens": 30, **params}
        )

    one, two = omni.testing.run_stage(stage(checkpoint), [request("one"), request("two", stop=stop)])
    assert "".join(piece.text for piece in one.data) == whole
    assert one.result == [omni.Usage(len(ids), 30), omni.Finish("length")]
    assert "".join(piece.text for piece in two.data) == whole[: whole.index(stop)]
    assert two.result[1] == omni.Finish("stop")


def test_a_stop_token_ends_an_answer(checkpoint: Path) -> None:
    tokens = alone_with(rounded(), [1, 2, 3], 12)
    last = tokens.index(tokens[6])
    asked = {"tokens": [1, 2, 3], "params": {"stop_token_ids": [tokens[6]]}}
    (found,) = omni.testing.run_stage(stage(checkpoint, prompt=prompt, deliver=deliver), [asked])
    assert [token for piece in found.data for token in piece] == tokens[: last + 1]
    assert found.result == ["stop", last + 1]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"seed": 3}, "seed"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"min_p": 0.5}, "min_p"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_field_that_the_engine_does_not_compute_is_refused_by_name_and_others_are_served(
    checkpoint: Path, params: dict[str, Any], field: str
) -> None:
    asked: list[Any] = [
        {"tokens": [1, 2], "params": params},
        {"tokens": [1, 2]},
        {"tokens": [1] * 256},
        {"tokens": [999]},
    ]
    refused, served, long, unknown = omni.testing.run_stage(stage(checkpoint, prompt=prompt, deliver=deliver), asked)
    assert isinstance(refused.error, omni.InvalidRequest) and refused.error.param == field
    assert served.result == ["length", 12]
    assert isinstance(long.error, omni.InvalidRequest) and "256" in str(long.error)
    assert isinstance(unknown.error, omni.InvalidRequest)


def test_sampled_answers_differ_from_greedy_ones(checkpoint: Path) -> None:
    """That temperature, top_k and penalties reach the engine."""
    asked: list[Any] = [
        {"tokens": [5, 6], "params": {"max_tokens": 60}},
        {"tokens": [5, 6], "params": {"max_tokens": 60, "temperature": 2.0}},
        {"tokens": [5, 6], "params": {"max_tokens": 60, "temperature": 2.0, "top_k": 1}},
        {"tokens": [5, 6], "params": {"max_tokens": 60, "repetition_penalty": 10.0}},
    ]
    found = omni.testing.run_stage(stage(checkpoint, prompt=prompt, deliver=deliver), asked)
    greedy, hot, one, penalized = ([token for piece in each.data for token in piece] for each in found)
    assert greedy == one == alone_with(rounded(), [5, 6], 60)
    assert hot != greedy
    assert len(set(penalized)) > len(set(greedy))


def test_an_aborted_request_ends_and_the_next_one_is_served(checkpoint: Path) -> None:
    def aborted(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
        if payload.request.id == "first":
            rig.abort("first")
        yield from deliver(payload, generation)

    engine = loading.as_engine(stage(checkpoint, prompt=prompt, deliver=aborted)())
    with running(engine) as rig:
        rig.start("first", {"tokens": [1, 2], "params": {"max_tokens": LONG}})
        rig.start("second", {"tokens": [3, 4]})
        outputs: list[tuple[Any, ...]] = []
        while not outputs or outputs[-1][:2] != ("second", "done"):
            outputs.append(rig.outbox.next())
        tokens = [token for one in outputs if one[:2] == ("second", "chunk") for token in one[2]]
        assert tokens == alone_with(rounded(), [3, 4], 12)
    assert rig.inbox.gauges["generated_tokens_total"] < LONG


def test_its_numbers_are_shown_as_those_of_the_own_engine(checkpoint: Path) -> None:
    engine = loading.as_engine(stage(checkpoint, prompt=prompt, deliver=deliver)())
    with running(engine) as rig:
        rig.start("one", {"tokens": [1, 2]})
        while rig.outbox.next()[1] != "done":
            pass
    gauges = rig.inbox.gauges
    assert set(gauges) == set(catalog.ENGINE)
    assert (gauges["prompt_tokens_total"], gauges["generated_tokens_total"]) == (2, 12)
    assert gauges["steps_total"] >= 12

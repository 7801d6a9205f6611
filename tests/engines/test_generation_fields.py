"""Grammars, several answers, log probabilities of prompts: by the engine, beside what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import stage_runtime as omni
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.loading.loader import assemble, load
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.structured_output.grammars import Grammars
from tests.engines.generation_kit import END, VOCABULARY, Answers, alone, tiny_model, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["good", "size"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"utc": {"type": "boolean"}},
            "required": ["utc"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def parts(payload: omni.StagePayload, generation: omni.Generation) -> Iterator[omni.Chunk | omni.Result]:
    if generation.begins:
        return
    facts = {
        "choice": generation.choice,
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish": generation.finish,
        "calls": [[call.name, call.arguments] for call in generation.tool_calls],
        "prompt": [[one, [list(pair) for pair in top]] for one, top in generation.prompt_logprobs],
        "shown": generation.shown_logprobs,
    }
    yield omni.Chunk(facts)
    if generation.ends:
        yield omni.Result("over")


def run(checkpoint: Path, requests: list[dict[str, Any]], **settings: Any) -> list[Any]:
    def factory() -> omni.Autoregressive:
        spec = {"params": {"temperature": 0, "max_tokens": 90}, "max_chunk": 5, "block_size": 4, **settings}
        return omni.Autoregressive(model=str(checkpoint), deliver=parts, **spec)

    asked = [
        omni.OmniRequest(
            id=f"r{index}", kind="chat", inputs={"messages": [{"role": "user", "content": "hi"}]}, params=one
        )
        for index, one in enumerate(requests)
    ]
    return list(omni.testing.run_stage(factory, asked))


def whole(found: Any, name: str, choice: int = 0) -> Any:
    pieces = [piece[name] for piece in found.data if piece["choice"] == choice]
    return "".join(pieces) if name == "text" else [item for piece in pieces for item in piece or ()]


def last(found: Any, choice: int = 0) -> Any:
    return [piece["finish"] for piece in found.data if piece["choice"] == choice][-1]


@pytest.mark.parametrize("where", [{}, {"own_process": True}])
def test_answers_follow_their_schema_and_others_in_the_same_steps_do_not(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    wanted: list[dict[str, Any]] = [
        {"response_format": JSON},
        {"max_tokens": 8, "ignore_eos": True},
        {"response_format": JSON, "temperature": 1, "seed": 3},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}, "max_tokens": 12, "temperature": 1, "seed": 1},
    ]
    found = run(checkpoint, wanted, **where)
    for index in (0, 2):
        answer = json.loads(whole(found[index], "text"))
        assert set(answer) == {"good", "size"}
        assert answer["size"] in ("small", "large")
        assert last(found[index]) == "stop"
    messages = [{"role": "user", "content": "hi"}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole(found[1], "tokens") == alone("llama", prompt, 8)
    assert getattr(found[3].error, "code", None) == "invalid_request"
    [[name, arguments]] = whole(found[4], "calls")
    assert name == "clock"
    assert set(json.loads(arguments)) == {"utc"}
    assert (whole(found[4], "text"), last(found[4])) == ("", "tool_calls")
    assert whole(found[5], "text").startswith("{")


def test_several_answers_have_seeds_of_their_own_and_end_together(checkpoint: Path) -> None:
    base = {"temperature": 1, "max_tokens": 6, "ignore_eos": True}
    several, first, second = run(checkpoint, [{**base, "n": 3, "seed": 10}, {**base, "seed": 10}, {**base, "seed": 11}])
    assert several.result == "over"
    assert whole(several, "tokens", 0) == whole(first, "tokens")
    assert whole(several, "tokens", 1) == whole(second, "tokens")
    assert [last(several, choice) for choice in range(3)] == ["length"] * 3
    assert len(whole(several, "tokens", 2)) == 6


def test_log_probabilities_of_prompts_are_those_of_transformers(checkpoint: Path) -> None:
    [found] = run(checkpoint, [{"prompt_logprobs": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}])
    messages = [{"role": "user", "content": "hi"}]
    prompt = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    given = whole(found, "prompt")
    assert [one for one, _top in given] == pytest.approx(
        [float(expected[place, token]) for place, token in enumerate(prompt[1:])], abs=1e-4
    )
    assert [[token for token, _ in top] for _one, top in given] == [
        expected[place].topk(2).indices.tolist() for place in range(len(prompt) - 1)
    ]
    shown = whole(found, "shown")
    assert [len(one["top_logprobs"]) for one in shown] == [1] * len(whole(found, "tokens"))
    assert bytes(shown[0]["bytes"]).decode() == shown[0]["token"]


@pytest.mark.parametrize("form", ["json", "mistral"])
def test_a_stage_forces_and_reads_calls_in_the_form_of_its_model(checkpoint: Path, form: str) -> None:
    [found] = run(checkpoint, [{"tools": [TOOL], "tool_choice": "required"}], tool_calls=form)
    [[name, arguments]] = whole(found, "calls")
    assert (name, set(json.loads(arguments))) == ("clock", {"utc"})
    assert (whole(found, "text"), last(found)) == ("", "tool_calls")


@pytest.mark.parametrize(("overlap", "overlaps"), [(True, True), (False, False), ("auto", False)])
def test_a_stage_whose_steps_overlap_gives_the_same_answers(
    checkpoint: Path, overlap: bool | Literal["auto"], overlaps: bool
) -> None:
    spec = omni.Autoregressive(model=str(checkpoint), overlap=overlap, max_chunk=5, block_size=4, max_requests=3)
    engine = load(spec).core
    assert engine.step_fn == (engine.step_with_batch_queue if overlaps else engine.step)
    answers, asked = Answers(engine), {str(length): list(range(1, length)) for length in (3, 9, 17, 30)}
    for name, prompt in asked.items():
        answers.ask(name, prompt)
    answers.run()
    engine.shutdown()
    assert answers.tokens == {name: alone("llama", prompt, 12) for name, prompt in asked.items()}
    found = run(checkpoint, [{"max_tokens": 5}, {"response_format": JSON}], overlap=overlap)
    assert set(json.loads(whole(found[1], "text"))) == {"good", "size"}


class CountingTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is not typed here
    """Counts how often llguidance's tokenizer is made of it."""

    made = 0

    @property
    def backend_tokenizer(self) -> Any:
        type(self).made += 1
        return super().backend_tokenizer


def test_what_grammars_need_is_made_when_the_stage_is_loaded() -> None:
    counting: Any = CountingTokenizer
    tokenizer = counting(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<end>")
    core = assemble(omni.Autoregressive(model="", kernels="torch"), tiny_model("llama"), tokenizer).core
    loaded = CountingTokenizer.made
    assert loaded > 0
    params = SamplingParams(grammar=Grammar("json_schema", "{}"))
    for name in ("a", "b"):
        core.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=params))
    assert CountingTokenizer.made == loaded


def test_a_tokenizer_that_llguidance_cannot_read_refuses_grammars_alone() -> None:
    grammars = Grammars(object(), VOCABULARY, frozenset())
    grammars.prepare()
    with pytest.raises(ValueError, match="no grammar"):
        grammars.compile(Grammar("json_schema", "{}"))


def test_one_of_several_schemas_is_followed_where_no_answer_fits_two() -> None:
    grammars = Grammars(tiny_tokenizer(), VOCABULARY, frozenset({END}))
    tagged = [
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
    ]
    assert not grammars.compile(Grammar("json_schema", json.dumps({"oneOf": tagged}))).ended
    with pytest.raises(ValueError, match="oneOf"):
        grammars.compile(Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'))


def test_a_grammar_says_which_bytes_may_come_and_when_nothing_may() -> None:
    grammars = Grammars(tiny_tokenizer(), VOCABULARY, frozenset({END}))
    matcher = grammars.compile(Grammar("json_schema", '{"enum": ["a", "b"]}'))
    for letter, allowed in (('"', '"'), ("a", "ab"), ('"', '"')):
        mask = matcher.mask()
        assert mask.shape == (VOCABULARY,)
        assert set(mask.nonzero()[0].tolist()) == {tiny_tokenizer()(one)["input_ids"][0] for one in allowed}
        assert matcher.take(tiny_tokenizer()(letter)["input_ids"][0])
    assert matcher.ended or set(matcher.mask().nonzero()[0].tolist()) == {END}
    assert not grammars.compile(Grammar("json_schema", "{}")).take(END)
    with pytest.raises(ValueError, match="nonsense"):
        grammars.compile(Grammar("json_schema", '{"type": "nonsense"}'))
    with pytest.raises(ValueError, match="characters"):
        grammars.compile(Grammar("lark", "a" * 100_000))

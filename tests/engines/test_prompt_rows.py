"""Prompts of embeddings, and hidden rows of answers: beside what transformers computes from the same."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from stage_runtime.engines.autoregressive.model.rows.embeddings import ModelEmbeddings
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW, RequestRows
from tests.engines.generation_kit import (
    BACKENDS,
    CONFIGS,
    GREEDY,
    VOCABULARY,
    Answers,
    ScriptedExecutor,
    alone,
    core,
    rows_of,
    scripted_core,
    tiny_model,
)
from tests.thoroughness import crossed

pytestmark = pytest.mark.usefixtures("each_way")


def prompts(lengths: list[int], seed: int = 5) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def mixed(kind: str, prompt: list[int]) -> dict[str, Any]:
    """Every other three tokens as rows."""
    given = [index // 3 % 2 == 0 for index in range(len(prompt))]
    rows = rows_of(kind, [token for token, one in zip(prompt, given, strict=True) if one])
    ids = [ROW if one else token for token, one in zip(prompt, given, strict=True)]
    return {"prompt": ids, "prompt_embeds": rows}


@pytest.mark.parametrize(("kind", "backend"), crossed(list(CONFIGS), BACKENDS))
def test_rows_of_the_model_s_own_embedding_give_the_tokens_of_their_ids(kind: str, backend: str) -> None:
    first, second, third, fourth = prompts([17, 40, 9, 1])
    answers = Answers(core(kind, backend=backend))
    answers.ask("ids", first)
    answers.ask("rows", [ROW] * 40, prompt_embeds=rows_of(kind, second))
    answers.step()
    answers.ask("both", **mixed(kind, third))
    answers.ask("one", [ROW], prompt_embeds=rows_of(kind, fourth))
    answers.run()
    by_name = {"ids": first, "rows": second, "both": third, "one": fourth}
    assert answers.tokens == {name: alone(kind, prompt, 12) for name, prompt in by_name.items()}


def test_rows_are_kept_while_their_request_is_preempted_and_computed_again() -> None:
    by_name = {str(index): prompt for index, prompt in enumerate(prompts([20, 21, 22]))}
    answers = Answers(core(blocks=16, prefix_caching=False))
    for name, prompt in by_name.items():
        answers.ask(name, **mixed("llama", prompt))
    answers.run()
    assert answers.engine.scheduler.stats.preemptions
    assert answers.tokens == {name: alone("llama", prompt, 12) for name, prompt in by_name.items()}


def test_equal_rows_share_their_blocks_and_no_others_do() -> None:
    answers = Answers(core(max_batched_tokens=80))
    prompt, other = prompts([16, 16])
    answers.ask("a", [ROW] * 16, prompt_embeds=rows_of("llama", prompt))
    answers.run()
    answers.ask("same", [ROW] * 16, prompt_embeds=rows_of("llama", prompt))
    answers.ask("other", [ROW] * 16, prompt_embeds=rows_of("llama", other))
    answers.ask("ids", prompt)
    nearly = rows_of("llama", prompt)
    nearly[0, 0] += 1
    answers.ask("nearly", [ROW] * 16, prompt_embeds=nearly)
    hits = {row.request.id: row.request.hit_tokens for row in answers.engine.scheduler.schedule().rows}
    assert hits == {"same": 12, "other": 0, "ids": 0, "nearly": 0}


@pytest.mark.parametrize(
    ("prompt", "embeds", "problem"),
    [
        ([ROW] * 2, torch.zeros(3, 32), "places for 2 rows, and 3 rows are given"),
        ([ROW] * 2, torch.zeros(2, 31), r"shape \[2, 31\]; the model takes \[tokens, 32\]"),
        ([ROW] * 2, torch.zeros(2, 1, 32), r"shape \[2, 1, 32\]"),
        ([ROW], torch.zeros(32), r"shape \[32\]"),
        ([ROW], torch.zeros(1, 32, dtype=torch.int64), "floats, not int64"),
        ([ROW], torch.zeros(1, 32, dtype=torch.complex64), "floats, not complex64"),
        ([ROW], torch.full((1, 32), float("nan")), "finite"),
        ([ROW], torch.full((1, 32), 1e300, dtype=torch.float64), "finite as float32"),
        ([ROW], [[0.0] * 32], "torch tensor, not list"),
        ([ROW], None, "no token -1"),
        ([ROW, VOCABULARY], torch.zeros(1, 32), f"no token {VOCABULARY}"),
        ([ROW, -2], torch.zeros(1, 32), "no token -2"),
        ([ROW] * 120, torch.zeros(120, 32), "120 tokens"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused_and_change_nothing(
    prompt: list[int], embeds: Any, problem: str
) -> None:
    answers = Answers(core())
    with pytest.raises(ValueError, match=problem):
        answers.ask("a", prompt, prompt_embeds=embeds)
    assert not answers.engine.scheduler.has_unfinished_requests()


def test_a_model_without_embeddings_and_logprobs_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="token ids only"):
        Answers(scripted_core(ScriptedExecutor())).ask("a", [ROW], prompt_embeds=torch.zeros(1, 32))
    wanted = SamplingParams(prompt_logprobs=1)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        Answers(core()).ask("a", [ROW], wanted, prompt_embeds=torch.zeros(1, 32))


def test_rows_come_in_other_float_types_and_from_memory_that_changes_afterwards() -> None:
    (prompt,) = prompts([9])
    answers = Answers(core())
    rows = rows_of("llama", prompt).double()
    answers.ask("a", [ROW] * 9, prompt_embeds=rows)
    rows.zero_()
    answers.run()
    assert answers.tokens == {"a": alone("llama", prompt, 12)}


def test_rows_are_named_by_their_content_below_zero_and_differently_in_each_process() -> None:
    rows = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    one, other = (ModelEmbeddings(2, torch.float32).place([ROW, 7, ROW, ROW], rows) for _ in range(2))
    assert one.tokens[0] == one.tokens[3] != one.tokens[2]
    assert max(one.tokens[0], one.tokens[2]) < 0 and one.tokens[1] == 7
    assert one.tokens != other.tokens
    assert [at for at, _rows in one.rows] == [0, 2]
    assert torch.equal(one.rows[1][1], rows[1:])


def test_rows_of_a_range_come_in_pieces() -> None:
    kept = RequestRows()
    kept.add(2, list("abc"))
    kept.add(7, list("de"))
    assert kept.within(0, 9) == [(2, ["a", "b", "c"]), (7, ["d", "e"])]
    assert kept.within(3, 8) == [(3, ["b", "c"]), (7, ["d"])]
    assert kept.within(5, 7) == kept.within(9, 99) == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_rows_are_what_transformers_gives_the_head_for_each_token(kind: str) -> None:
    long, short = prompts([23, 4])
    answers = Answers(core(kind, max_chunk=7))
    answers.ask("with", long, msgspec.structs.replace(GREEDY, hidden_rows=True))
    answers.ask("without", short)
    answers.run()
    assert answers.hidden_rows["without"] == []
    whole = long + answers.tokens["with"]
    assert whole == long + alone(kind, long, 12)
    model = tiny_model(kind)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.tensor([whole]), output_hidden_states=True).hidden_states[-1][0]
    given = torch.stack(answers.hidden_rows["with"])
    assert given.shape == (12, expected.shape[1])
    assert torch.allclose(given, expected[len(long) - 1 : -1], atol=1e-4)
    assert not given.is_inference()

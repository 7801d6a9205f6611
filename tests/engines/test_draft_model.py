"""A draft model: it changes no token of any request, right guesses save steps, and its cache counts in the budget."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError
from tests.engines.generation_kit import CONFIGS, END, Answers, alone, tiny_model, tiny_tokenizer, transformers
from tests.engines.kv_pair_kit import Pair
from tests.engines.rank_threads import ranked
from tests.engines.test_generation_exact import check_interleaved, prompts
from tests.engines.test_kv_folder import Stored
from tests.thoroughness import examples

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4, "max_requests": 8, "max_batched_tokens": 64, "max_chunk": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model: the tiny llama."""
    found = tmp_path_factory.mktemp("draft")
    tiny_model("llama").save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


def loaded(folder: Path, model: Any = None, tokens: int = 4, **settings: Any) -> loader.Loaded:
    """An engine whose drafts are made by the model of the folder. model: by default the same one."""
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": tokens} if tokens else None
    chosen = {**SMALL, "max_model_len": 120, "kv_cache_bytes": 1 << 20, **settings}
    spec = omni.Autoregressive(model="in memory", speculative_config=config, **chosen)
    return loader.assemble(spec, copy.deepcopy(model or tiny_model("llama")), tiny_tokenizer())


def asked(answers: Answers, lengths: list[int], params: SamplingParams = LONG) -> dict[str, list[int]]:
    found = {str(index): prompt for index, prompt in enumerate(prompts(lengths))}
    for name, prompt in found.items():
        answers.ask(name, prompt, params)
        answers.step()
    answers.run()
    return found


def check(answers: Answers, kind: str, prompts: dict[str, list[int]]) -> None:
    assert answers.tokens == {name: alone(kind, prompt, 40) for name, prompt in prompts.items()}
    pool = answers.engine.scheduler.pool
    assert pool.free == pool.capacity
    answers.engine.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_the_drafts_of_the_same_model_are_all_right(folder: Path, overlap: bool, kernels: str) -> None:
    answers = Answers(loaded(folder, overlap=overlap, kernels=kernels).core)
    found = asked(answers, [3, 17, 40, 9, 1])
    stats = answers.engine.scheduler.stats
    assert stats.accepted_tokens == stats.draft_tokens > 4 * 20
    check(answers, "llama", found)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_greedy_answers_of_other_models_are_those_of_generate(folder: Path, kind: str) -> None:
    answers = Answers(loaded(folder, tiny_model(kind)).core)
    found = asked(answers, [3, 17, 40])
    assert answers.engine.scheduler.stats.draft_tokens > 50
    check(answers, kind, found)


def test_preempted_requests_are_computed_again_to_the_same_tokens(folder: Path) -> None:
    engine = loaded(folder, kv_cache_bytes=26 * 2048, prefix_caching=False).core
    answers = Answers(engine)
    found = {str(index): prompt for index, prompt in enumerate(prompts([14, 13, 15, 12]))}
    for name, prompt in found.items():
        answers.ask(name, prompt, LONG)
    answers.run()
    stats = engine.scheduler.stats
    assert stats.preemptions > 0 and stats.accepted_tokens == stats.draft_tokens > 0
    check(answers, "llama", found)


def test_what_is_found_in_the_prefix_cache_has_the_drafts_keys_too(folder: Path) -> None:
    answers = Answers(loaded(folder).core)
    (prompt,) = prompts([30])
    whole = [*prompt, *alone("llama", prompt, 41)]
    answers.ask("a", prompt, LONG)
    answers.run()
    answers.ask("b", whole[:60], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    answers.run()
    stats = answers.engine.scheduler.stats
    assert answers.tokens["b"] == whole[60:70]
    assert stats.hit_tokens >= 52 and stats.accepted_tokens == stats.draft_tokens


def test_tokens_computed_without_room_for_a_draft_are_caught_up_with(folder: Path) -> None:
    """While prompts take all of each step, answers get a token a step and no draft."""
    engine = loaded(folder, max_batched_tokens=9, max_chunk=8).core
    answers = Answers(engine)
    (first, second) = prompts([5, 70])
    answers.ask("a", first, LONG)
    answers.step()
    answers.ask("b", second, LONG)
    while len(answers.tokens["b"]) < 1:
        answers.step()
    before = engine.scheduler.stats.draft_tokens
    assert len(answers.tokens["a"]) >= 8
    answers.run()
    stats = engine.scheduler.stats
    assert stats.draft_tokens > before and stats.accepted_tokens == stats.draft_tokens
    check(answers, "llama", {"a": first, "b": second})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "top_p": 0.8, "seed": 3, "logprobs": 2},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.6, "seed": 4, "ignore_eos": False, "min_tokens": 5, "logit_bias": {END: 6.0}},
    ],
)
def test_a_seed_gives_the_answer_that_it_gives_without_drafts(folder: Path, params: dict[str, Any]) -> None:
    chosen = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
    found = []
    for tokens in (0, 4):
        answers = Answers(loaded(folder, tokens=tokens).core)
        asked(answers, [14, 5, 20], chosen)
        found.append((answers.tokens, answers.finish))
    assert found[0] == found[1]
    stats = answers.engine.scheduler.stats
    assert stats.accepted_tokens > 0
    if not {"repetition_penalty", "logit_bias"} & params.keys():
        assert stats.accepted_tokens == stats.draft_tokens, "the draft has the token's own random number"


@hypothesis_settings(max_examples=examples(3))
@given(data=st.data())
def test_any_interleaving_of_arrivals_and_aborts_gives_the_tokens_of_each_alone(
    folder: Path, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["llama", "gemma2", "gpt2"]))
    blocks = data.draw(st.integers(16, 40))
    settings = {"max_chunk": data.draw(st.sampled_from([3, 8, 32])), "overlap": data.draw(st.booleans())}
    of_block = 3072 if kind == "gpt2" else 2048  # bytes: the longest request has 53 tokens, and 16 blocks hold 60
    engine = loaded(folder, tiny_model(kind), kv_cache_bytes=blocks * of_block, **settings).core
    check_interleaved(data, engine, kind, SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True))
    engine.shutdown()


TINY = 5  #: Tokens of the vocabulary whose answers are counted.


def little(seed: int) -> Any:
    """A model of five tokens."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": TINY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **ends, num_attention_heads=2, initializer_range=0.4)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def probabilities(model: Any, prompt: list[int], count: int) -> dict[tuple[int, ...], float]:
    """The probability of each answer of so many tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _token in range(count):
        nexts: dict[tuple[int, ...], float] = {}
        for answer, before in found.items():
            with torch.inference_mode():
                after = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double().softmax(-1)
            nexts |= {(*answer, token): before * float(after[token]) for token in range(TINY)}
        found = nexts
    return found


def test_sampled_answers_come_as_often_as_the_models_probabilities_say(tmp_path: Path) -> None:
    """Chi-square over the answers of three tokens to one prompt, of seeds that are always the same ones."""
    little(1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, count, prompt = little(2), 1500, [3, 1, 2]
    expected = {answer: count * p for answer, p in probabilities(model, prompt, 3).items()}
    engine = loaded(tmp_path, model, tokens=2, max_requests=50, max_batched_tokens=400).core
    answers = Answers(engine)
    for seed in range(count):
        answers.ask(str(seed), prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=3, ignore_eos=True))
    answers.run()
    stats = engine.scheduler.stats
    assert 0.1 < stats.accepted_tokens / stats.draft_tokens < 0.95
    found = Counter(map(tuple, answers.tokens.values()))
    often = {answer: one for answer, one in expected.items() if one >= 5}  # the rest counts as one answer
    cells = [(found[answer], one) for answer, one in often.items()]
    rest = count - sum(seen for seen, _one in cells), count - sum(one for _seen, one in cells)
    statistic = sum((seen - one) ** 2 / one for seen, one in (*cells, rest))
    freedom = len(cells)
    # The Wilson-Hilferty approximation of the point that one in 10,000 samples exceeds.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_the_drafts_keys_and_values_count_in_the_memory_budget(folder: Path) -> None:
    without, beside = loaded(folder, tokens=0, max_requests=64), loaded(folder, max_requests=64)
    assert without.num_blocks - 1 == (1 << 20) // 1024
    assert beside.num_blocks - 1 == (1 << 20) // 2048
    names = [name for name, _shape in beside.runner.pages.shapes]
    assert names == [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")] + [
        f"draft.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")
    ]


def test_answers_go_on_without_drafts_when_the_draft_model_fails(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = loaded(folder).core
    answers = Answers(engine)
    (prompt,) = prompts([10])
    answers.ask("a", prompt, LONG)
    for _ in range(3):
        answers.step()
    draft = engine.executor._runner._drafts._proposer.model  # type: ignore[attr-defined]
    draft.forward = lambda *arguments: 1 / 0
    answers.run()
    check(answers, "llama", {"a": prompt})
    assert "the draft model has failed, and makes no more drafts" in caplog.text


def test_a_draft_model_that_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["another"])
    tiny_model("llama").save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"its vocabulary of 260 tokens is not the stage's of 259: .*'another'"
    ):
        loaded(tmp_path)
    tiny_model("lfm2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="a lfm2 model keeps state beside attention, which wrong guesses"):
        loaded(tmp_path)
    with pytest.raises(ConfigurationError, match="a lfm2 model keeps state beside attention, which rejected tokens"):
        loaded(folder, tiny_model("lfm2"))


def test_the_drafts_keys_and_values_come_with_a_prompt_from_prefill(folder: Path) -> None:
    """They are in the blocks that cross: guesses about the answer are right from its first token on."""
    decode, prefill = (loaded(folder).core for _ in range(2))
    pair = Pair(cores=(decode, prefill))
    (prompt,) = prompts([41])
    pair.d.ask("r", prompt, LONG)
    pair.run()
    stats = decode.scheduler.stats
    assert pair.d.tokens["r"] == alone("llama", prompt, 40)
    assert stats.received_tokens == 40 and stats.accepted_tokens == stats.draft_tokens > 20
    assert pair.leaked == [0, 0]
    pair.close()


def test_the_drafts_keys_and_values_are_kept_in_a_folder_of_blocks(folder: Path, tmp_path: Path) -> None:
    (prompt,) = prompts([41])
    for received in (0, 40):
        stored = Stored(tmp_path / "kv", engine=loaded(folder, prefix_caching=True).core)
        stored.ask("r", prompt, LONG)
        stored.run()
        stats = stored.engine.scheduler.stats
        assert stored.tokens["r"] == alone("llama", prompt, 40)
        assert stats.received_tokens == received and stats.accepted_tokens == stats.draft_tokens > 20
        stored.engine.shutdown()


def test_two_ranks_take_the_draft_model_s_tokens_and_answer_as_one_does(folder: Path) -> None:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    with ranked("llama", 2, speculative_config=config) as core:
        answers = Answers(core)
        found = asked(answers, [3, 17, 40, 9])
        assert core.scheduler.stats.accepted_tokens > 0
    assert answers.tokens == {name: alone("llama", prompt, 40) for name, prompt in found.items()}

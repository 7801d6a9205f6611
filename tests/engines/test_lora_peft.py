"""Adapters that peft itself has saved give the tokens and log probabilities of the weights that it merges."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError
from tests.engines.generation_kit import GREEDY, Answers, alone_with, tiny_model
from tests.engines.rank_threads import ranked

peft: Any = pytest.importorskip("peft")

PROMPT = [8, 200, 31, 7, 7, 90, 120, 4, 66, 151, 2, 9]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 9, "target_modules": "all-linear"},
    "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"q_proj": 6},
        "alpha_pattern": {"layers.1.mlp.up_proj": 11},
    },
}


def saved(folder: Path, kind: str, config: dict[str, Any]) -> Any:
    """An adapter of the tiny model with random weights. Returns: the model that peft merges."""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about layers of other models
        model = peft.get_peft_model(tiny_model(kind), peft.LoraConfig(task_type="CAUSAL_LM", **config))
        for name, one in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(one, std=0.3)
        model.save_pretrained(folder)
        return model.merge_and_unload().eval()


@pytest.mark.parametrize("config", CONFIGS)
def test_an_adapter_of_peft_gives_the_answers_of_its_merged_weights(config: str, tmp_path: Path) -> None:
    merged = saved(tmp_path, "llama", CONFIGS[config])
    with ranked("llama", 1, lora_modules={"one": str(tmp_path)}) as engine:
        answers = Answers(engine)
        answers.ask("tokens", PROMPT, adapter="one")
        answers.ask("logprobs", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), adapter="one")
        outputs = [one for _turn in range(30) for one in answers.step()]
    assert answers.tokens["tokens"] == alone_with(merged, PROMPT, GREEDY.max_tokens)
    (given,) = [one.prompt_logprobs for one in outputs if one.prompt_logprobs]
    with torch.inference_mode():
        logits = merged(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(PROMPT[1:])]
    assert [one.logprob for one in given] == pytest.approx(expected, abs=1e-3)


def test_a_linear_layer_the_other_way_round_takes_an_adapter_of_peft(tmp_path: Path) -> None:
    merged = saved(tmp_path, "gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True})
    with ranked("gpt2", 1, lora_modules={"one": str(tmp_path)}) as engine:
        answers = Answers(engine)
        answers.ask("tokens", PROMPT, adapter="one")
        answers.run()
    assert answers.tokens["tokens"] == alone_with(merged, PROMPT, GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, r"modules_to_save=\['lm_head'\]"),
        ({"target_modules": ["lm_head"]}, r"base_model\.model\.lm_head\."),
        ({"target_modules": ["embed_tokens"]}, "it is of an embedding"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "bias='lora_only'"),
    ],
)
def test_an_adapter_of_peft_that_is_more_than_a_sum_is_refused_by_name(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    saved(tmp_path, "llama", {"r": 4, **config})
    with pytest.raises(ConfigurationError, match=problem):
        ranked("llama", 1, lora_modules={"one": str(tmp_path)}).__enter__()

"""Checkpoints of adapters that are refused, each with the file and the place in it; and those that are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stage_runtime.engines.autoregressive.lora import checkpoints, sites
from stage_runtime.engines.autoregressive.model.adapted import AdapterRefused
from tests.engines.generation_kit import tiny_model
from tests.engines.lora_kit import adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES = sites.shapes_of(tiny_model("llama"))


def read(folder: str, most_rank: int = 8) -> checkpoints.Checkpoint:
    return checkpoints.read(folder, SHAPES, most_rank)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type: expected LORA, got 'IA3'"),
        ({"use_dora": True}, "adapter_config.json: use_dora=True: DoRA scales the rows"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: modules of its own would replace"),
        ({"bias": "all"}, "bias='all': biases are not adapted"),
        ({"lora_bias": True}, "lora_bias=True: biases of lora_B are not computed"),
        ({"target_parameters": ["experts.up"]}, "target_parameters=['experts.up']: parameters that are not linear"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=[5]: an adapter counts for a whole request"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': it belongs to changed weights"),
        ({"use_newest": {"a": 1}}, "use_newest={'a': 1}: this engine does not know the setting"),
        ({"r": 9}, "r: expected a rank of 1 to 8 (max_lora_rank), got 9"),
        ({"rank_pattern": {"q_proj": 64}}, "rank_pattern['q_proj']: expected a rank of 1 to 8"),
        ({"rank_pattern": {"q_proj": 5}}, f"{Q[17:]}.lora_A.weight: expected [5, 32] of rank 5, got [4, 32]"),
        ({"alpha_pattern": {"(": 1.0}}, "alpha_pattern['(']: it is not a regular expression"),
        ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern['(a+)+b']: expected a simpler regular expression"),
        ({"rank_pattern": {".*.*.*.*b": 4}}, "expected a simpler regular expression"),
        ({"alpha_pattern": {"a" * 257: 1.0}}, "expected a simpler regular expression"),
        ({"r": "four"}, "adapter_config.json: Expected `int`, got `str` - at `$.r`"),
        ({"lora_alpha": None}, "Expected `float`, got `null` - at `$.lora_alpha`"),
    ],
)
def test_a_setting_that_is_not_computed_as_peft_does_is_refused_by_name(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused) as refused:
        read(adapter(tmp_path, **config))
    assert str(tmp_path) in str(refused.value) and problem in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (f"{Q}.lora_A.weight", torch.zeros(3, 32), "lora_A.weight: expected [4, 32] of rank 4, got [3, 32]"),
        (f"{Q}.lora_B.weight", torch.zeros(32, 5), "lora_B.weight: expected [32, 4] of rank 4, got [32, 5]"),
        (f"{Q}.lora_B.weight", torch.zeros(4), "lora_B.weight: expected [32, 4] of rank 4, got [4]"),
        (f"{Q}.lora_B.weight", None, "model.layers.0.self_attn.q_proj.lora_B.weight is missing"),
        (f"{Q}.lora_B.weight", torch.zeros(32, 4, dtype=torch.int8), "expected float32, bfloat16 or float16, got int8"),
        (f"{Q}.lora_B.weight", torch.full((32, 4), math.nan), "not all of its numbers are finite"),
        (f"{Q}.lora_magnitude_vector", torch.zeros(32), "q_proj.lora_magnitude_vector: it is DoRA's"),
        ("base_model.model.lm_head.weight", torch.zeros(3, 3), "base_model.model.lm_head.weight: it is not of lora_A"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 9), "it is of an embedding"),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 32), "the model has no linear layer lm_head that"),
        (
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
            torch.zeros(4, 32),
            "no linear layer model.layers.7.self_attn.q_proj that takes adapters; it has down_proj, gate_proj, k_proj",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_its_name(
    name: str, tensor: torch.Tensor | None, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused) as refused:
        read(adapter(tmp_path, tensors={name: tensor}))
    assert str(tmp_path / "adapter_model.safetensors") in str(refused.value) and problem in str(refused.value)


def test_pickled_missing_large_and_broken_files_are_refused(tmp_path: Path) -> None:
    folder = Path(adapter(tmp_path))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    with pytest.raises(AdapterRefused, match="nowhere: this folder does not exist"):
        read(str(tmp_path / "nowhere"))
    whole = weights.read_bytes()
    for broken in (b"", b"x" * 100, whole[:-1], whole + b"x"):
        weights.write_bytes(broken)
        with pytest.raises(AdapterRefused, match="it is not a safetensors file"):
            read(str(folder))
    with weights.open("wb") as file:
        file.truncate((16 << 20) + (1 << 20))
    with pytest.raises(AdapterRefused, match=r"adapter_model\.safetensors: more than the \d+ bytes that an adapter"):
        read(str(folder))
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match=r"adapter_model\.bin: pickled weights are not read"):
        read(str(folder))
    for text in ("", "[]", "{", '{"peft_type": NaN}'):
        config.write_text(text)
        with pytest.raises(AdapterRefused, match=r"adapter_config\.json: "):
            read(str(folder))
    config.unlink()
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json: FileNotFoundError"):
        read(str(folder))


def test_ranks_and_scales_are_those_of_the_patterns_and_of_rslora(tmp_path: Path) -> None:
    wide = {f"{Q}.lora_A.weight": torch.ones(8, 32), f"{Q}.lora_B.weight": torch.ones(32, 8)}
    patterns: dict[str, Any] = {"rank_pattern": {r"layers\.0\..*q_proj": 8}, "alpha_pattern": {"k_proj": 3}}
    plain = read(adapter(tmp_path / "1", tensors=wide, lora_alpha=2, **patterns)).factors
    assert [plain[f"model.layers.0.self_attn.{one}_proj"].scale for one in "qkv"] == [0.25, 0.75, 0.5]
    assert plain["model.layers.1.self_attn.q_proj"].scale == 0.5
    root = read(adapter(tmp_path / "2", tensors=wide, lora_alpha=2, use_rslora=True, **patterns)).factors
    assert root["model.layers.0.self_attn.q_proj"].scale == 2 / math.sqrt(8)


def test_a_digest_is_of_both_files(tmp_path: Path) -> None:
    first = read(adapter(tmp_path / "1")).digest
    assert read(adapter(tmp_path / "2")).digest == first
    assert read(adapter(tmp_path / "3", seed=2)).digest != first
    config = tmp_path / "2" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 9}))
    assert read(str(tmp_path / "2")).digest != first

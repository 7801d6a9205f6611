"""Adapters of the tiny models, made in code as peft saves them, and models with such weights merged by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engines.generation_kit import tiny_model

#: The linear layers of attention and of the feed-forward network, by the last part of their paths.
TARGETS = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",  # llama and many others
    "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2",  # gpt_neox, phi
    "c_attn", "c_proj", "c_fc",  # gpt2
}  # fmt: skip


def layers_of(model: Any, targets: set[str] = TARGETS) -> dict[str, tuple[int, int]]:
    """Inputs and outputs by path."""
    found = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets and hasattr(module, "weight") and module.weight.ndim == 2:
            outputs, inputs = module.weight.shape
            found[path] = (outputs, inputs) if type(module).__name__ == "Conv1D" else (inputs, outputs)
    return found


def adapter(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 1,
    rank: int = 4,
    targets: set[str] = TARGETS,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> str:
    """Write one. tensors: in place of, or beside, those that it has; None: without it. config: as of peft."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for path, (inputs, outputs) in layers_of(tiny_model(kind), targets).items():
        sides = {"A": (rank, inputs), "B": (outputs, rank)}
        for side, shape in sides.items():
            name = f"base_model.model.{path}.lora_{side}.weight"
            made[name] = (torch.randn(*shape, generator=draw) * 0.3).to(dtype)
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del made[name]
        else:
            made[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return str(folder)


def merged(kind: str, folder: str) -> Any:
    """The tiny model, with ``W + scale * B A`` in place of ``W``."""
    model = tiny_model(kind)
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    found = load_file(Path(folder) / "adapter_model.safetensors")
    for name, a in found.items():
        path, marker, _rest = name.removeprefix("base_model.model.").partition(".lora_A")
        if not marker:
            continue
        b = found[name.replace("lora_A", "lora_B")]
        module = model.get_submodule(path)
        change = scale * (b.float() @ a.float())
        with torch.no_grad():
            module.weight += change.T if type(module).__name__ == "Conv1D" else change
    return model

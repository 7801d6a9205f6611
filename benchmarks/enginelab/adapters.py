"""Two adapters of a checkpoint with random weights, for all linear layers of its decoder, as peft saves them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Final

import torch

from stage_runtime.engines.autoregressive.lora import sites
from stage_runtime.engines.autoregressive.model import models

RANK: Final = 16
NAMES: Final = ("one", "two")


@functools.cache
def made(checkpoint: str) -> dict[str, str]:
    """Folders by name, in the temporary folder."""
    from safetensors.torch import save_file

    shapes = sites.shapes_of(models.load_plain(checkpoint))
    found = {}
    for seed, name in enumerate(NAMES):
        draw = torch.Generator().manual_seed(seed)
        folder = Path(tempfile.mkdtemp(prefix=f"adapter-{name}-"))
        tensors = {}
        for path, (inputs, outputs) in shapes.items():
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                weight = torch.randn(*shape, generator=draw) * 0.05
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = weight
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found

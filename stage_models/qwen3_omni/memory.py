"""The memory that each stage of a Qwen3-Omni checkpoint takes, from its config alone.

``python -m stage_models.qwen3_omni.memory [MODEL]`` prints it as a table. Weights are counted on torch's meta device:
none is read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from stage_models.qwen3_omni import checkpoint

BYTES = 2  # bfloat16


def table(model: str) -> list[tuple[str, int, int]]:
    """Each part's name, its parameters, and the bytes of keys and values of one token in bfloat16."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    whole = checkpoint.config_of(model)
    found = []
    for name, part in checkpoint.PARTS.items():
        config = whole
        for field in part.config:
            config = getattr(config, field)
        with torch.device("meta"):
            made = getattr(modeling, part.kind)._from_config(config)
        count = sum(one.numel() for one in made.parameters())
        if name == "thinker":  # its head is a part of its own
            count += config.vocab_size * config.hidden_size
        found.append((name, count, _cache_bytes(config) if name in ("thinker", "talker") else 0))
    return found


def _cache_bytes(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * text.num_key_value_heads * size * BYTES)


def main(model: str) -> None:
    print("| stage | parameters | weights in bfloat16 | keys and values of a token |\n|---|---:|---:|---:|")
    for name, count, cache in table(model):
        kept = f"{cache / 1024:.1f} KiB" if cache else ""
        print(f"| `{name}` | {count:,} | {count * BYTES / 2**30:,.3f} GiB | {kept} |")


if __name__ == "__main__":
    main(checkpoint.folder_of(sys.argv[1] if len(sys.argv) > 1 else None))

"""The positions of a model's tokens: how many there are, on how many axes, and by which factors LongRoPE turns them.

Called by `models` and `loading.loader`.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import Any, Final

log = logging.getLogger(__name__)

MROPE_AXES: Final = 3


def positions_of(text_config: Any) -> int:
    """How long a request can be. Tokens of one chunk of chunked attention see each other, and no others."""
    longest = int(getattr(text_config, "max_position_embeddings", 1 << 20) or 1 << 20)
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        return min(longest, int(text_config.attention_chunk_size))
    return longest


def axes_of(text_config: Any) -> int:
    """The axes of a position: three with Qwen2-VL's multimodal rotary embedding and those after it."""
    found = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    return MROPE_AXES if "mrope_section" in found else 1


def settle_long_rope(model: Any, longest: int) -> str:
    """Use one set of factors of LongRoPE for all requests: that for texts of ``longest`` tokens, as vLLM does.

    transformers chooses the set in each pass by the largest position in it: a request's tokens would depend on the
    others of its steps, and its cached keys on its length.

    Returns: a digest of the factors: keys of other ones are another engine's. Empty: the model has none.
    """
    digest = blake2b(digest_size=8)
    settled = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                digest.update(_settle(module, layer_type, longest).cpu().float().numpy().tobytes())
                settled = True
    return digest.hexdigest() if settled else ""


def _settle(module: Any, layer_type: str | None, longest: int) -> Any:
    """Gives a rotary embedding the same factors for all lengths: its forward pass chooses between equal sets.

    Returns: the factors.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made: Any = ROPE_INIT_FUNCTIONS["longrope"]
    options: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    device = getattr(module, f"{prefix}inv_freq").device
    factors, _scaling = made(module.config, device, seq_len=longest, **options)
    for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):
        setattr(module, prefix + name, factors.clone())
    log.info("rotary embedding: the factors for texts of %d tokens serve all requests", longest)
    return factors

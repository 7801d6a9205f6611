"""A checkpoint of transformers as a GGUF file, which is what openvino-genai reads. Only what its reader computes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stage_runtime.engines.autoregressive.model import models
from stage_runtime.errors import ConfigurationError

#: Architectures of transformers, and what GGUF calls them.
ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_WHOLE: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYERS: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
F16: Final = 1  # of general.file_type


def name_of(tensor: str) -> str:
    """GGUF's name of a tensor of transformers. Raises: ConfigurationError: it has no name there."""
    if tensor in _WHOLE:
        return _WHOLE[tensor]
    if (found := _LAYER.fullmatch(tensor)) is not None and found[2] in _LAYERS:
        return f"blk.{found[1]}.{_LAYERS[found[2]]}.{found[3]}"
    raise ConfigurationError(f"the engine openvino cannot read the tensor {tensor} of this model")


def check(config: Any) -> str:
    """The architecture, in GGUF's word. Raises: ConfigurationError: openvino-genai would compute something else."""
    architecture = ARCHITECTURES.get(config.model_type)
    problem = None
    if architecture is None:
        problem = f"models of type {config.model_type!r}"
    elif getattr(config, "hidden_act", "silu") != "silu":
        problem = f"the activation {config.hidden_act!r}"
    elif _rope(config).get("rope_type", "default") != "default":
        problem = f"the rotary embedding {_rope(config)['rope_type']!r}"
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        problem = "a sliding window"
    if problem is not None:
        raise ConfigurationError(
            f"the engine openvino does not take {problem} from a checkpoint of transformers: "
            f"{', '.join(ARCHITECTURES)} in their plain forms; others as a folder that optimum-intel has exported"
        )
    return str(architecture)


def _rope(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def write(checkpoint: str, target: Path, *, revision: str | None = None) -> None:
    """Write the model of a folder, or of a name at the model hub, in F16. Its tokenizer is left out: ids go in and out.

    Raises: ConfigurationError: the package gguf is missing, or openvino-genai could not read the model.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigurationError(
            f"engine='openvino' needs the package gguf ({error}): pip install 'omnipipeline[openvino]'"
        ) from error
    model = models.load_plain(checkpoint, revision=revision)
    config = model.config
    architecture = check(config)
    writer = gguf.GGUFWriter(str(target), architecture)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 0.0)) or float(config.rope_theta))
    writer.add_file_type(F16)
    tied = bool(config.tie_word_embeddings)
    for tensor, value in model.state_dict().items():
        if tied and tensor == "lm_head.weight":
            continue
        name, array = name_of(tensor), value.float().numpy()
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            array = _interleaved(array, heads if ".attn_q." in name else kv_heads)
        writer.add_tensor(name, array if array.ndim == 1 else array.astype("float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(array: Any, heads: int) -> Any:
    """Rows of a head as llama.cpp rotates them: pairs of neighbours, where transformers has two halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)

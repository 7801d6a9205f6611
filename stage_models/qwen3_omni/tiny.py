"""A tiny Qwen3-Omni checkpoint with random weights, made in code: the whole pipeline runs without a download.

Weights are scaled by fan-in: with those of a config's own initialisation, greedy answers repeat one token and the wave
is silent, which would prove nothing. The sound is noise by design. Called by `checkpoint.folder_of` and by tests.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
#: Roles are one token each, as in the real vocabulary: the talker finds the parts of a prompt by them.
WORDS: Final = ("user", "assistant", "system", "the", " the", " and", " a", " of", " to", " in")
CHAT_TEMPLATE: Final = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'audio' -%}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- elif c.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif c.type == 'text' -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
HIDDEN: Final = 64
LAYERS: Final = 3
EXPERTS: Final = 4
CODEBOOK: Final = 64
GROUPS: Final = 4  #: Codes of a frame.
ROPE_THETA: Final = 1e6
CONTROL: Final = 1024  #: The talker's last ids are control tokens, of which only the end may be chosen.
SHARD: Final = "400KB"  # several files, as a real checkpoint has


def make(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint to ``folder`` unless it is there. Any number of processes may call this at once."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(made, seed)
        os.replace(made, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _write(folder: Path, seed: int) -> None:
    tokenizer = _tokenizer()
    config = _config(tokenizer)
    _model(config, seed).save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    both = {**_feature_extractor().to_dict(), **_image_processor().to_dict()}  # one file, as in published checkpoints
    (folder / "preprocessor_config.json").write_text(json.dumps(both, indent=2, default=str))


def _tokenizer() -> Any:
    """All bytes, and a few merges: any text can be written with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    trained: Any = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
    )
    trained.train_from_iterator(WORDS * 50, trainer=trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in model["merges"]]
    named = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    tokenizer: Any = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        extra_special_tokens=named,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def _config(tokenizer: Any) -> Any:
    from transformers import Qwen3OmniMoeConfig

    id_of = tokenizer.convert_tokens_to_ids
    return Qwen3OmniMoeConfig(
        thinker_config=_thinker(tokenizer),
        talker_config=_talker(tokenizer),
        code2wav_config=_code2wav(),
        enable_audio_output=True,
        im_start_token_id=id_of("<|im_start|>"),
        im_end_token_id=id_of("<|im_end|>"),
        tts_pad_token_id=id_of("<tts_pad>"),
        tts_bos_token_id=id_of("<tts_text_bos>"),
        tts_eos_token_id=id_of("<tts_text_eod>"),
        system_token_id=id_of("system"),
        user_token_id=id_of("user"),
        assistant_token_id=id_of("assistant"),
    )


def _thinker(tokenizer: Any) -> dict[str, Any]:
    id_of = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        **_decoder(LAYERS, intermediate=128),
        **_experts(),
        "pad_token_id": id_of("<|endoftext|>"),
        "max_position_embeddings": 32768,
    }
    return {
        "audio_config": _audio_encoder(),
        "vision_config": _vision_encoder(),
        "text_config": text,
        **_media(tokenizer),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "audio_end_token_id": id_of("<|audio_end|>"),
        "user_token_id": id_of("user"),
    }


def _audio_encoder() -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "d_model": HIDDEN,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": HIDDEN,
        "downsample_hidden_size": 32,
        "max_source_positions": 1500,
    }


def _vision_encoder() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }


def _talker(tokenizer: Any) -> dict[str, Any]:
    text = {
        "vocab_size": CODEBOOK + CONTROL,
        **_decoder(2, intermediate=64),
        **_experts(),
        "shared_expert_intermediate_size": 32,
    }
    predictor = {
        "vocab_size": CODEBOOK,
        **_decoder(2, intermediate=64),
        "num_code_groups": GROUPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }
    return {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": GROUPS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK,
        "codec_bos_id": CODEBOOK + 1,
        "codec_eos_token_id": CODEBOOK + 2,
        "codec_nothink_id": CODEBOOK + 3,
        "codec_think_bos_id": CODEBOOK + 4,
        "codec_think_eos_id": CODEBOOK + 5,
        "speaker_id": {"ethan": CODEBOOK + 6, "chelsie": CODEBOOK + 7},
        **_media(tokenizer),
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODEBOOK,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_quantizers": GROUPS,
        "sliding_window": 72,
        "decoder_dim": 64,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def _decoder(layers: int, *, intermediate: int) -> dict[str, Any]:
    """The sizes that the thinker's, the talker's and the code predictor's decoders have alike."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }


def _experts() -> dict[str, Any]:
    """The experts of the thinker's and the talker's decoder layers, and the positions of text, picture and sound."""
    return {
        "moe_intermediate_size": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "mrope_section": [4, 2, 2],
            "interleaved": True,
            "mrope_interleaved": True,
        },
    }


def _media(tokenizer: Any) -> dict[str, int]:
    """The tokens by which the thinker and the talker find pictures and sound in a prompt."""
    id_of = tokenizer.convert_tokens_to_ids
    return {
        "audio_token_id": id_of("<|audio_pad|>"),
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "audio_start_token_id": id_of("<|audio_start|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "position_id_per_seconds": 13,
    }


def _model(config: Any, seed: int) -> Any:
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(seed)
    model: Any = Qwen3OmniMoeForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if name.startswith("code2wav") and "layer_scale" in name:
            weights.data.fill_(0.5)
        elif weights.ndim >= 2:
            weights.data.normal_(0, _deviation(name, weights), generator=generator)
    return model


def _deviation(name: str, weights: Any) -> float:
    if "embed" in name:
        return 1.0
    if "conv" in name and weights.ndim >= 3:
        fan_in = weights[0].numel() ** -0.5
    else:
        fan_in = 2.0 * weights.shape[-1] ** -0.5
    return float(fan_in * (0.8 if name.startswith("code2wav") and weights.ndim == 3 else 1.0))


def _image_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    cell = 32 * 32  # pixels of one row of the thinker's prompt: a patch of 16 x 16, four of them merged
    sides = {"shortest_edge": 4 * cell, "longest_edge": 64 * cell}
    return Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size=sides)


def _feature_extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=128, sampling_rate=16_000, hop_length=160, n_fft=400, chunk_length=30)

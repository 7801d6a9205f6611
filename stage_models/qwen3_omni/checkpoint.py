"""Parts of a Qwen3-Omni checkpoint: each stage loads its own modules, and a missing weight is an error that names it.

This module says which classes of transformers are the parts, and under which names their weights stand in a published
checkpoint (Qwen/Qwen3-Omni-30B-A3B-Instruct). Called by the factories in `stages`. transformers is imported when a part
is loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from stage_models.qwen3_omni import tiny
from stage_runtime.errors import ConfigurationError

TINY: Final = "tiny"  #: The name of the checkpoint that is made in code.


class Part(NamedTuple):
    """kind: a class of transformers' module. prefix: of its weights. config: path of its config in the whole one."""

    kind: str
    prefix: str
    config: tuple[str, ...]


PARTS: Final = {
    "image_encoder": Part("Qwen3OmniMoeVisionEncoder", "thinker.visual.", ("thinker_config", "vision_config")),
    "audio_encoder": Part("Qwen3OmniMoeAudioEncoder", "thinker.audio_tower.", ("thinker_config", "audio_config")),
    "thinker": Part("Qwen3OmniMoeThinkerTextModel", "thinker.model.", ("thinker_config", "text_config")),
    "talker": Part("Qwen3OmniMoeTalkerForConditionalGeneration", "talker.", ("talker_config",)),
    "code2wav": Part("Qwen3OmniMoeCode2Wav", "code2wav.", ("code2wav_config",)),
}


def folder_of(model: str | None) -> str:
    """A folder or a name at the model hub. None or `TINY`: the tiny checkpoint, made at the first call."""
    if model is not None and model != TINY:
        return model
    cache = os.environ.get("OMNI_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(tiny.make(Path(cache).expanduser() / "omnipipeline" / "qwen3-omni-tiny-1"))


@lru_cache(maxsize=4)
def config_of(model: str, revision: str | None = None) -> Any:
    """The whole checkpoint's config. Raises: ConfigurationError: it is not one of Qwen3-Omni."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model, revision=revision)
    if config.model_type != "qwen3_omni_moe":
        raise ConfigurationError(f"{model}: expected a checkpoint of qwen3_omni_moe, got {config.model_type}")
    return config


#: Fields of transformers' generation config, by the names of `omni.Autoregressive.params`.
_GENERATION: Final = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
}


def generation_of(model: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """The checkpoint's ``generation_config.json`` for ``thinker`` or ``talker``, as defaults of sampling."""
    file = _file(model, "generation_config.json", revision)
    given = {} if file is None else json.loads(file.read_text())
    found = {
        own: given[f"{name}_{their}"] for their, own in _GENERATION.items() if given.get(f"{name}_{their}") is not None
    }
    if given.get(f"{name}_do_sample") is False:
        found["temperature"] = 0
    return found


def load(model: str, name: str, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None) -> Any:
    """One of `PARTS`, in evaluation mode. Raises: ConfigurationError: a weight is missing; names it."""
    import torch
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    # transformers 5.23 joins the experts of the whole model only; loaded alone, the talker's would stay random.
    experts = get_checkpoint_conversion_mapping("qwen2_moe")
    for kind in ("qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker_text"):
        register_checkpoint_conversion_mapping(kind, experts, overwrite=True)
    part = PARTS[name]
    config = config_of(model, revision)
    for field in part.config:
        config = getattr(config, field)
    try:
        with _quiet():
            loaded, report = getattr(modeling, part.kind).from_pretrained(
                model,
                config=config,
                key_mapping={rf"^{part.prefix}".replace(".", r"\."): ""},
                dtype=getattr(torch, dtype),
                revision=revision,
                output_loading_info=True,
            )
    except RuntimeError as error:  # experts of which some are missing cannot be joined
        wrong = _gaps([one for one in _names(model, revision) if one.startswith(part.prefix)])
        raise _missing(model, name, wrong or [str(error)]) from error
    wrong = sorted(report["missing_keys"]) or sorted(str(one) for one in report["mismatched_keys"])
    if wrong:
        raise _missing(model, name, [part.prefix + str(one) for one in wrong])
    return loaded.eval().to(device)


def _missing(model: str, part: str, names: Sequence[str]) -> ConfigurationError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ConfigurationError(
        f"{model}: weights of {part} are missing or of another shape: {', '.join(names[:3])}{more}"
    )


def _gaps(names: Sequence[str]) -> list[str]:
    """Names that are missing between numbered ones: of layers and experts."""
    families: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        parts = name.split(".")
        pattern = tuple("#" if one.isdigit() else one for one in parts)
        families.setdefault(pattern, set()).add(tuple(int(one) for one in parts if one.isdigit()))
    found = []
    for pattern, numbers in families.items():
        axes = [sorted({one[axis] for one in numbers}) for axis in range(pattern.count("#"))]
        for one in sorted(set(itertools.product(*axes)) - numbers):
            left = iter(one)
            found.append(".".join(str(next(left)) if word == "#" else word for word in pattern))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers, which warns of the weights of all other parts."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def tensor(model: str, name: str, *, dtype: str = "float32", revision: str | None = None) -> Any:
    """One weight by its full name. Raises: ConfigurationError: the checkpoint has none of this name."""
    import torch

    with _shard(model, name, revision) as weights:
        return weights.get_tensor(name).to(getattr(torch, dtype))


def rows(model: str, name: str, wanted: list[int], *, dtype: str = "float32", revision: str | None = None) -> Any:
    """Some rows of one weight, ``[wanted, …]``; the others are not read. Raises: as `tensor`."""
    import torch

    with _shard(model, name, revision) as weights:
        found = weights.get_slice(name)
        return torch.cat([found[row : row + 1] for row in wanted]).to(getattr(torch, dtype))


def _names(model: str, revision: str | None) -> list[str]:
    """The names of all weights of a checkpoint in several files."""
    index = _file(model, "model.safetensors.index.json", revision)
    return [] if index is None else list(json.loads(index.read_text())["weight_map"])


def _shard(model: str, name: str, revision: str | None) -> Any:
    """The open file that has the weight ``name``."""
    from safetensors import safe_open

    index = _file(model, "model.safetensors.index.json", revision)
    shard = "model.safetensors" if index is None else json.loads(index.read_text())["weight_map"].get(name)
    path = None if shard is None else _file(model, shard, revision)
    opened: Any = None if path is None else safe_open(path, framework="pt")
    if opened is None or name not in list(opened.keys()):
        raise ConfigurationError(f"{model}: the weight {name} is missing")
    return opened


def _file(model: str, name: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)

"""Reads a peft checkpoint of a LoRA adapter: adapter_config.json and adapter_model.safetensors. Nothing is unpickled.

Settings that the engine would not compute as peft does are refused by name, also settings that a later peft may
have.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.model.adapted import AdapterRefused
from stage_runtime.errors import NO_FOLDER, describe

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PICKLED: Final = "adapter_model.bin"
PREFIX: Final = "base_model.model."
MOST_CONFIG: Final = 1 << 20
HEADER: Final = 16 << 20  # of a safetensors file, beside its tensors
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

#: Settings of peft that mean nothing for an answer, or are read here.
KNOWN: Final = frozenset(
    {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
     "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
     "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
     "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
     "runtime_config", "target_modules", "task_type", "use_rslora"}
)  # fmt: skip
#: Settings that change what is computed, and why they are refused.
REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA scales the rows of whole weights, which is not a sum beside them",
    "modules_to_save": "modules of its own would replace those of the model",
    "lora_bias": "biases of lora_B are not computed",
    "layer_replication": "layers are not repeated",
    "target_parameters": "parameters that are not linear layers are not adapted",
    "trainable_token_indices": "rows of the embedding are not replaced",
    "alora_invocation_tokens": "an adapter counts for a whole request, not from some tokens on",
    "arrow_config": "adapters are not mixed",
    "use_qalora": "QALoRA's pooled inputs are not computed",
}
#: Ways to begin that change the model's own weights, which such a checkpoint does not have.
CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Bounds of a key of rank_pattern or alpha_pattern, so that it is matched in a moment: characters, repetitions.
MOST_KEY: Final = 256
MOST_REPEATS: Final = 3
_TENSOR: Final = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")


class Factors(NamedTuple):
    """The output of a linear layer becomes ``x W + scale * x a b``. a: ``[rank, inputs]``. b: ``[outputs, rank]``."""

    a: Tensor
    b: Tensor
    scale: float


class Checkpoint(NamedTuple):
    """factors: by the path of the linear layer in the model. digest: of both files."""

    factors: dict[str, Factors]
    digest: bytes


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of peft that count here."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str | None = True


def read(folder: str, shapes: Mapping[str, tuple[int, int]], most_rank: int) -> Checkpoint:
    """shapes: inputs and outputs of each linear layer that takes adapters, by its path. most_rank: of a layer.

    Raises: AdapterRefused.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise AdapterRefused(f"{folder}: {NO_FOLDER}")
    config_bytes = _bytes_of(root / CONFIG, MOST_CONFIG)
    config = _config(root / CONFIG, config_bytes, most_rank)
    if not (root / WEIGHTS).exists() and (root / PICKLED).exists():
        raise AdapterRefused(f"{root / PICKLED}: pickled weights are not read: save them as {WEIGHTS}")
    largest = HEADER + 4 * most_rank * sum(inputs + outputs for inputs, outputs in shapes.values())
    weight_bytes = _bytes_of(root / WEIGHTS, largest)
    found = _factors(root / WEIGHTS, _tensors(root / WEIGHTS, weight_bytes), config, shapes)
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(weight_bytes)
    return Checkpoint(found, digest.digest())


def _bytes_of(path: Path, most: int) -> bytes:
    """Read once: what is checked is what is computed, whatever becomes of the file meanwhile."""
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise AdapterRefused(f"{path}: {describe(error)}") from error
    if len(found) > most:
        raise AdapterRefused(f"{path}: more than the {most} bytes that an adapter of this model can have")
    return found


def _config(path: Path, given: bytes, most_rank: int) -> _Config:
    try:
        raw: dict[str, Any] = msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise AdapterRefused(f"{path}: {describe(error)}") from error
    if raw.get("peft_type") != "LORA":
        raise AdapterRefused(f"{path}: peft_type: expected LORA, got {raw.get('peft_type')!r:.80}")
    for name, why in REFUSED.items():
        if raw.get(name):
            raise AdapterRefused(f"{path}: {name}={raw[name]!r:.80}: {why}")
    strange = [name for name, value in raw.items() if name not in KNOWN and name not in REFUSED and value]
    if strange:
        raise AdapterRefused(f"{path}: {strange[0]}={raw[strange[0]]!r:.80}: this engine does not know the setting")
    try:
        config = msgspec.convert(raw, _Config)
    except msgspec.ValidationError as error:
        raise AdapterRefused(f"{path}: {error}") from error
    if config.bias != "none":
        raise AdapterRefused(f"{path}: bias={config.bias!r}: biases are not adapted")
    begun = config.init_lora_weights
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_MODEL):
        how = "save it with path_initial_model_for_weight_conversion"
        raise AdapterRefused(f"{path}: init_lora_weights={begun!r}: it belongs to changed weights of the model: {how}")
    for place, rank in {"r": config.r, **_of("rank_pattern", config.rank_pattern)}.items():
        if not 1 <= rank <= most_rank:
            raise AdapterRefused(f"{path}: {place}: expected a rank of 1 to {most_rank} (max_lora_rank), got {rank}")
    for place, alpha in {"lora_alpha": config.lora_alpha, **_of("alpha_pattern", config.alpha_pattern)}.items():
        if not math.isfinite(alpha):
            raise AdapterRefused(f"{path}: {place}: expected a finite number, got {alpha}")
    for name, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key in pattern or {}:
            _check_key(path, name, key)
    return config


def _check_key(path: Path, name: str, key: str) -> None:
    """Raises: AdapterRefused: the key is not a regular expression that is matched in a moment."""
    repeats = sum(map(key.count, "*+?{"))
    if len(key) > MOST_KEY or repeats > MOST_REPEATS or re.search(r"\)[*+?{]", key):
        raise AdapterRefused(f"{path}: {name}[{key!r:.80}]: expected a simpler regular expression")
    try:
        re.compile(rf"(.*\.)?({key})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterRefused(f"{path}: {name}[{key!r:.80}]: it is not a regular expression: {error}") from error


def _of(name: str, pattern: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"{name}[{key!r:.80}]": value for key, value in (pattern or {}).items()}


def _tensors(path: Path, given: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(given)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefused(f"{path}: it is not a safetensors file that torch reads: {describe(error)}") from error


def _uncomputed(names: Iterable[str]) -> str:
    """The tensor that says most of those which are neither lora_A nor lora_B, and what it is."""
    wrong = [name for name in sorted(names) if _TENSOR.fullmatch(name.removeprefix(PREFIX)) is None]
    for part, what in (("magnitude", "DoRA's"), ("embedding", "of an embedding"), ("", "not of lora_A or B")):
        for name in wrong:
            if part in name:
                return f"{name:.200}: it is {what}"
    raise AssertionError("called without such a tensor")


def _factors(
    path: Path, tensors: Mapping[str, Tensor], config: _Config, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Factors]:
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):  # the library gives them in any order
        found = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise AdapterRefused(f"{path}: {_uncomputed(tensors)}, which is not computed")
        if tensor.dtype not in DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AdapterRefused(f"{path}: {name}: expected float32, bfloat16 or float16, got {kind}")
        if found["path"] not in shapes:
            raise AdapterRefused(f"{path}: {name:.200}: {_unknown(found['path'], shapes)}")
        sides.setdefault(found["path"], {})[found["side"]] = tensor
    if not sides:
        raise AdapterRefused(f"{path}: it has no weights")
    return {place: _pair(path, place, both, config, shapes[place]) for place, both in sides.items()}


def _unknown(place: str, shapes: Mapping[str, tuple[int, int]]) -> str:
    kinds = sorted({one.rpartition(".")[2] for one in shapes})
    return f"the model has no linear layer {place:.200} that takes adapters; it has {', '.join(kinds)}"


def _pair(path: Path, place: str, both: Mapping[str, Tensor], config: _Config, shape: tuple[int, int]) -> Factors:
    if set(both) != {"A", "B"}:
        missing = "B" if "A" in both else "A"
        raise AdapterRefused(f"{path}: {place}.lora_{missing}.weight is missing")
    rank = int(_matching(config.rank_pattern, place, config.r))
    inputs, outputs = shape
    for side, wanted in (("A", [rank, inputs]), ("B", [outputs, rank])):
        if (came := list(both[side].shape)) != wanted:
            raise AdapterRefused(f"{path}: {place}.lora_{side}.weight: expected {wanted} of rank {rank}, got {came}")
        if not bool(both[side].isfinite().all()):
            raise AdapterRefused(f"{path}: {place}.lora_{side}.weight: not all of its numbers are finite")
    alpha = float(_matching(config.alpha_pattern, place, config.lora_alpha))
    return Factors(both["A"], both["B"], alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _matching(pattern: Mapping[str, float] | None, place: str, default: float) -> float:
    """The value of the first key that matches a layer's path, as peft does it."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", place):
            return value
    return default

"""The checkpoints that the engine refuses by their config, each in one sentence that names what it is. Pure.

Called by `models` before weights are loaded, and for models at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from stage_runtime.errors import ConfigurationError

#: The ``layer_types`` of transformers that `models` and `states` compute. The last two are kinds of MLP.
COMPUTED: Final = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "conv",
        "linear_attention",
        "hybrid",
        "sparse",
        "dense",
    }
)


class UnsupportedModel(ConfigurationError):
    """A model that the engine cannot run; the message says why."""


def check_config(model: str, config: Any) -> None:
    """model: its name, for the message.

    Raises: UnsupportedModel: its weights are quantised, or a layer is of a kind that is not computed.
    """
    kind = getattr(config, "model_type", "") or type(config).__name__
    for part in _parts(config):
        if (form := _quantised(part)) is not None:
            raise UnsupportedModel(
                f"{model}: a {kind} model with weights quantised by {form}; the engine computes float weights and does "
                "not dequantise: give the checkpoint with float weights, or a stage of engine='vllm'"
            )
    text = config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - COMPUTED)
    if unknown:
        raise UnsupportedModel(f"{model}: a {kind} model, with layers of {', '.join(unknown)} that are not computed")


def _parts(config: Any) -> Iterable[Any]:
    """A config, and those of its models."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield part


def _quantised(config: Any) -> str | None:
    """The form of its weights; None: they are floats."""
    for name in ("quantization_config", "compression_config"):
        found = getattr(config, name, None)
        if found is None:
            continue
        fields = found if isinstance(found, dict) else vars(found)
        form = fields.get("quant_method")
        if form is None:
            bits = fields.get("load_in_8bit") or fields.get("load_in_4bit")
            form = "bitsandbytes" if bits else "a method that its config does not name"
        return str(getattr(form, "value", form))
    return None

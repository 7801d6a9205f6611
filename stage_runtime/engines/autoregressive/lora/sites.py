"""The places where a model takes adapters: its linear layers by their paths, and what computes each once the model is
prepared.

Paths are those of the model as transformers makes it. Ranks keep shares of layers, compiled kernels join some and pack
all: `sites_of` finds them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from torch import nn

from stage_runtime.engines.autoregressive.kernels import fusing
from stage_runtime.engines.autoregressive.model.models import PagedModel
from stage_runtime.engines.autoregressive.tensor_parallel.sharding import RowShare

EXPERTS: Final = "experts"  #: Layers of single experts see a part of the tokens.


class Site(NamedTuple):
    """The outputs ``first .. first + size`` of a module. share: what of the layer this rank has: of its outputs, of its
    inputs, or all.
    """

    module: nn.Module
    first: int
    inputs: int
    size: int
    share: Literal["outputs", "inputs", "all"]


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of the decoder, by its path. It is called before the model is changed."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    head = model.get_output_embeddings()
    found = {}
    for path, module in model.named_modules():
        if module is head or EXPERTS in path.split(".") or not _is_linear(module) or not _within(path, model, decoder):
            continue
        inputs, outputs = module.weight.shape if type(module).__name__ == "Conv1D" else reversed(module.weight.shape)
        found[path] = (int(inputs), int(outputs))
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _within(path: str, model: nn.Module, decoder: nn.Module) -> bool:
    """Whether the decoder has the module: a model that sees or hears has others, for other tokens."""
    parts = path.split(".")
    return any(model.get_submodule(".".join(parts[:count])) is decoder for count in range(len(parts) + 1))


def stateful(paged: PagedModel) -> list[str]:
    """The paths of the layers with state, which take each request alone."""
    inner = {id(layer.module) for layer in paged.state_layers}
    return [path for path, module in paged.model.named_modules() if id(module) in inner]


def without_states(shapes: Mapping[str, tuple[int, int]], layers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers that all tokens of a step pass at once: those outside of ``layers``."""
    return {path: shape for path, shape in shapes.items() if not any(path.startswith(f"{one}.") for one in layers)}


def sites_of(model: nn.Module, shapes: Mapping[str, tuple[int, int]], ranks: int = 1) -> dict[str, Site]:
    """``model``: prepared. shapes: of the layers as they were."""
    return {path: _site(_found(model, path), shape, ranks) for path, shape in shapes.items()}


class _Place(NamedTuple):
    module: nn.Module
    first: int
    size: int | None  #: None: all outputs.


def _site(place: _Place, shape: tuple[int, int], ranks: int) -> Site:
    module = place.module
    if isinstance(module, RowShare):
        return Site(module.share, place.first, shape[0] // ranks, shape[1], "inputs")
    outputs = place.size if place.size is not None else _outputs(module)
    return Site(module, place.first, shape[0], outputs, "all" if outputs == shape[1] else "outputs")


def _outputs(module: Any) -> int:
    return int(module.nf if type(module).__name__ == "Conv1D" else module.out_features)


def _found(model: nn.Module, path: str) -> _Place:
    module = model
    parts = path.split(".")
    for part in parts:
        if (joined := _joined(module, part)) is not None:
            return joined
        module = _inner(_child(module, part))
    return _Place(module, 0, None)


def _child(module: nn.Module, name: str) -> nn.Module:
    """The child as the model has it, also where a decoder's layers are one module (`kernels.decoder_layers`)."""
    if isinstance(module, nn.ModuleList) and len(module) == 1 and type(module[0]).__name__ == "DecoderLayers":
        module = module[0].layers  # type: ignore[assignment]
    return module.get_submodule(name)


def _inner(module: nn.Module) -> nn.Module:
    """The part itself, of one that torch compiles (`loading.compiling`)."""
    return module.inner if type(module).__name__ == "CompiledPart" else module  # type: ignore[return-value]


def _joined(module: nn.Module, name: str) -> _Place | None:
    """A layer whose weights are a part of a fused one's."""
    for known, size in _parts(module):
        if name in known:
            sizes = dict(zip(known, size, strict=True))
            before = list(known)[: known.index(name)]
            target = module.qkv if isinstance(module, fusing.FusedAttention) else module.gate_up
            return _Place(target, sum(sizes[one] for one in before), sizes[name])  # type: ignore[arg-type]
    if isinstance(module, fusing.FusedGatedMLP) and name == "down_proj":
        return _Place(module.down, 0, None)
    return None


def _parts(module: nn.Module) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    if isinstance(module, fusing.FusedAttention):
        heads, kv_heads = module.heads * module.dim, module.kv_heads * module.dim
        yield ("q_proj", "k_proj", "v_proj"), (heads, kv_heads, kv_heads)
    if isinstance(module, fusing.FusedGatedMLP):
        half = _outputs(module.gate_up) // 2
        yield ("gate_proj", "up_proj"), (half, half)

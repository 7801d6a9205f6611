"""All layers of a decoder as one program of compiled loops: between two of them no Python runs, and helpers stay awake.

It takes the classes that `fusing` knows, once their linear layers are `linears.TiledLinear`. A step that the loops do
not compute goes through the layers one by one, as before. It needs a CPU and numba. f32; or bf16 where the processor
multiplies it, with sums between layers in f32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stage_runtime.engines.autoregressive.kernels import fusing, linears, loops, native
from stage_runtime.engines.autoregressive.kernels.attention_pages import (
    CHUNK_WORDS,
    DECODE_WORDS,
    NO_WINDOW,
    PageAttention,
    StepPlan,
)
from stage_runtime.engines.autoregressive.model import adapted, models

CLASSES: Final = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
SUMS: Final = frozenset({"sums", "added"})  # f32 in any case


def join(model: nn.Module) -> int:
    """Put one module in the place of a decoder's layers, which computes what they do. Returns: how many it joins.

    It is called after `fusing.fuse` and `linears.pack`. Layers that are joined stay as they are.
    """
    joined = 0
    for parent in [one for one in model.modules() if not isinstance(one, DecoderLayers)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList) and _joinable(child):
                setattr(parent, name, nn.ModuleList([DecoderLayers(list(child))]))
                joined += len(child)
    return joined


def products(model: nn.Module) -> list[list[nn.Module]]:
    """The linear layers of each layer that `join` would join if all their products were `linears.TiledLinear`.

    It is called after `fusing.fuse`, before `linears.pack`.
    """
    found: list[list[nn.Module]] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList) and len(parent) > 0 and all(map(_known, parent)):
            layers = [list(_linears(layer)) for layer in parent]
            if all(type(one) is nn.Linear and linears.tiled(one.weight) for layer in layers for one in layer):
                found += layers
    return found


def _joinable(layers: nn.ModuleList) -> bool:
    """Whether the loops compute all of them, and their sizes are the same."""
    return len(layers) > 0 and all(map(_fits, layers)) and len(set(map(_sizes, layers))) == 1


def _known(layer: Any) -> bool:
    """Whether the loops compute all of it but for its products."""
    kind = type(layer)
    return (
        kind.__qualname__ in CLASSES
        and kind.__module__.startswith(fusing.OWNER)
        and isinstance(layer.self_attn, fusing.FusedAttention)
        and isinstance(layer.mlp, fusing.FusedGatedMLP)
        and isinstance(layer.input_layernorm, fusing.FusedNorm)
        and isinstance(layer.post_attention_layernorm, fusing.FusedNorm)
    )


def _fits(layer: Any) -> bool:
    if not _known(layer) or not all(
        type(one) is linears.PackedLinear and isinstance(one.product, linears.TiledLinear) for one in _linears(layer)
    ):
        return False
    norms = layer.input_layernorm, layer.post_attention_layernorm, *layer.self_attn.norms
    # Loops read each other's output by its address.
    return len({one.weight.dtype for one in norms} | {one.product.dtype for one in _linears(layer)}) == 1


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.qkv, layer.self_attn.o_proj, layer.mlp.gate_up, layer.mlp.down


def _sizes(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    sizes = [(one.product.inputs, one.product.outputs) for one in _linears(layer)]
    return (
        *sizes,
        layer.input_layernorm.weight.dtype,
        attention.heads,
        attention.kv_heads,
        attention.dim,
        len(attention.norms),
    )


class DecoderLayers(nn.Module):
    """Computes all layers of a decoder."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        #: The program of each engine that computes with this decoder, as long as its cache: several may do so at the
        #: same time.
        self.programs: weakref.WeakKeyDictionary[PageAttention, DecoderProgram] = weakref.WeakKeyDictionary()

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        backend, plan = models.current()
        apart = hidden_states.shape[0] != 1 or adapted.current() is not None or models.hooked()
        if apart or not self.computes(hidden_states.shape[1], backend, plan):
            for layer in self.layers:
                hidden_states = layer(hidden_states, **given)
            return hidden_states
        return self.run(hidden_states[0], given["position_embeddings"], backend, plan).clone()[None]

    def computes(self, rows: int, backend: Any, plan: Any) -> bool:
        """Whether `run` does a step of so many rows."""
        first: Any = self.layers[0]
        return (
            isinstance(backend, PageAttention)
            and isinstance(plan, StepPlan)
            and rows > 0
            and (plan.chunks is None or backend.computes_chunks(first.self_attn.dim))
        )

    def run(self, rows: Tensor, turns: Sequence[Tensor], backend: Any, plan: StepPlan) -> Tensor:
        """rows: ``[rows, hidden]``. turns: cosines and sines. Returns: as rows; valid until the backend's next step."""
        program = self.programs.get(backend)
        if program is None:
            program = self.programs[backend] = DecoderProgram(list(self.layers), backend)
        return program.run(rows, turns, backend, plan)


class DecoderProgram:
    """The loops of all layers, for one cache, whose pages they find by their addresses. One run at a time.

    Names of a step's words: ``sums`` are the rows as they go from layer to layer, ``normed`` those after a norm,
    ``blocks`` what `products.multiply` reads; ``qkv`` (``k`` and ``v`` within it), ``attended``, ``added``, ``gate_up``
    and ``inner`` what it and other loops write. Verbs are numbers of parts.
    """

    def __init__(self, layers: Sequence[Any], backend: PageAttention) -> None:
        self._first = layers[0]
        self._shape = backend.shape(layers[0].self_attn.layer_idx, layers[0].self_attn.heads)
        self._buffers: dict[str, Tensor] = {}
        norms = [layer.input_layernorm for layer in layers]
        self._dtype: torch.dtype = norms[0].weight.dtype
        entries = [_add(norms[0])]  # nothing is added to the first rows
        # The rows after the last layer are added, too; what a norm makes of them is not read.
        for layer, norm in zip(layers, [*norms[1:], norms[-1]], strict=True):
            entries += [*self._attention(layer.self_attn, backend), _add(layer.post_attention_layernorm)]
            entries += [*_feed_forward(layer.mlp), _add(norm)]
        self._program = native.NamedProgram(entries)

    def _attention(self, attention: fusing.FusedAttention, backend: PageAttention) -> Iterator[native.Entry]:
        shape, dim = self._shape, attention.dim
        keys, values = (one.data_ptr() for one in backend.pages(attention.layer_idx))
        stride = (attention.heads + 2 * attention.kv_heads) * dim
        yield from _multiply("qkv", attention.qkv, "normed", "qkv")
        for norm, count, begin in zip(
            attention.norms, (attention.heads, attention.kv_heads), ("qkv", "k"), strict=False
        ):
            words = begin, norm.weight.data_ptr(), begin, "rows", count, dim, stride, stride, norm.epsilon
            yield norm.loop, ("turn_heads", *words)
        turned = attention.heads + attention.kv_heads
        yield attention.loop, ("turn_heads", "qkv", "cosines", "sines", "rows", turned, dim, stride)
        sizes = (attention.kv_heads * dim, attention.kv_heads * dim)
        write = loops.write_pages(self._dtype is torch.bfloat16)
        yield write, ("write", "k", "v", keys, values, "slots", "rows", *sizes, stride)
        of_layer: tuple[native.Word, ...] = (
            "qkv",
            keys,
            values,
            "attended",
            shape.kv_heads,
            attention.window or NO_WINDOW,
        )
        of_layer += (native.bits(attention.scaling), stride, dim)
        yield backend.decode_loop(shape), _attend("decode", DECODE_WORDS, of_layer)
        if backend.computes_chunks(shape.value_dim):
            yield backend.chunk_loop(shape), _attend("chunk", CHUNK_WORDS, of_layer)
        yield from _multiply("o", attention.o_proj, "attended", "added")

    def run(self, rows: Tensor, turns: Sequence[Tensor], backend: PageAttention, plan: StepPlan) -> Tensor:
        """The same as `DecoderLayers.run`. backend: the one that the program was made for."""
        count = rows.shape[0]
        buffers = self._room(count)
        buffers["sums"][:count] = rows
        buffers["added"][:count] = 0
        cosines, sines = (one.expand(1, count, -1).contiguous() for one in turns)
        addresses = {name: one.data_ptr() for name, one in buffers.items()}
        attention = self._first.self_attn
        size = self._dtype.itemsize
        keys = addresses["qkv"] + attention.heads * attention.dim * size
        step: dict[str, int] = {
            **addresses,
            **self._parts(count),
            "k": keys,
            "v": keys + attention.kv_heads * attention.dim * size,
            "rows": count,
            "cosines": cosines.data_ptr(),
            "sines": sines.data_ptr(),
            "slots": plan.slots.data_ptr(),
        }
        for name, words in (
            ("decode", backend.decode_step(plan, self._shape)),
            ("chunk", backend.chunk_step(plan, self._shape)),
        ):
            step |= {f"{name} {index}": word for index, word in enumerate(words)}
        self._program.run(step)
        return buffers["sums"][:count].to(self._dtype)

    def _parts(self, rows: int) -> dict[str, int]:
        """How many parts each loop has."""
        found: dict[str, int] = {}
        for name, linear in zip(("qkv", "o", "gate_up", "down"), _linears(self._first), strict=True):
            found |= {f"copy_{name}": linear.product.copy_parts(rows), f"multiply_{name}": linear.product.parts()}
        sizes = {"norm": "sums", "turn_heads": "qkv", "write": "qkv", "activate": "inner"}
        for name, buffer in sizes.items():
            found[name] = min(rows, native.parts_for(rows * self._buffers[buffer].shape[1], fusing.LEAST))
        return found

    def _room(self, rows: int) -> dict[str, Tensor]:
        """Buffers of at least so many rows."""
        if not self._buffers or len(self._buffers["sums"]) < rows:
            qkv, o, gate_up, down = (one.product for one in _linears(self._first))
            widths = {"sums": qkv.inputs, "normed": qkv.inputs, "qkv": qkv.outputs, "attended": o.inputs}
            widths |= {"added": o.outputs, "gate_up": gate_up.outputs, "inner": down.inputs}
            widths["blocks"] = max(one.inputs for one in (qkv, o, gate_up, down))
            self._buffers = {
                name: torch.empty(rows, width, dtype=torch.float32 if name in SUMS else self._dtype)
                for name, width in widths.items()
            }
        return self._buffers


def _attend(name: str, count: int, of_layer: Sequence[native.Word]) -> Sequence[native.Word]:
    """Words of a loop of attention: ``count`` are the step's, the first of them its parts."""
    parts, *of_step = (f"{name} {index}" for index in range(count))
    return parts, *of_layer, *of_step


def _add(norm: fusing.FusedNorm) -> native.Entry:
    words = norm.weight.data_ptr(), "normed", "rows", norm.weight.shape[0], norm.epsilon
    return loops.add_rms_norm(norm.weight.dtype is torch.bfloat16), ("norm", "sums", "added", *words)


def _multiply(name: str, linear: Any, source: str, target: str) -> Iterator[native.Entry]:
    product: linears.TiledLinear = linear.product
    yield product.interleave, (f"copy_{name}", source, "blocks", "rows", product.words)
    words = "blocks", *product.addresses, target, "rows", product.words, product.outputs
    yield product.multiply_sums if target in SUMS else product.multiply, (f"multiply_{name}", *words)


def _feed_forward(mlp: Any) -> Iterator[native.Entry]:
    yield from _multiply("gate_up", mlp.gate_up, "normed", "gate_up")
    yield mlp.loop, ("activate", "gate_up", "inner", "rows", mlp.down.product.inputs)
    yield from _multiply("down", mlp.down, "inner", "added")

"""Layers of known classes, replaced by ones that do the same in fewer operators. Any other class stays as it is.

The three projections of attention become one matrix, those of a gated feed-forward network, too; norms, rotary
embedding and activation are compiled `loops`. Called when a model is loaded, before its linear layers are
packed. It needs a CPU and numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from stage_runtime.engines.autoregressive.kernels import native
from stage_runtime.engines.autoregressive.model import models
from stage_runtime.engines.autoregressive.model.paged_attention.attention import LayerCall

OWNER: Final = "transformers.models."
LEAST: Final = 1 << 14  # values for which a thread is worth its start


def fuse(model: nn.Module) -> dict[str, int]:
    """Replace the layers of known classes. Returns: how many, by the name of the class."""
    used: dict[str, int] = {}
    _fuse(model, used)
    return used


def _fuse(parent: nn.Module, used: dict[str, int]) -> None:
    for name, child in list(parent.named_children()):
        make = FUSED.get(type(child).__qualname__) if type(child).__module__.startswith(OWNER) else None
        made = None if make is None else make(child)
        if made is None:
            _fuse(child, used)
        else:
            setattr(parent, name, made)
            used[type(child).__qualname__] = used.get(type(child).__qualname__, 0) + 1


class FusedNorm(nn.Module):
    """Root mean square norm; of the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        from stage_runtime.engines.autoregressive.kernels import loops

        self.weight, self.epsilon = weight.detach(), native.bits(epsilon)
        self.loop = loops.rms_norm(weight.dtype is torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._run(x, out, x.numel() // dim, 1, dim, dim)
        return out

    def heads_(self, x: Tensor, heads: int) -> None:
        """Normalizes in place each of the first ``heads`` heads of rows ``[rows, heads, dim]``."""
        self._run(x, x, x.shape[0], heads, x.stride(0), x.stride(0))

    def _run(self, x: Tensor, out: Tensor, rows: int, heads: int, stride: int, stride_out: int) -> None:
        dim = self.weight.shape[0]
        parts = min(rows, native.parts_for(rows * heads * dim, LEAST))
        self.loop(
            parts,
            x.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            dim,
            stride,
            stride_out,
            self.epsilon,
        )


class FusedGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Module) -> None:
        super().__init__()
        from stage_runtime.engines.autoregressive.kernels import loops

        self.gate_up = _joined(gate, up)
        self.down = down
        self.loop = loops.silu_multiply(gate.weight.dtype is torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x).contiguous()
        dim = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], dim)
        rows = out.numel() // dim
        parts = min(rows, native.parts_for(out.numel(), LEAST))
        self.loop(parts, both.data_ptr(), out.data_ptr(), rows, dim)
        return self.down(out)  # type: ignore[no-any-return]


class FusedAttention(nn.Module):
    """Self attention with rotary embedding, and with norms of queries and keys where the class has them."""

    def __init__(self, attention: Any, window: int | None) -> None:
        super().__init__()
        from stage_runtime.engines.autoregressive.kernels import loops

        self.layer_idx, self.scaling, self.window = int(attention.layer_idx), float(attention.scaling), window
        self.dim = int(attention.head_dim)
        self.heads, self.kv_heads = (one.weight.shape[0] // self.dim for one in (attention.q_proj, attention.k_proj))
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.norms = [
            FusedNorm(one.weight, one.variance_epsilon)
            for one in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
            if one is not None
        ]
        self.loop = loops.rotate(attention.q_proj.weight.dtype is torch.bfloat16)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_others: Any
    ) -> tuple[Tensor, None]:
        qkv = self.qkv(hidden_states)[0].contiguous()
        rows = qkv.view(qkv.shape[0], -1, self.dim)
        heads = self.heads
        if self.norms:
            self.norms[0].heads_(rows[:, :heads], heads)
            self.norms[1].heads_(rows[:, heads:], self.kv_heads)
        cosines, sines = (one.expand(1, rows.shape[0], -1).contiguous() for one in position_embeddings)
        turned = heads + self.kv_heads
        parts = min(rows.shape[0], native.parts_for(qkv.numel(), LEAST))
        self.loop(
            parts,
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            rows.shape[0],
            turned,
            self.dim,
            qkv.stride(0),
        )
        q, k, v = rows[:, :heads], rows[:, heads:turned], rows[:, turned:]
        out = models.attend(LayerCall(self.layer_idx, q, k, v, self.scaling, self.window))
        return self.o_proj(out.reshape(1, rows.shape[0], -1)), None


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer whose output is theirs, one after the other."""
    first = layers[0]
    made = nn.Linear(first.in_features, sum(one.out_features for one in layers), bias=False, device="meta")
    made.weight = nn.Parameter(torch.cat([one.weight.detach() for one in layers]), requires_grad=False)
    if first.bias is not None:
        made.bias = nn.Parameter(torch.cat([one.bias.detach() for one in layers]), requires_grad=False)
    return made


def _norm(module: Any) -> nn.Module:
    return FusedNorm(module.weight, module.variance_epsilon)


def _gated(module: Any) -> nn.Module | None:
    if module.config.hidden_act not in ("silu", "swish"):
        return None
    return FusedGatedMLP(module.gate_proj, module.up_proj, module.down_proj)


def _attention(module: Any) -> nn.Module:
    return FusedAttention(module, getattr(module, "sliding_window", None))


def _windowed_attention(module: Any) -> nn.Module:
    return FusedAttention(module, getattr(module.config, "sliding_window", None))


#: Modules by the name of transformers' class. Each was compared with its source: same arguments, same order of
#: operations.
FUSED: Final[dict[str, Callable[[Any], nn.Module | None]]] = {
    "LlamaRMSNorm": _norm,
    "MistralRMSNorm": _norm,
    "Qwen2RMSNorm": _norm,
    "Qwen3RMSNorm": _norm,
    "LlamaMLP": _gated,
    "MistralMLP": _gated,
    "Qwen2MLP": _gated,
    "Qwen3MLP": _gated,
    "LlamaAttention": _attention,
    "MistralAttention": _windowed_attention,
    "Qwen2Attention": _attention,
    "Qwen3Attention": _attention,
}

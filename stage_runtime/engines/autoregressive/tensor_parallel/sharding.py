"""Cuts a model of transformers for one tensor-parallel rank, by the plan that its class declares.

A column-wise layer keeps its share of the outputs (so attention has its share of the heads, and the cache of theirs),
a row-wise one its share of the inputs, whose results the ranks add up. The head of the vocabulary keeps its share of
the tokens. All else is the same in every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stage_runtime.engines.autoregressive.model.models import UnsupportedModel
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import Ranks

SAME_IN_ALL = frozenset({"replicated_with_grad_allreduce"})


class RowShare(nn.Module):
    """A linear layer over a share of its inputs."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.share = _linear(_share(linear.weight, ranks, 1), None)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        whole = self._ranks.add_up(self.share(x))
        return whole if self._bias is None else whole + self._bias


class ExpertsShare(nn.Module):
    """Experts of a mixture, each with a share of its inner width. The router is the same in every rank."""

    def __init__(self, experts: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        weights: Any = experts
        halves = weights.gate_up_proj.chunk(2, 1)
        weights.gate_up_proj = _kept(torch.cat([_share(half, ranks, 1) for half in halves], 1))
        weights.down_proj = _kept(_share(weights.down_proj, ranks, 2))
        self.share = experts
        self._ranks = ranks

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return self._ranks.add_up(self.share(*given, **named))


class VocabularyShare(nn.Module):
    """The head over a share of the tokens. Returns the logits of all."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.share = _column_share(linear, ranks)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.join(self.share(x))


def shard(model: Any, ranks: Ranks) -> None:
    """Replace layers of ``model``, in place.

    Raises: UnsupportedModel: its class declares no plan, or one that cannot be followed.
    """
    text = model.config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(f"{type(model).__name__} declares no plan for tensor parallelism")
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for name, count in (("attention heads", text.num_attention_heads), ("KV heads", kv_heads)):
        if count % ranks.size:
            raise UnsupportedModel(f"{type(model).__name__}: {count} {name} cannot be shared by {ranks.size} ranks")
    base = getattr(model, model.base_model_prefix)
    for pattern, style in plan.items():
        for parent, name, child in list(_matching(base, pattern)):
            made = _made(child, style, ranks, f"{type(model).__name__}: {pattern}")
            if made is not None:
                setattr(parent, name, made)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % ranks.size == 0:
        model.set_output_embeddings(VocabularyShare(head, ranks))


def _made(child: Any, style: str, ranks: Ranks, where: str) -> nn.Module | None:
    if style in SAME_IN_ALL:
        return None
    if style == "moe_tp_experts":
        return _experts(child, ranks, where)
    if type(child) is not nn.Linear or style not in ("colwise", "rowwise"):
        raise UnsupportedModel(f"{where} is a {type(child).__name__} cut {style}, which the engine does not do")
    if (child.out_features if style == "colwise" else child.in_features) % ranks.size:
        raise UnsupportedModel(f"{where} cannot be shared by {ranks.size} ranks")
    return _column_share(child, ranks) if style == "colwise" else RowShare(child, ranks)


def _experts(child: Any, ranks: Ranks, where: str) -> ExpertsShare:
    """Joined as by transformers: ``[experts, 2 x inner, hidden]`` and ``[experts, hidden, inner]``."""
    weights = dict(child.named_parameters())
    if set(weights) != {"gate_up_proj", "down_proj"} or getattr(child, "is_transposed", False):
        raise UnsupportedModel(f"{where} is a {type(child).__name__} of another form, which the engine does not cut")
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    if gate_up.shape[1] != 2 * down.shape[2] or down.shape[2] % ranks.size:
        raise UnsupportedModel(f"{where} cannot be shared by {ranks.size} ranks")
    return ExpertsShare(child, ranks)


def _matching(base: nn.Module, pattern: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Modules whose name is ``pattern`` with numbers for the stars."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    for path, child in base.named_modules():
        if wanted.fullmatch(path):
            parent, _, name = path.rpartition(".")
            yield base.get_submodule(parent), name, child


def _column_share(linear: nn.Linear, ranks: Ranks) -> nn.Linear:
    bias = None if linear.bias is None else _share(linear.bias, ranks, 0)
    return _linear(_share(linear.weight, ranks, 0), bias)


def _share(values: Tensor, ranks: Ranks, dimension: int) -> Tensor:
    return values.detach().chunk(ranks.size, dimension)[ranks.rank].clone()


def _kept(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made

"""The parts of a decoder's layers beside attention, compiled by torch when a stage asks for it.

Attention stays as it is: it reads pages, and its shapes differ in each step. When anything goes wrong, at load or
later, all parts are computed as they were (`Parts.eager`). Called when a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from stage_runtime.engines.autoregressive.model import adapted
from stage_runtime.errors import describe

log = logging.getLogger(__name__)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
ATTENTION_NAMES = ("attn", "attention")


def by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled with shapes as symbols, because each step has another number of tokens."""
    from torch._inductor import config

    config.compile_threads = 1  # else it starts processes of its own, which stay
    return torch.compile(function, dynamic=True)


class Parts:
    """The compiled parts of one model. eager: why they are no longer used; None while they are."""

    def __init__(self) -> None:
        self.count = 0
        self.eager: str | None = None

    def fail(self, error: Exception) -> None:
        if self.eager is None:
            self.eager = describe(error)
            log.warning("compiled layers are computed as they were before: %s", self.eager)


class CompiledPart(nn.Module):
    """One part. An exception of its compilation is raised again only if the part itself raises it."""

    def __init__(self, inner: nn.Module, parts: Parts, compiler: Compiler) -> None:
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._compiled = compiler(inner.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._parts.eager is not None or adapted.current() is not None:  # adapters' hooks stand inside
            return self.inner(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            found = self.inner(*args, **kwargs)  # the part's own error, if it is one
            self._parts.fail(error)
            return found


def compile_parts(model: nn.Module, compiler: Compiler = by_torch) -> Parts:
    """Replace, in each layer that has attention, its other parts."""
    parts = Parts()
    for layer in list(model.modules()):
        children = dict(layer.named_children())
        if not any(_is_attention(name) for name in children):
            continue
        for name, child in children.items():
            if not _is_attention(name) and any(True for _ in child.parameters()):
                setattr(layer, name, CompiledPart(child, parts, compiler))
                parts.count += 1
    return parts


def _is_attention(name: str) -> bool:
    return any(one in name for one in ATTENTION_NAMES) and "norm" not in name

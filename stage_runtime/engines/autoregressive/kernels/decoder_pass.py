"""A pass through a decoder of a known class, without transformers' code around its layers. Any other keeps that code.

It takes decoders whose layers `decoder_layers` has joined. The work of transformers beside them in each step (masks,
caches, outputs as objects, cosines and sines of all positions) takes as long as 1 to 3 % of a step on a CPU, and
changes nothing here. Made when a model is loaded; called by `models.PagedModel`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from stage_runtime.engines.autoregressive.kernels import decoder_layers, fusing
from stage_runtime.engines.autoregressive.model import models

#: Each was compared with its source: embedding, layers, norm, head, and nothing between them.
CLASSES: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
#: Kinds of rotary embedding whose angles depend on a token's position alone, and not on the others of its pass.
ROTARY: Final = frozenset({"default", "linear", "llama3", "yarn"})
FIRST_POSITIONS: Final = 1024


class DecoderPass:
    """Called by several engines at the same time if they share the decoder."""

    def __init__(self, model: Any, layers: decoder_layers.DecoderLayers) -> None:
        inner = model.model
        self._embedding: Tensor = inner.embed_tokens.weight.detach()
        self._rotary, self._layers, self._norm, self._head = inner.rotary_emb, layers, inner.norm, model.lm_head
        self._turns = self._angles(FIRST_POSITIONS)

    def _angles(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, each ``[count, dim]``."""
        with torch.inference_mode():
            cosines, sines = self._rotary(self._embedding[:1], torch.arange(count)[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    def run(self, batch: models.FlatBatch) -> Tensor | None:
        """Logits in f32, within a pass of `models.PagedModel`. None: the layers have no program for this step."""
        ids, positions = batch.ids, batch.positions
        backend, plan = models.current()
        if not self._layers.computes(len(ids), backend, plan):
            return None
        turns = self._turns
        last = int(positions.max())
        if last >= len(turns[0]):
            turns = self._turns = self._angles(1 << (last + 1).bit_length())
        hidden = self._embedding.index_select(0, ids)
        if batch.embeddings is not None:
            hidden = hidden.index_copy(0, *batch.embeddings)
        sums = self._layers.run(hidden, [one.index_select(0, positions) for one in turns], backend, plan)
        # It has one more dimension, as transformers calls its head: `PagedModel.forward` reads it there.
        logits: Tensor = self._head(self._norm(sums.index_select(0, batch.rows))[None])
        return logits[0].float()


def of(model: Any) -> DecoderPass | None:
    """None: the model is of another class, or its layers are not joined."""
    if not _known(model):
        return None
    layers = list(model.model.layers)
    if len(layers) != 1 or not isinstance(layers[0], decoder_layers.DecoderLayers):
        return None
    inner = model.model
    fits = isinstance(inner.norm, fusing.FusedNorm) and getattr(inner.rotary_emb, "rope_type", None) in ROTARY
    return DecoderPass(model, layers[0]) if fits else None


def _known(model: Any) -> bool:
    kind = type(model)
    return kind.__qualname__ in CLASSES and kind.__module__.startswith(fusing.OWNER)

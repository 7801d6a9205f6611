"""CSM's backbone as an `omni.Decoder`: the first code of each frame, and after each step the depth decoder's others.

A stage gives the prompt as rows, by `text_rows` of the same checkpoint, since the backbone's tokens are codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stage_runtime as omni
from stage_models.causal import CausalModel
from stage_runtime.errors import ConfigurationError


class Backbone(CausalModel):
    """CSM's backbone and its head. A whole frame ends an answer, not its first code."""

    def __init__(self, model: Any) -> None:
        """model: `CsmForConditionalGeneration`."""
        backbone = model.backbone_model
        first = backbone.embed_tokens.embed_audio_tokens.weight[: model.config.vocab_size]
        embedding = nn.Embedding(first.shape[0], first.shape[1], _weight=first.detach())
        super().__init__(backbone, model.lm_head, embedding, model.config, end_id=None)
        self._depth = [model.depth_decoder]  # in a list: not a module of this one

    def set_attn_implementation(self, name: str) -> None:
        super().set_attn_implementation(name)
        self._depth[0].set_attn_implementation("sdpa")  # its config is a part of the backbone's


class Csm:
    """`omni.Decoder`."""

    text = False

    def load(self, model: str, *, revision: str | None, dtype: Any, device: str) -> Backbone:
        from transformers import CsmForConditionalGeneration

        loaded: Any
        loaded, report = CsmForConditionalGeneration.from_pretrained(
            model, revision=revision, dtype=dtype, output_loading_info=True
        )
        if report["missing_keys"]:
            raise ConfigurationError(f"{model}: weights are missing: {', '.join(sorted(report['missing_keys'])[:3])}")
        return self.take(loaded.eval().to(device))

    def take(self, model: Any) -> Backbone:
        """The same as `load`, for a model in memory."""
        config = model.config
        self._depth = model.depth_decoder
        self._frames = model.backbone_model.embed_tokens
        self._codebooks = int(config.num_codebooks)
        self._end = int(config.codebook_eos_token_id)
        return Backbone(model)

    def after_step(self, step: omni.Step) -> omni.NextRows:
        """emitted: the whole frame, ``[B, codebooks]``. A frame of end codes ends its answer."""
        codes = self._rest(step.hidden, step.tokens)
        ends = (codes[:, :-1] == self._end).all(-1)
        return omni.NextRows(rows=self._frames(codes[:, None])[:, 0], emitted=codes, ends=ends.tolist())

    def _rest(self, hidden: Tensor, first: Tensor) -> Tensor:
        """The codes of each frame, greedily: ``[B, codebooks]``. hidden: of the backbone, ``[B, hidden]``."""
        depth = self._depth
        codes = first[:, None]
        embedded = [hidden.to(depth.dtype)[:, None]]
        for book in range(1, self._codebooks):
            # Position 0 has the backbone's hidden state in place of a code, so code k - 1 stands at position k.
            embedded.append(depth.model.embed_tokens(codes[:, -1:] + (book - 1) * depth.vocab_size))
            rows = torch.cat(embedded, dim=1)
            # transformers 5.23 looks for packed sequences without a mask, which fails for more than one request.
            mask = torch.ones(rows.shape[:2], dtype=torch.long, device=rows.device)
            out = depth.model(inputs_embeds=rows, attention_mask=mask, use_cache=False, return_dict=True)
            logits = out.last_hidden_state[:, -1] @ depth.codebooks_head.weight[book - 1]
            codes = torch.cat([codes, logits.float().argmax(-1)[:, None]], dim=1)
        return codes


def text_rows(model: Any, ids: Tensor) -> Tensor:
    """The input rows of text tokens, ``[tokens, hidden]``. model: the whole one, or its embedding of text."""
    embedding = getattr(model, "embed_text_tokens", model)
    with torch.no_grad():
        rows: Tensor = embedding(ids)
    return rows

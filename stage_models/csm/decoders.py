"""CSM's backbone as an `omni.Decoder`: the first code of each frame, and after each step the depth decoder's others.

A stage gives the prompt as rows, by `text_rows` of the same checkpoint, since the backbone's tokens are codes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import stage_runtime as omni
from stage_runtime.errors import ConfigurationError


class Backbone(nn.Module):
    """The backbone and its head, called as transformers' causal language models."""

    def __init__(self, model: Any) -> None:
        """model: `CsmForConditionalGeneration`."""
        super().__init__()
        self.backbone = model.backbone_model
        self._depth = [model.depth_decoder]  # in a list: not a module of this one
        self.head = model.lm_head
        self.config = model.config
        self.generation_config = SimpleNamespace(eos_token_id=None)  # a whole frame ends an answer, not its first code
        first = model.backbone_model.embed_tokens.embed_audio_tokens.weight[: model.config.vocab_size]
        embedding: Any = nn.Embedding
        self.embedding: Any = embedding.from_pretrained(first)

    def set_attn_implementation(self, name: str) -> None:
        self.backbone.set_attn_implementation(name)
        self._depth[0].set_attn_implementation("sdpa")  # its config is a part of the backbone's

    def get_decoder(self) -> Any:
        return self.backbone

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
        logits_to_keep: Tensor | None = None,
    ) -> Any:
        """input_ids: ``[1, T]``, first codes. logits_to_keep: which tokens' logits are computed."""
        rows = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        out = self.backbone(inputs_embeds=rows, position_ids=position_ids, use_cache=use_cache, return_dict=True)
        hidden = out.last_hidden_state
        return SimpleNamespace(logits=self.head(hidden if logits_to_keep is None else hidden[:, logits_to_keep]))


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
        """As `load`, of a model at hand."""
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
            out = depth.model(inputs_embeds=torch.cat(embedded, dim=1), use_cache=False, return_dict=True)
            logits = out.last_hidden_state[:, -1] @ depth.codebooks_head.weight[book - 1]
            codes = torch.cat([codes, logits.float().argmax(-1)[:, None]], dim=1)
        return codes


def text_rows(model: Any, ids: Tensor) -> Tensor:
    """The input rows of text tokens, ``[tokens, hidden]``. model: the whole one, or its embedding of text."""
    embedding = getattr(model, "embed_text_tokens", model)
    with torch.no_grad():
        rows: Tensor = embedding(ids)
    return rows

"""A decoder of transformers and its head, called as a causal language model: what `omni.Decoder.load` gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class CausalModel(nn.Module):
    base_model_prefix = "decoder"  #: The name that transformers gives: where the layers are, for tensor parallelism.

    def __init__(self, decoder: Any, head: Any, embedding: Any, config: Any, *, end_id: int | None) -> None:
        """decoder: takes ``inputs_embeds`` and ``position_ids``. end_id: of the token that ends an answer, if any."""
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.embedding = embedding
        self.config = config
        self.generation_config = SimpleNamespace(eos_token_id=end_id)
        #: Ids that are never chosen; ``[n]``.
        self.suppressed: Tensor
        self.register_buffer("suppressed", torch.empty(0, dtype=torch.long), persistent=False)

    def set_attn_implementation(self, name: str) -> None:
        self.decoder.set_attn_implementation(name)

    def get_decoder(self) -> Any:
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def get_output_embeddings(self) -> Any:
        return self.head

    def set_output_embeddings(self, head: Any) -> None:
        self.head = head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
        logits_to_keep: Tensor | None = None,
    ) -> Any:
        """input_ids: ``[1, T]``. position_ids: ``[1, T]`` or ``[3, 1, T]``. logits_to_keep: tokens whose logits are
        computed.
        """
        rows = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        out = self.decoder(inputs_embeds=rows, position_ids=position_ids, use_cache=use_cache, return_dict=True)
        hidden = out.last_hidden_state
        logits = self.head(hidden if logits_to_keep is None else hidden[:, logits_to_keep])
        if self.suppressed.numel():
            logits = logits.index_fill(-1, self.suppressed, float("-inf"))
        return SimpleNamespace(logits=logits)

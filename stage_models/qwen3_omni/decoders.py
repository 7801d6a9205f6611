"""The two decoders of Qwen3-Omni as `omni.Decoder`s: the thinker's text model, and the talker with its code predictor.

Each loads its own part of the checkpoint alone. Named by the factories in `stages`; made where the model is computed.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

import stage_runtime as omni
from stage_models.causal import CausalModel
from stage_models.qwen3_omni import checkpoint

CONTROL: Final = 1024  #: The talker's last ids are control tokens; of these only the end may be chosen.
#: How the codes of a frame after its first one are drawn, at temperature 1, whatever the talker's own parameters are.
#: Source: ``prepare_inputs_for_generation`` of the talker, transformers 5.23.
TOP_K: Final = 50
TOP_P: Final = 0.8


class Thinker:
    """`omni.Decoder`: text, with rows of pictures and sounds in its prompt."""

    def load(self, model: str, *, revision: str | None, dtype: Any, device: str) -> CausalModel:
        name = str(dtype).removeprefix("torch.")
        config = checkpoint.config_of(model, revision)
        text = checkpoint.load(model, "thinker", dtype=name, device=device, revision=revision)
        weight = checkpoint.tensor(model, "thinker.lm_head.weight", dtype=name, revision=revision).to(device)
        end = int(config.im_end_token_id)
        return CausalModel(text, _linear(weight), text.embed_tokens, text.config, end_id=end)


class Talker:
    """`omni.Decoder`: the first code of each frame; after each step, the other codes and the next input."""

    text = False

    def load(self, model: str, *, revision: str | None, dtype: Any, device: str) -> CausalModel:
        name = str(dtype).removeprefix("torch.")
        talker = checkpoint.load(model, "talker", dtype=name, device=device, revision=revision)
        config = talker.config
        end, size = int(config.codec_eos_token_id), int(config.text_config.vocab_size)
        self._codes = CodePredictor(talker.code_predictor)
        self._first = talker.model.codec_embedding
        causal = CausalModel(talker.model, talker.codec_head, self._first, config.text_config, end_id=end)
        never = [one for one in range(size - CONTROL, size) if one != end]
        causal.suppressed = torch.tensor(never, device=device)
        return causal

    def after_step(self, step: omni.Step) -> omni.NextRows:
        """emitted: the whole frame, ``[B, groups]``. rows: the sum of its codes' embeddings."""
        first = self._first(step.tokens)
        codes, rows = self._codes.predict(step.hidden, first, step)
        frames = torch.cat([step.tokens[:, None], codes], dim=1)
        return omni.NextRows(rows=torch.cat([first[:, None], *rows], dim=1).sum(1), emitted=frames)


class CodePredictor:
    """The codes of a frame after its first one, for a batch: a small decoder over ``groups`` positions, no cache.

    Its sequences are so short that computing them anew at each position costs less than keeping their keys.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._heads = list(model.lm_head)
        self._embeddings = list(model.model.codec_embedding)

    def predict(self, hidden: Tensor, first: Tensor, step: omni.Step) -> tuple[Tensor, list[Tensor]]:
        """hidden, first: ``[B, H]``. Returns: codes ``[B, groups - 1]``, and of each the embedding ``[B, 1, H]``."""
        inputs = torch.stack([hidden.to(first.dtype), first], dim=1)
        numbers = step.uniform(len(self._heads)) if not all(one.greedy for one in step.sampling) else None
        codes: list[Tensor] = []
        rows: list[Tensor] = []
        for index, head in enumerate(self._heads):
            out = self._model.model(inputs_embeds=inputs, use_cache=False, return_dict=True).last_hidden_state[:, -1]
            logits = head(out).float()
            code = logits.argmax(-1)
            if numbers is not None:
                code = _drawn(logits, code, numbers[:, index], step)
            row = self._embeddings[index](code)[:, None]
            codes.append(code)
            rows.append(row)
            inputs = torch.cat([inputs, row], dim=1)
        return torch.stack(codes, dim=1), rows


def _drawn(logits: Tensor, best: Tensor, numbers: Tensor, step: omni.Step) -> Tensor:
    """A code of each request by `TOP_K` and `TOP_P`; the best one where it is greedy."""
    values, order = (one[:, :TOP_K] for one in logits.sort(descending=True))
    weights = values.softmax(-1).double()
    weights = torch.where(weights.cumsum(-1) - weights < TOP_P, weights, 0.0)
    sums = weights.cumsum(-1)
    places = torch.searchsorted(sums, sums[:, -1:] * numbers[:, None].to(sums), right=True)
    last = (weights > 0).sum(-1, keepdim=True) - 1
    drawn = order.gather(1, places.minimum(last))[:, 0]
    greedy = torch.tensor([one.greedy for one in step.sampling], device=best.device)
    return torch.where(greedy, best, drawn)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made

"""The talker's prompt and its stream of rows, from what the thinker has seen and written.

This module has the small modules of the talker that make its inputs; its decoder is in `decoders`. Called by the
talker's stage, in the stage's own process.

Source: ``Qwen3OmniMoeForConditionalGeneration.generate`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

import stage_runtime as omni
from stage_models.qwen3_omni import checkpoint, values
from stage_models.qwen3_omni.positions import positions

ROLE_TOKENS: Final = 3  #: ``<|im_start|>assistant\n``, before the answer's first token.
PADS: Final = 4  #: Text rows of the tokens that choose language and voice.


class Speaking:
    """The parts of one checkpoint that speaking needs."""

    def __init__(self, model: str, *, dtype: str = "float32", revision: str | None = None) -> None:
        config = checkpoint.config_of(model, revision)
        thinker, talker = config.thinker_config, config.talker_config
        self._image = int(thinker.image_token_id)
        self._media = {int(thinker.image_token_id), int(thinker.audio_token_id)}
        self._im_start, self._user = int(config.im_start_token_id), int(config.user_token_id)
        self._assistant, self._pad_id = int(config.assistant_token_id), int(config.tts_pad_token_id)
        self._merge = int(talker.spatial_merge_size)
        self._voices = {str(name): int(token) for name, token in talker.speaker_id.items()}
        self._text = _projection(model, "text_projection", talker, dtype, revision)
        self._hidden = _projection(model, "hidden_projection", talker, dtype, revision)
        self._codec = checkpoint.tensor(model, "talker.model.codec_embedding.weight", dtype=dtype, revision=revision)
        special = [int(config.tts_bos_token_id), int(config.tts_eos_token_id), self._pad_id]
        rows = checkpoint.rows(model, "thinker.model.embed_tokens.weight", special, dtype=dtype, revision=revision)
        with torch.no_grad():
            self._bos, self._eos, self._pad = self._text(rows).split(1)
        self._before_voice = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        self._after_voice = [talker.codec_pad_id, talker.codec_bos_id]
        self._dtype = getattr(torch, dtype)

    def stream(self, chunk: omni.Chunk) -> Any:
        """`omni.Autoregressive.stream` of the talker: the prompt ends with the first row that was written."""
        match chunk.data:
            case values.Opening():
                return self._opening(chunk.data)
            case values.Written():
                return self._written(chunk.data)
        raise TypeError(f"expected Opening or Written from the thinker, got {type(chunk.data).__name__}")

    @torch.no_grad()
    def _opening(self, opening: values.Opening) -> omni.Prompt:
        """The parts of users, then the beginning of the answer, all but its first word."""
        tokens = torch.tensor(opening.tokens)
        users = self._of_users(tokens)
        media = torch.tensor([token in self._media for token in opening.tokens])
        rows = torch.empty(len(tokens), self._bos.shape[1], dtype=self._dtype)
        if bool(media.any()):
            rows[media] = self._hidden(opening.hidden.to(self._dtype))
        rows[~media] = self._text(opening.embeddings[~media].to(self._dtype))
        start = len(tokens) - ROLE_TOKENS
        voice = torch.tensor([*self._before_voice, self._voices[opening.voice], *self._after_voice])
        text = torch.cat([rows[start:], self._pad.expand(PADS, -1), self._bos])
        codes = torch.cat([torch.zeros(ROLE_TOKENS, rows.shape[1], dtype=self._dtype), self._codec[voice[:-1]]])
        ids = [*tokens[users].tolist(), *[self._pad_id] * (ROLE_TOKENS + len(voice))]
        where, delta = positions(ids, self._image, self._grids(opening, users), self._merge)
        parts = torch.cat([rows[users], text + codes])
        return omni.Prompt(parts=[parts], positions=torch.from_numpy(where[:, : len(parts)]), position_delta=delta)

    @torch.no_grad()
    def _written(self, written: values.Written) -> Any:
        text = self._text(written.rows.to(self._dtype))
        if not written.begins:
            return omni.Feed(rows=text)
        code = self._codec[self._after_voice[-1]][None]
        if not len(text):  # the end of the text is all that there is to speak
            return [self._eos + code, omni.Feed(end=self._pad[0], pad=self._pad[0])]
        feed = omni.Feed(rows=text[1:] if len(text) > 1 else None, end=self._eos[0], pad=self._pad[0])
        return [text[:1] + code, feed]

    def _of_users(self, tokens: Tensor) -> Tensor:
        """The tokens of users' messages: from ``<|im_start|>user`` to the next ``<|im_start|>``."""
        starts = torch.where(tokens == self._im_start, torch.arange(len(tokens)), torch.tensor(-1))
        begun = starts.cummax(0).values.clamp_min(0)
        found: Tensor = tokens[(begun + 1).clamp_max(len(tokens) - 1)] == self._user
        return found

    def _grids(self, opening: values.Opening, users: Tensor) -> list[list[int]]:
        """The grids of the images in users' messages."""
        found = []
        at = 0
        tokens = opening.tokens
        for grid in opening.grids:
            at = tokens.index(self._image, at)
            if bool(users[at]):
                found.append(grid)
            at += values.rows_of(grid, self._merge)
        return found


def _projection(model: str, name: str, config: Any, dtype: str, revision: str | None) -> nn.Module:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP

    with torch.device("meta"):
        made: Any = Qwen3OmniMoeTalkerResizeMLP(config)
    weights = {
        key: checkpoint.tensor(model, f"talker.{name}.{key}", dtype=dtype, revision=revision)
        for key in made.state_dict()
    }
    made.load_state_dict(weights, assign=True)
    found: nn.Module = made.eval()
    return found


def voices(model: str, revision: str | None = None) -> Sequence[str]:
    return sorted(checkpoint.config_of(model, revision).talker_config.speaker_id)
